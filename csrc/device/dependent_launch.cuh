// Kernels that follow each other in one stream (sm_90, programmatic dependent launch): the next one
// starts while the last CTAs of the one before still run, sets itself up, and waits only before it
// reads.
#pragma once

#include <cuda_runtime.h>

#include "device/cuda_errors.h"

namespace msa {

// Every kernel launched by launch_dependent() calls this before it touches what an earlier kernel
// of the stream writes, or writes what one reads. Launched otherwise, it waits for nothing.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start its set-up now: for kernels that are about to end, since what starts
// early takes room. After the caller's own wait_for_previous_kernel(), so that whoever starts may
// read what the kernels before this one wrote.
__device__ __forceinline__ void start_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Portable kernels: `overlap` is whether the GPU can do it (compute capability 9.0 and up).
template <typename... Params, typename... Args>
void launch_in_order(const char* op, const char* name, bool overlap, void (*kernel)(Params...),
                     int64_t grid, int threads, int shared_bytes, cudaStream_t stream,
                     const Args&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
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
  launch_in_order(op, name, true, kernel, grid, threads, shared_bytes, stream, args...);
}

}  // namespace msa
