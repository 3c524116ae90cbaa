// Host side of the cluster kernels: in how many parts a unit is cut, which the driver has a say in.
#include "device/persistent_grid.cuh"
#include "step4_attend/sm90/decode_cluster_pair_kernel.cuh"

namespace msa {
namespace {

namespace sm90 = decode::sm90;

template <int kWarps>
constexpr int kSharedBytes = sizeof(sm90::ClusterStorage<kWarps>);
constexpr int kWarpsAlone = 8, kWarpsOfTwo = 4;  // of a CTA that has an SM, and of two on one

// A launch of clusters of `splits` CTAs; its attributes must outlive it.
struct ClusterLaunch {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  ClusterLaunch(int64_t splits, dim3 grid, int threads, int shared_bytes,
                const ExecContext& context) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = static_cast<cudaStream_t>(context.stream);
    config.attrs = attributes;
    config.numAttrs = 2;
  }
};

// Raises the kernel's limits on the device, once.
template <auto kernel>
void allow_large_clusters(const ExecContext& context, int shared_bytes) {
  static std::array<std::atomic<bool>, kMaxDevices> done{};
  const bool cached = context.device >= 0 && context.device < kMaxDevices;
  if (cached && done[context.device].load(std::memory_order_relaxed)) return;
  allow_shared_memory<kernel>(context.op, context.device, shared_bytes);
  check_cuda(context.op,
             cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
             "allowing clusters of 16");
  if (cached) done[context.device].store(true);
}

// Clusters of `splits` CTAs of `kWarps` warps that the device runs at once, whatever the caches
// hold; a cluster lies within a GPC.
template <int kWarps>
int64_t resident_clusters(int64_t splits, const ExecContext& context) {
  constexpr auto kernel = sm90::msa_decode_cluster_sm90_kernel<__nv_bfloat16, true, kWarps>;
  static std::array<std::array<std::atomic<int>, kMaxClusterSplits + 1>, kMaxDevices> known{};
  const bool cached = context.device >= 0 && context.device < kMaxDevices;
  if (cached) {
    if (const int count = known[context.device][splits].load(std::memory_order_relaxed)) {
      return count - 1;
    }
  }
  allow_large_clusters<kernel>(context, kSharedBytes<kWarps>);
  ClusterLaunch launch(splits, dim3(static_cast<unsigned>(splits)), kWarps * 32,
                       kSharedBytes<kWarps>, context);
  launch.config.numAttrs = 1;
  int count = 0;
  if (cudaOccupancyMaxActiveClusters(&count, kernel, &launch.config) != cudaSuccess) {
    cudaGetLastError();  // a size that this device has no clusters of
    count = 0;
  }
  if (cached) known[context.device][splits].store(count + 1);  // 0: not asked yet
  return count;
}

// A call for a kernel whose units have `unit_rows` rows: which of them a CTA merges.
sm90::ClusterParams cluster_params(const DecodeParams& params, int64_t unit_rows) {
  const auto rows = static_cast<int32_t>((unit_rows + params.splits - 1) / params.splits);
  return {params, rows, (65536 + rows - 1) / rows};
}

template <typename Element, bool kSparse, int kWarps>
void launch(const DecodeParams& params, const ExecContext& context) {
  constexpr auto kernel = sm90::msa_decode_cluster_sm90_kernel<Element, kSparse, kWarps>;
  allow_large_clusters<kernel>(context, kSharedBytes<kWarps>);
  const BatchView& batch = params.attend.batch;
  const ClusterLaunch launch(
      params.splits,
      dim3(static_cast<unsigned>(params.splits), static_cast<unsigned>(batch.num_tokens),
           static_cast<unsigned>(params.attend.num_kv_heads)),
      kWarps * 32, kSharedBytes<kWarps>, context);
  check_cuda(context.op,
             cudaLaunchKernelEx(&launch.config, kernel, cluster_params(params, params.attend.group_size)),
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

int32_t decode_cluster_pair_splits(const DecodeParams& params, const ExecContext& context) {
  constexpr int64_t kManyTokens = 4;  // of a request; with fewer, pairs too often span two
  constexpr int64_t kFewUnits = 16;   // clusters of single tokens are as large then
  const AttendParams& attend = params.attend;
  if (params.tokens_each < kManyTokens || params.ids.topk > decode::sm90::kMaxPairTopk ||
      params.num_units <= kFewUnits) {
    return 0;
  }
  const int64_t pairs = (attend.batch.num_tokens + 1) / 2 * attend.num_kv_heads;
  int32_t splits = decode::sm90::kMaxPairSplits;
  while (splits > 1 && pairs > resident_clusters<kWarpsAlone>(splits, context)) --splits;
  return splits > 1 ? splits : 0;
}

void run_decode_cluster_pairs(const DecodeParams& params, const ExecContext& context) {
  constexpr auto kernel = decode::sm90::msa_decode_cluster_pair_sm90_kernel;
  constexpr int kPairSharedBytes = sizeof(decode::sm90::PairClusterStorage);
  constexpr int kPairThreads = decode::sm90::PairClusterStorage::kThreads;
  const AttendParams& attend = params.attend;
  allow_large_clusters<kernel>(context, kPairSharedBytes);
  const ClusterLaunch launch(params.splits,
                             dim3(static_cast<unsigned>(params.splits),
                                  static_cast<unsigned>((attend.batch.num_tokens + 1) / 2),
                                  static_cast<unsigned>(attend.num_kv_heads)),
                             kPairThreads, kPairSharedBytes, context);
  check_cuda(
      context.op,
      cudaLaunchKernelEx(&launch.config, kernel, cluster_params(params, 2 * attend.group_size)),
      "launching msa_decode_cluster_pair_sm90_kernel");
}

void run_decode_cluster(const DecodeParams& params, const ExecContext& context, bool sparse) {
  if (sparse) return launch_for<true>(params, context);
  return launch_for<false>(params, context);
}

}  // namespace msa
