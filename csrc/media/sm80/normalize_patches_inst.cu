#include "configs/built_configs.h"
#include "device/cuda_errors.h"
#include "device/element_types.cuh"
#include "media/sm80/normalize_patches_kernel.cuh"

namespace msa {
namespace {

namespace sm80 = normalize_patches::sm80;

template <typename Element, int kCopies, int kWords>
void launch(const NormalizePatchesParams& params, const ExecContext& context) {
  constexpr int64_t kTileUnits = sm80::kThreads * sm80::kUnroll;
  const int64_t run = params.frames * params.plane / 4;
  sm80::PatchGrid grid{};
  grid.num_units = params.num_rows * kChannels * run / kWords;
  grid.run = static_cast<uint32_t>(run);
  grid.run_magic = static_cast<uint32_t>((uint64_t{1} << 32) / static_cast<uint64_t>(run) + 1);
  const int64_t tiles = (grid.num_units + kTileUnits - 1) / kTileUnits;
  sm80::msa_normalize_patches_sm80_kernel<Element, kCopies, kWords>
      <<<static_cast<unsigned>(tiles), sm80::kThreads, 0,
         static_cast<cudaStream_t>(context.stream)>>>(params, grid);
  check_cuda(context.op, cudaGetLastError(), "the launch of msa_normalize_patches_sm80_kernel");
}

template <DType dtype>
void run_normalize_patches_sm80(const NormalizePatchesParams& params, const ExecContext& context) {
  using Element = typename ElementOf<dtype>::Type;
  if (params.frames != params.temporal) return launch<Element, 2, 1>(params, context);
  if constexpr (sizeof(Element) == 2) {
    const bool even = params.num_rows * kChannels * params.frames * params.plane % 8 == 0;
    const bool aligned = reinterpret_cast<uintptr_t>(params.patches) % 8 == 0;
    if (even && aligned) return launch<Element, 1, 2>(params, context);
  }
  launch<Element, 1, 1>(params, context);
}

}  // namespace

void run_normalize_patches(const NormalizePatchesParams& params, const ExecContext& context) {
#define MSA_RUN(op, arch, config_dtype, cache_dtype)                \
  if (params.dtype == DType::config_dtype) {                        \
    return run_##op##_##arch<DType::config_dtype>(params, context); \
  }
  MSA_CUDA_NORMALIZE_PATCHES_CONFIGS(MSA_RUN)
#undef MSA_RUN
  throw_not_built(context.op, params.dtype);
}

}  // namespace msa
