// Host side of the quad kernel: in how many parts a unit is cut, which the driver has a say in.
#include "device/sm90/cluster_launch.cuh"
#include "step4_attend/sm90/decode_quad_kernel.cuh"

namespace msa {
namespace {

constexpr auto kKernel = decode::sm90::msa_decode_quad_sm90_kernel;
constexpr int kSharedBytes = sizeof(decode::sm90::QuadStorage);

int64_t quads(const DecodeParams& params) {
  return (params.attend.batch.num_tokens + decode::sm90::kQuadTokens - 1) /
         decode::sm90::kQuadTokens;
}

}  // namespace

int32_t decode_quad_splits(const DecodeParams& params, const ExecContext& context) {
  const int64_t units = quads(params) * params.attend.num_kv_heads;
  for (int32_t splits = decode::sm90::kMaxQuadSplits; splits > 0; splits /= 2) {
    if (units <= sm90::resident_clusters<kKernel>(splits, decode::sm90::kQuadThreads, kSharedBytes,
                                                  context)) {
      return splits;
    }
  }
  return 0;
}

void run_decode_quads(const DecodeParams& params, const ExecContext& context) {
  sm90::allow_large_clusters<kKernel>(context, kSharedBytes);
  const sm90::ClusterLaunch launch(
      params.splits,
      dim3(static_cast<unsigned>(params.splits), static_cast<unsigned>(quads(params)),
           static_cast<unsigned>(params.attend.num_kv_heads)),
      decode::sm90::kQuadThreads, kSharedBytes, context);
  const auto group = static_cast<int32_t>(params.attend.group_size);
  const int32_t unit_rows = decode::sm90::kQuadTokens * group;
  const int32_t rows = (unit_rows + params.splits - 1) / params.splits;
  const auto inverse_of_small = [](int32_t divisor) { return (65536 + divisor - 1) / divisor; };
  int32_t log_splits = 0;
  while (1 << log_splits < params.splits) ++log_splits;
  const decode::sm90::QuadParams kernel_params{params, log_splits, rows, inverse_of_small(rows),
                                               inverse_of_small(group)};
  check_cuda(context.op, cudaLaunchKernelEx(&launch.config, kKernel, kernel_params),
             "launching msa_decode_quad_sm90_kernel");
}

}  // namespace msa
