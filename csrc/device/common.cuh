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

// A NaN anywhere gives NaN, so that a broken part shows instead of vanishing.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ __forceinline__ float scale_of(const ScaleView& scale, int64_t head) {
  return scale.data ? scale.data[head * scale.head_stride] : scale.value;
}

}  // namespace msa
