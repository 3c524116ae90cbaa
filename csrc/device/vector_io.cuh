// 16 bytes of float32 and bfloat16 elements <-> floats in registers.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace msa {

template <typename Element>
struct Vector16;

template <>
struct Vector16<float> {
  static constexpr int kElements = 4;
  static __device__ __forceinline__ void to_float(const uint4& bits, float (&values)[4]) {
    values[0] = __uint_as_float(bits.x);
    values[1] = __uint_as_float(bits.y);
    values[2] = __uint_as_float(bits.z);
    values[3] = __uint_as_float(bits.w);
  }
  static __device__ __forceinline__ uint4 from_float(const float (&values)[4]) {
    return {__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
            __float_as_uint(values[3])};
  }
};

template <>
struct Vector16<__nv_bfloat16> {
  static constexpr int kElements = 8;
  static __device__ __forceinline__ void to_float(const uint4& bits, float (&values)[8]) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      values[2 * word] = __uint_as_float(words[word] << 16);
      values[2 * word + 1] = __uint_as_float(words[word] & 0xffff0000u);
    }
  }
  static __device__ __forceinline__ uint4 from_float(const float (&values)[8]) {
    uint32_t words[4];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * word], values[2 * word + 1]);
      words[word] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    return {words[0], words[1], words[2], words[3]};
  }
};

}  // namespace msa
