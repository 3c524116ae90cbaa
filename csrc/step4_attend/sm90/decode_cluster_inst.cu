#include "step4_attend/sm90/decode_cluster_kernel.cuh"

namespace msa {
namespace {

namespace sm90 = decode::sm90;

template <typename Element, bool kSparse>
void launch(const DecodeParams& params, const ExecContext& context) {
  constexpr auto kernel = sm90::msa_decode_cluster_sm90_kernel<Element, kSparse>;
  constexpr int kSharedBytes = sizeof(sm90::ClusterStorage);
  may_overlap<kernel>(context, kSharedBytes);  // compiled for sm_90a alone: always
  if (params.splits > 8) {                     // past what every GPU with clusters takes
    check_cuda(context.op,
               cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
               "allowing clusters of 16");
  }
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(params.splits), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(params.num_units * params.splits));
  config.blockDim = dim3(sm90::kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = static_cast<cudaStream_t>(context.stream);
  config.attrs = attributes;
  config.numAttrs = 2;
  check_cuda(context.op, cudaLaunchKernelEx(&config, kernel, params),
             "launching msa_decode_cluster_sm90_kernel");
}

template <bool kSparse>
void launch_for(const DecodeParams& params, const ExecContext& context) {
  if (params.attend.k_cache.dtype == DType::kFloat8E4M3) {
    return launch<__nv_fp8_e4m3, kSparse>(params, context);
  }
  return launch<__nv_bfloat16, kSparse>(params, context);
}

}  // namespace

void run_decode_cluster(const DecodeParams& params, const ExecContext& context, bool sparse) {
  if (sparse) return launch_for<true>(params, context);
  return launch_for<false>(params, context);
}

}  // namespace msa
