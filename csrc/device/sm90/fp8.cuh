// e4m3 -> float16 and bfloat16, four to a word. Both hold every e4m3 exactly, subnormals included,
// and NaN stays NaN.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/fp8.cuh"

namespace msa::sm90 {

// Two instructions a word.
__device__ __forceinline__ void e4m3_to_float16(uint32_t word, uint32_t (&pairs)[2]) {
  fp8_to_f16(word, pairs[0], pairs[1]);
}

// Eight instructions a word: there is none from float16 to bfloat16.
__device__ __forceinline__ void e4m3_to_bfloat16(uint32_t word, uint32_t (&pairs)[2]) {
  e4m3_to_float16(word, pairs);
#pragma unroll
  for (uint32_t& pair : pairs) {
    const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&pair));
    const __nv_bfloat162 rounded = __floats2bfloat162_rn(values.x, values.y);
    pair = *reinterpret_cast<const uint32_t*>(&rounded);
  }
}

// 0xff in place of each of the word's four e4m3 that is NaN, 0 in place of the others.
__device__ __forceinline__ uint32_t e4m3_nan_mask(uint32_t word) {
  return (((word & 0x7f7f7f7fu) + 0x01010101u) >> 7 & 0x01010101u) * 255u;
}

}  // namespace msa::sm90
