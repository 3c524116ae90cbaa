// The grid of a persistent kernel: as many CTAs as the device holds at a time.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>

#include "device/cuda_errors.h"

namespace msa {

constexpr int kMaxDevices = 64;

// Lets `kernel` have `bytes` of dynamic shared memory on the current device; asked of CUDA once. Of
// one kernel `bytes` is always the same: the most that it ever needs.
template <auto kernel>
void raise_shared_memory_limit(const char* op, int device, int bytes) {
  static std::array<std::atomic<bool>, kMaxDevices> done{};
  if (device >= 0 && device < kMaxDevices && done[device].load(std::memory_order_relaxed)) return;
  check_cuda(op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "raising the shared-memory limit");
  if (device >= 0 && device < kMaxDevices) done[device].store(true);
}

// The same, and as many CTAs on an SM as its shared memory holds.
template <auto kernel>
void allow_shared_memory(const char* op, int device, int bytes) {
  static std::array<std::atomic<bool>, kMaxDevices> done{};
  if (device >= 0 && device < kMaxDevices && done[device].load(std::memory_order_relaxed)) return;
  raise_shared_memory_limit<kernel>(op, device, bytes);
  check_cuda(op,
             cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             "asking for shared memory instead of L1");
  if (device >= 0 && device < kMaxDevices) done[device].store(true);
}

// CTAs of `kernel` that the current device runs at once. Also raises the kernel's shared-memory
// limit there. Asked of CUDA once a kernel and device: neither answer changes while the process
// lives.
template <auto kernel>
int resident_ctas(const char* op, int device, int threads, int shared_bytes) {
  static std::array<std::atomic<int>, kMaxDevices> known{};
  if (device >= 0 && device < kMaxDevices) {
    if (const int ctas = known[device].load(std::memory_order_relaxed)) return ctas;
  }
  int sms = 0, ctas_per_sm = 0;
  raise_shared_memory_limit<kernel>(op, device, shared_bytes);
  check_cuda(op, cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device),
             "reading the number of SMs");
  check_cuda(
      op,
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas_per_sm, kernel, threads, shared_bytes),
      "reading the occupancy");
  if (ctas_per_sm == 0) throw_runtime_error(op, "the kernel does not fit on this GPU");
  if (device >= 0 && device < kMaxDevices) known[device].store(sms * ctas_per_sm);
  return sms * ctas_per_sm;
}

}  // namespace msa
