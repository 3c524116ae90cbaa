// Kernels that follow each other in one stream (sm_90, programmatic dependent launch): the next one
// starts while the last CTAs of the one before still run, sets itself up, and waits only before it
// reads.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>

#include "device/cuda_errors.h"
#include "device/persistent_grid.cuh"
#include "host/exec_context.h"

namespace msa {

// Every kernel launched by launch_dependent() calls this before it touches what an earlier kernel
// of the stream writes, or writes what one reads. Launched otherwise, it waits for nothing.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start as soon as this one's last CTA has: for kernels that are
// short or leave most of the GPU idle. The next one waits for all of this one in every CTA, so that
// its own end still means the end of all kernels before.
__device__ __forceinline__ void start_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// `overlap`: the kernel may start before the one before it has ended; its code must wait.
template <typename... Params, typename... Args>
void launch_in_stream(const char* op, const char* name, bool overlap, void (*kernel)(Params...),
                      dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
                      const Args&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  check_cuda(op, cudaLaunchKernelEx(&config, kernel, Params(args)...), name);
}

template <typename... Params, typename... Args>
void launch_dependent(const char* op, const char* name, void (*kernel)(Params...), int64_t grid,
                      int threads, int shared_bytes, cudaStream_t stream, const Args&... args) {
  launch_in_stream(op, name, true, kernel, dim3(static_cast<unsigned>(grid)), threads, shared_bytes,
                   stream, args...);
}

// Whether the code of `kernel` that the device runs was compiled for sm_90 or later, so that its
// waits are there: PTX of sm_80 has none, wherever it runs. Asked of CUDA once a kernel and device.
template <auto kernel>
bool may_overlap(const ExecContext& context) {
  static std::array<std::atomic<int>, kMaxDevices> known{};
  const bool cached = context.device >= 0 && context.device < kMaxDevices;
  if (cached) {
    if (const int version = known[context.device].load(std::memory_order_relaxed)) {
      return version >= 90;
    }
  }
  cudaFuncAttributes attributes{};
  check_cuda(context.op, cudaFuncGetAttributes(&attributes, kernel), "reading a kernel's version");
  if (cached) known[context.device].store(attributes.ptxVersion);
  return attributes.ptxVersion >= 90;
}

// A portable kernel: dependent where the code that runs can wait, after all before it elsewhere.
template <auto kernel, typename... Args>
void launch_portable(const ExecContext& context, const char* name, dim3 grid, int threads,
                     int shared_bytes, const Args&... args) {
  raise_shared_memory_limit<kernel>(context.op, context.device, shared_bytes);
  launch_in_stream(context.op, name, may_overlap<kernel>(context), kernel, grid, threads,
                   shared_bytes, static_cast<cudaStream_t>(context.stream), args...);
}

}  // namespace msa
