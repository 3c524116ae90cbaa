// Launches of kernels whose CTAs form clusters, and how many of these a device runs at once.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>

#include "device/cuda_errors.h"
#include "device/persistent_grid.cuh"
#include "host/exec_context.h"

namespace msa::sm90 {

constexpr int64_t kMaxClusterCtas = 16;

// A launch of clusters of `ctas` CTAs that may start before the kernel before has ended; its
// attributes must outlive it.
struct ClusterLaunch {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  ClusterLaunch(int64_t ctas, dim3 grid, int threads, int shared_bytes,
                const ExecContext& context) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(ctas), 1, 1};
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

// Clusters of `ctas` CTAs of the kernel that the device runs at once; a cluster lies within a GPC.
template <auto kernel>
int64_t resident_clusters(int64_t ctas, int threads, int shared_bytes,
                          const ExecContext& context) {
  static std::array<std::array<std::atomic<int>, kMaxClusterCtas + 1>, kMaxDevices> known{};
  const bool cached = context.device >= 0 && context.device < kMaxDevices;
  if (cached) {
    if (const int count = known[context.device][ctas].load(std::memory_order_relaxed)) {
      return count - 1;
    }
  }
  allow_large_clusters<kernel>(context, shared_bytes);
  ClusterLaunch launch(ctas, dim3(static_cast<unsigned>(ctas)), threads, shared_bytes, context);
  launch.config.numAttrs = 1;
  int count = 0;
  if (cudaOccupancyMaxActiveClusters(&count, kernel, &launch.config) != cudaSuccess) {
    cudaGetLastError();  // a size that this device has no clusters of
    count = 0;
  }
  if (cached) known[context.device][ctas].store(count + 1);  // 0: not asked yet
  return count;
}

}  // namespace msa::sm90
