// Host side of the cluster kernel: in how many parts a unit is cut, which the driver has a say in.
#include "device/sm90/cluster_launch.cuh"
#include "step4_attend/sm90/decode_cluster_kernel.cuh"

namespace msa {
namespace {

template <int kWarps>
constexpr int kSharedBytes = sizeof(decode::sm90::ClusterStorage<kWarps>);
constexpr int kWarpsAlone = 8, kWarpsOfTwo = 4;  // of a CTA that has an SM, and of two on one

// Clusters of `splits` CTAs of `kWarps` warps that the device runs at once, whatever the caches
// hold.
template <int kWarps>
int64_t resident_clusters(int64_t splits, const ExecContext& context) {
  constexpr auto kernel = decode::sm90::msa_decode_cluster_sm90_kernel<__nv_bfloat16, true, kWarps>;
  return sm90::resident_clusters<kernel>(splits, kWarps * 32, kSharedBytes<kWarps>, context);
}

template <typename Element, bool kSparse, int kWarps>
void launch(const DecodeParams& params, const ExecContext& context) {
  constexpr auto kernel = decode::sm90::msa_decode_cluster_sm90_kernel<Element, kSparse, kWarps>;
  sm90::allow_large_clusters<kernel>(context, kSharedBytes<kWarps>);
  const BatchView& batch = params.attend.batch;
  const sm90::ClusterLaunch launch(
      params.splits,
      dim3(static_cast<unsigned>(params.splits), static_cast<unsigned>(batch.num_tokens),
           static_cast<unsigned>(params.attend.num_kv_heads)),
      kWarps * 32, kSharedBytes<kWarps>, context);
  const auto rows =
      static_cast<int32_t>((params.attend.group_size + params.splits - 1) / params.splits);
  const decode::sm90::ClusterParams kernel_params{params, rows, (65536 + rows - 1) / rows};
  check_cuda(context.op, cudaLaunchKernelEx(&launch.config, kernel, kernel_params),
             "launching msa_decode_cluster_sm90_kernel");
}

template <bool kSparse, int kWarps>
void launch_for(const DecodeParams& params, const ExecContext& context) {
  if (params.attend.k_cache.dtype == DType::kFloat8E4M3) {
    return launch<__nv_fp8_e4m3, kSparse, kWarps>(params, context);
  }
  return launch<__nv_bfloat16, kSparse, kWarps>(params, context);
}

template <bool kSparse>
void launch_for(const DecodeParams& params, const ExecContext& context) {
  if (params.two_an_sm) return launch_for<kSparse, kWarpsOfTwo>(params, context);
  return launch_for<kSparse, kWarpsAlone>(params, context);
}

}  // namespace

ClusterCut decode_cluster_cut(const DecodeParams& params, int64_t blocks,
                              const ExecContext& context) {
  constexpr int64_t kShort = 64;  // longer rows want more splits than a cluster has
  if (blocks > kShort) return {};
  const bool fp8 = params.attend.k_cache.dtype == DType::kFloat8E4M3;
  const int64_t slices = blocks * (fp8 ? decode::sm80::Slice<__nv_fp8_e4m3>::kPerBlock
                                       : decode::sm80::Slice<__nv_bfloat16>::kPerBlock);
  const auto slices_of_cta = [&](int64_t splits) { return (slices + splits - 1) / splits; };
  int64_t best = 0, best_turns = 0;
  for (int64_t splits = 1; splits <= std::min(kMaxClusterSplits, std::max<int64_t>(1, blocks));
       ++splits) {
    if (params.num_units > resident_clusters<kWarpsAlone>(splits, context)) continue;
    const int64_t turns = (slices_of_cta(splits) + kWarpsAlone - 1) / kWarpsAlone;
    // A larger cluster must save two slices of a warp, or half: it costs about as much by itself.
    if (best == 0 || turns + 2 <= best_turns || 2 * turns <= best_turns) {
      best = splits, best_turns = turns;
    }
  }
  if (best == 0) return {};
  // Two CTAs an SM where more SMs are used so, and one of them has clearly less to do.
  int64_t splits_of_two = std::clamp(
      blocks, int64_t{1}, int64_t{decode::sm90::ClusterStorage<kWarpsOfTwo>::kMaxSplits});
  while (splits_of_two > best &&
         params.num_units > resident_clusters<kWarpsOfTwo>(splits_of_two, context))
    --splits_of_two;
  if (2 * slices_of_cta(splits_of_two) + 2 <= slices_of_cta(best)) {
    return {static_cast<int32_t>(splits_of_two), true};
  }
  return {static_cast<int32_t>(best), false};
}

void run_decode_cluster(const DecodeParams& params, const ExecContext& context, bool sparse) {
  if (sparse) return launch_for<true>(params, context);
  return launch_for<false>(params, context);
}

}  // namespace msa
