// The part of the CUDA runtime that kernels' host code calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <tuple>

#include "machine.h"

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
inline const char* cudaGetErrorName(cudaError_t) { return "cudaSuccess"; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor
};
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount      ? emulation::settings.sms
           : attribute == cudaDevAttrComputeCapabilityMajor ? 9
                                                            : 0;
  return cudaSuccess;
}

enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributePreferredSharedMemoryCarveout,
  cudaFuncAttributeNonPortableClusterSizeAllowed
};
constexpr int cudaSharedmemCarveoutMaxShared = 100;
struct cudaFuncAttributes {
  int ptxVersion;
};
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel*) {
  attributes->ptxVersion = 90;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* ctas, Kernel*, int, size_t) {
  *ctas = 1;
  return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}

enum cudaLaunchAttributeID {
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    dim3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace emulation {

// CTAs of a cluster, 0 where there are none.
inline int cluster_size(const cudaLaunchConfig_t& config) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension) {
      return static_cast<int>(config.attrs[i].val.clusterDim.x);
    }
  }
  return 0;
}

}  // namespace emulation

// As the shared memory of the SMs allows, wherever they are.
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel*,
                                           const cudaLaunchConfig_t* config) {
  constexpr int kReserved = 1024;  // bytes of each CTA
  const int bytes = static_cast<int>(config->dynamicSmemBytes) + kReserved;
  const int ctas = emulation::settings.sms * (emulation::kSharedBytes / bytes);
  *clusters = ctas / emulation::cluster_size(*config);
  return cudaSuccess;
}

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               const Args&... args) {
  const emulation::Grid grid{{config->gridDim.x, config->gridDim.y, config->gridDim.z},
                             static_cast<int>(config->blockDim.x),
                             static_cast<int>(config->dynamicSmemBytes),
                             emulation::cluster_size(*config)};
  const std::tuple<Params...> params(args...);
  emulation::launch(reinterpret_cast<const void*>(kernel), grid,
                    [&] { std::apply(kernel, params); });
  return cudaSuccess;
}
