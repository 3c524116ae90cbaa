// float8_e4m3fn to float16, four at a time; exact, NaN stays NaN.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace msa {

// The bytes of `word`, from the lowest up, as float16.
__device__ __forceinline__ void fp8_to_f16(uint32_t word, uint32_t& low, uint32_t& high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("{\n"
      ".reg .b16 first, second;\n"
      "mov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n"
      "cvt.rn.f16x2.e4m3x2 %1, second;\n"
      "}\n"
      : "=r"(low), "=r"(high)
      : "r"(word));
#else
  // Exponent and mantissa one to the right of float16's, whose bias is 8 larger: times 2^8.
  const auto convert = [](uint32_t spread) {  // a byte in the upper half of each half word
    const uint32_t bits = (spread & 0x80008000u) | ((spread & 0x7f007f00u) >> 1);
    const __half2 scaled =
        __hmul2(*reinterpret_cast<const __half2*>(&bits), __half2half2(__ushort_as_half(0x5c00)));
    uint32_t result = *reinterpret_cast<const uint32_t*>(&scaled);
    if ((spread & 0x7f00u) == 0x7f00u) result |= 0x7fffu;
    if ((spread & 0x7f000000u) == 0x7f000000u) result |= 0x7fff0000u;
    return result;
  };
  low = convert(__byte_perm(word, 0, 0x1404));
  high = convert(__byte_perm(word, 0, 0x3424));
#endif
}

// The two low bytes of `bits`, e4m3, as two float16.
__device__ __forceinline__ uint32_t e4m3_to_half(uint32_t bits) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("{\n"
      ".reg .b16 bytes;\n"
      "cvt.u16.u32 bytes, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, bytes;\n"
      "}\n"
      : "=r"(halves)
      : "r"(bits));
  return halves;
#else
  // Exponent and mantissa one place down have a float16's exponent, 2^8 too small.
  const uint32_t high = __byte_perm(bits, 0, 0x1404);  // each byte in the upper half of 16 bits
  const uint32_t magnitude = high & 0x7f007f00u;
  const uint32_t nan = (magnitude + 0x01000100u) & 0x80008000u;  // of 0x7f alone
  const uint32_t small = (high & 0x80008000u) | magnitude >> 1;
  uint32_t halves;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(small), "r"(0x5c005c00u));  // 256
  return halves | (nan >> 15) * 0x7fffu;
#endif
}

}  // namespace msa
