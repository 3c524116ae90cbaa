// Host side of the cluster kernel: in how many parts a unit is cut, which the driver has a say in.
#include "device/persistent_grid.cuh"
#include "step4_attend/sm90/decode_cluster_kernel.cuh"

namespace msa {
namespace {

namespace sm90 = decode::sm90;

constexpr int kSharedBytes = sizeof(sm90::ClusterStorage);

// A launch of clusters of `splits`; its attributes must outlive it.
struct ClusterLaunch {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  ClusterLaunch(int64_t splits, dim3 grid, const ExecContext& context) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = dim3(sm90::kClusterThreads);
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = static_cast<cudaStream_t>(context.stream);
    config.attrs = attributes;
    config.numAttrs = 2;
  }
};

// Also raises the kernel's limits on the device, once.
template <auto kernel>
void allow_large_clusters(const ExecContext& context) {
  static std::array<std::atomic<bool>, kMaxDevices> done{};
  const bool cached = context.device >= 0 && context.device < kMaxDevices;
  if (cached && done[context.device].load(std::memory_order_relaxed)) return;
  check_cuda(
      context.op,
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
      "raising the shared-memory limit");
  check_cuda(context.op,
             cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
             "allowing clusters of 16");
  if (cached) done[context.device].store(true);
}

// Clusters of `splits` CTAs that the device runs at once; a cluster lies within a GPC.
int64_t resident_clusters(int64_t splits, const ExecContext& context) {
  constexpr auto kernel = sm90::msa_decode_cluster_sm90_kernel<__nv_bfloat16, true>;
  static std::array<std::array<std::atomic<int>, kMaxClusterSplits + 1>, kMaxDevices> known{};
  const bool cached = context.device >= 0 && context.device < kMaxDevices;
  if (cached) {
    if (const int count = known[context.device][splits].load(std::memory_order_relaxed)) {
      return count - 1;
    }
  }
  allow_large_clusters<kernel>(context);
  ClusterLaunch launch(splits, dim3(static_cast<unsigned>(splits)), context);
  launch.config.numAttrs = 1;
  int count = 0;
  if (cudaOccupancyMaxActiveClusters(&count, kernel, &launch.config) != cudaSuccess) {
    cudaGetLastError();  // a size that this device has no clusters of
    count = 0;
  }
  if (cached) known[context.device][splits].store(count + 1);  // 0: not asked yet
  return count;
}

template <typename Element, bool kSparse>
void launch(const DecodeParams& params, const ExecContext& context) {
  constexpr auto kernel = sm90::msa_decode_cluster_sm90_kernel<Element, kSparse>;
  allow_large_clusters<kernel>(context);
  const BatchView& batch = params.attend.batch;
  const ClusterLaunch launch(
      params.splits,
      dim3(static_cast<unsigned>(params.splits), static_cast<unsigned>(batch.num_tokens),
           static_cast<unsigned>(params.attend.num_kv_heads)),
      context);
  const auto rows =
      static_cast<int32_t>((params.attend.group_size + params.splits - 1) / params.splits);
  const sm90::ClusterParams kernel_params{params, rows, (65536 + rows - 1) / rows};
  check_cuda(context.op, cudaLaunchKernelEx(&launch.config, kernel, kernel_params),
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

int32_t decode_cluster_splits(const DecodeParams& params, int64_t blocks,
                              const ExecContext& context) {
  constexpr int64_t kShort = 64;  // longer rows want more splits than a cluster has
  if (blocks > kShort) return 0;
  const bool fp8 = params.attend.k_cache.dtype == DType::kFloat8E4M3;
  const int64_t slices_of_block = fp8 ? decode::sm80::Slice<__nv_fp8_e4m3>::kPerBlock
                                      : decode::sm80::Slice<__nv_bfloat16>::kPerBlock;
  int64_t best = 0, best_turns = 0;
  for (int64_t splits = 1; splits <= std::min(kMaxClusterSplits, std::max<int64_t>(1, blocks));
       ++splits) {
    if (params.num_units > resident_clusters(splits, context)) continue;
    const int64_t warps = splits * decode::sm90::kClusterWarps;
    const int64_t turns = (blocks * slices_of_block + warps - 1) / warps;  // slices of a warp
    // A larger cluster must save two of them, or half: it costs about as much by itself.
    if (best == 0 || turns + 2 <= best_turns || 2 * turns <= best_turns) {
      best = splits, best_turns = turns;
    }
  }
  return static_cast<int32_t>(best);
}

void run_decode_cluster(const DecodeParams& params, const ExecContext& context, bool sparse) {
  if (sparse) return launch_for<true>(params, context);
  return launch_for<false>(params, context);
}

}  // namespace msa
