#include <algorithm>

#include "configs/built_configs.h"
#include "device/cuda_errors.h"
#include "device/element_types.cuh"
#include "step0_write/sm80/write_cache_kernel.cuh"

namespace msa {
namespace {

namespace sm80 = write_cache::sm80;

int32_t element_size(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kBFloat16 ? 2 : 1;
}

template <DType dtype, DType cache_dtype>
void run_write_cache_sm80(const WriteCacheParams& params, const ExecContext& context) {
  using Element = typename ElementOf<dtype>::Type;
  // From this many units on, a CTA takes enough of them to unroll its loop.
  constexpr int64_t kLargeCall = 1 << 18;
  sm80::WriteGrid grid{};
  grid.num_kv_heads = static_cast<int32_t>(params.num_kv_heads);
  grid.index_size = element_size(params.index_k.dtype);
  grid.index_vectors = params.index_k.data ? kHeadDim * grid.index_size / 16 : 0;
  const int64_t token_vectors =
      2 * params.num_kv_heads * kHeadDim * int64_t{sizeof(Element)} / 16 + grid.index_vectors;
  grid.token_vectors = static_cast<int32_t>(token_vectors);
  const int64_t cta_units = params.num_tokens * token_vectors >= kLargeCall
                                ? sm80::kThreads * sm80::kUnroll
                                : sm80::kThreads;
  grid.group = static_cast<int32_t>(std::max<int64_t>(cta_units / token_vectors, 1));
  const int64_t ctas = (params.num_tokens + grid.group - 1) / grid.group;
  sm80::msa_write_cache_sm80_kernel<Element, cache_dtype != dtype>
      <<<static_cast<unsigned>(ctas), sm80::kThreads, 0,
         static_cast<cudaStream_t>(context.stream)>>>(params, grid);
  check_cuda(context.op, cudaGetLastError(), "the launch of msa_write_cache_sm80_kernel");
}

}  // namespace

void run_write_cache(const WriteCacheParams& params, const ExecContext& context) {
#define MSA_RUN(op, arch, config_dtype, config_cache_dtype)                                    \
  if (params.k.dtype == DType::config_dtype &&                                                 \
      params.k_cache.dtype == DType::config_cache_dtype) {                                     \
    return run_##op##_##arch<DType::config_dtype, DType::config_cache_dtype>(params, context); \
  }
  MSA_CUDA_WRITE_CACHE_CONFIGS(MSA_RUN)
#undef MSA_RUN
  throw_not_built(context.op, params.k.dtype, params.k_cache.dtype);
}

}  // namespace msa
