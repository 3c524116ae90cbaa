// float8_e4m3fn to 16-bit floats, two at a time; exact, NaN stays NaN.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace msa {

// The two lower bytes of `pair` as float16.
__device__ __forceinline__ uint32_t fp8_to_f16(uint32_t pair) {
  uint32_t result;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("{\n"
      ".reg .b16 low;\n"
      "cvt.u16.u32 low, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "}\n"
      : "=r"(result)
      : "r"(pair));
#else
  // Exponent and mantissa one to the right of float16's, whose bias is 8 larger: times 2^8.
  const uint32_t spread = __byte_perm(pair, 0, 0x1404);  // each byte in the upper half of a word
  const uint32_t bits = (spread & 0x80008000u) | ((spread & 0x7f007f00u) >> 1);
  const __half2 scaled =
      __hmul2(*reinterpret_cast<const __half2*>(&bits), __half2half2(__ushort_as_half(0x5c00)));
  result = *reinterpret_cast<const uint32_t*>(&scaled);
  if ((spread & 0x7f00u) == 0x7f00u) result |= 0x7fffu;
  if ((spread & 0x7f000000u) == 0x7f000000u) result |= 0x7fff0000u;
#endif
  return result;
}

// The two lower bytes of `pair` as bfloat16.
__device__ __forceinline__ uint32_t fp8_to_bf16(uint32_t pair) {
  const uint32_t half = fp8_to_f16(pair);
  const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&half));
  const __nv_bfloat162 result = __floats2bfloat162_rn(values.x, values.y);
  return *reinterpret_cast<const uint32_t*>(&result);
}

}  // namespace msa
