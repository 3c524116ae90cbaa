// Host side of sparse_prefill: chooses between Hopper's kernels (sm90/) and the portable one, and
// launches the latter.
#include "configs/built_configs.h"
#include "device/architecture.h"
#include "device/cuda_errors.h"
#include "device/persistent_grid.cuh"
#include "step4_attend/attend_params.h"
#include "step4_attend/sm80/prefill_kernel.cuh"

namespace msa {
namespace {

namespace sm80 = sparse_prefill::sm80;

template <DType dtype, DType cache_dtype>
void run_sparse_prefill_sm80(const SparseAttendParams& params, const ExecContext& context) {
  static_assert(dtype == DType::kBFloat16, "q's fragments are loaded as they are");
  constexpr auto kernel = sm80::msa_sparse_prefill_sm80_kernel<cache_dtype>;
  const int tile_tokens = sm80::kTileRows / static_cast<int>(params.group_size);
  const int64_t tiles = (params.batch.num_tokens + tile_tokens - 1) / tile_tokens;
  allow_shared_memory<kernel>(context.op, context.device, sm80::shared_bytes(sm80::kTileRows));
  kernel<<<static_cast<unsigned>(params.num_kv_heads * tiles), sm80::kThreads,
           sm80::shared_bytes(tile_tokens), static_cast<cudaStream_t>(context.stream)>>>(params);
  check_cuda(context.op, cudaGetLastError(), "the launch of msa_sparse_prefill_sm80_kernel");
}

bool takes_sm90(const SparseAttendParams& params, const ExecContext& context) {
  return runs_sm90(context, params.q.dtype, params.k_cache.dtype) && fits_tensor_maps(params);
}

}  // namespace

int64_t sparse_prefill_workspace_bytes(const SparseAttendParams& params,
                                       const ExecContext& context) {
  return takes_sm90(params, context) ? sparse_prefill_sm90_workspace_bytes(params) : 0;
}

void run_sparse_prefill(const SparseAttendParams& params, const ExecContext& context) {
  if (takes_sm90(params, context)) return run_sparse_prefill_sm90(params, context);
#define MSA_RUN(op, arch, config_dtype, config_cache)                                         \
  if (params.q.dtype == DType::config_dtype && params.k_cache.dtype == DType::config_cache) { \
    return run_##op##_##arch<DType::config_dtype, DType::config_cache>(params, context);      \
  }
  MSA_CUDA_SPARSE_PREFILL_SM80_CONFIGS(MSA_RUN)
#undef MSA_RUN
  throw_not_built(context.op, params.q.dtype, params.k_cache.dtype);
}

}  // namespace msa
