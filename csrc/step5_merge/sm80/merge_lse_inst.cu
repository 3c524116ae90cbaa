#include <algorithm>

#include "configs/built_configs.h"
#include "device/cuda_errors.h"
#include "device/element_types.cuh"
#include "device/persistent_grid.cuh"
#include "step5_merge/sm80/merge_lse_kernel.cuh"

namespace msa {
namespace {

namespace sm80 = merge_lse::sm80;

template <typename Element, int kSegment>
void launch(const MergeLseParams& params, const ExecContext& context) {
  constexpr auto kernel = sm80::msa_merge_lse_sm80_kernel<Element, kSegment>;
  constexpr int kThreads = sm80::kWarps * 32;
  constexpr int64_t kCtaRows = sm80::MergeWarp<Element, kSegment>::kTileRows * sm80::kWarps;
  const int64_t rows = params.num_tokens * params.num_heads;
  const int64_t tiles = (rows + kCtaRows - 1) / kCtaRows;
  const int64_t resident =
      resident_ctas<kernel>(context.op, context.device, kThreads, sm80::kSharedBytes);
  kernel<<<static_cast<unsigned>(std::min(tiles, resident)), kThreads, sm80::kSharedBytes,
           static_cast<cudaStream_t>(context.stream)>>>(params);
  check_cuda(context.op, cudaGetLastError(), "the launch of msa_merge_lse_sm80_kernel");
}

template <DType dtype>
void run_merge_lse_sm80(const MergeLseParams& params, const ExecContext& context) {
  using Element = typename ElementOf<dtype>::Type;
  // The smallest segment that holds all parts of a row: a unit then takes the most rows.
  if (params.num_parts <= 2) return launch<Element, 2>(params, context);
  if (params.num_parts <= 4) return launch<Element, 4>(params, context);
  if (params.num_parts <= 8) return launch<Element, 8>(params, context);
  return launch<Element, 16>(params, context);
}

}  // namespace

void run_merge_lse(const MergeLseParams& params, const ExecContext& context) {
#define MSA_RUN(op, arch, config_dtype, cache_dtype)                \
  if (params.dtype == DType::config_dtype) {                        \
    return run_##op##_##arch<DType::config_dtype>(params, context); \
  }
  MSA_CUDA_MERGE_LSE_CONFIGS(MSA_RUN)
#undef MSA_RUN
  throw_not_built(context.op, params.dtype);
}

}  // namespace msa
