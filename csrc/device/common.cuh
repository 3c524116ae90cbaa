// What many kernels need.
#pragma once

#include <cstdint>

#include "common/views.h"
#include "device/instructions.cuh"

namespace msa {

constexpr unsigned kAllLanes = 0xffffffffu;

// Sum of `value` over the lanes of the warp up to this one, its own included; whole warps.
template <typename Number>
__device__ __forceinline__ Number sum_up_to_lane(Number value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const Number other = __shfl_up_sync(kAllLanes, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

__device__ __forceinline__ float scale_of(const ScaleView& scale, int64_t head) {
  return scale.data ? scale.data[head * scale.head_stride] : scale.value;
}

// The same, loaded here and waited for where it is used.
__device__ __forceinline__ float load_scale(const ScaleView& scale, int64_t head) {
  float value = scale.value;
  load_if(scale.data != nullptr, scale.data + head * scale.head_stride, value);
  return value;
}

}  // namespace msa
