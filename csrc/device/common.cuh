// What many kernels need.
#pragma once

#include <cstdint>

#include "common/views.h"

namespace msa {

constexpr unsigned kAllLanes = 0xffffffffu;

// 2^x by the special-function unit alone; results under 2^-126 become 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Loads where `there` holds, without a branch, and here: not where the value is first looked at.
__device__ __forceinline__ void load_if(bool there, const int32_t* address, int32_t& value) {
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.u32 there, %2, 0;\n"
      "@there ld.global.s32 %0, [%1];\n"
      "}\n"
      : "+r"(value)
      : "l"(address), "r"(static_cast<uint32_t>(there))
      : "memory");
}
__device__ __forceinline__ void load_if(bool there, const float* address, float& value) {
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.u32 there, %2, 0;\n"
      "@there ld.global.f32 %0, [%1];\n"
      "}\n"
      : "+f"(value)
      : "l"(address), "r"(static_cast<uint32_t>(there))
      : "memory");
}

// Has the line of `address` come to L2; nothing waits for it.
__device__ __forceinline__ void prefetch_to_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

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

// A NaN anywhere gives NaN, so that a broken part shows instead of vanishing.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
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
