// bfloat16 as the kernels use it.
#pragma once

#include <cuda_runtime.h>

namespace emulation {

inline float bfloat16_to_float(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}
inline uint16_t float_to_bfloat16(float value) {  // to nearest, ties to even
  const uint32_t bits = __float_as_uint(value);
  if (value != value) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace emulation

struct __nv_bfloat16 {
  uint16_t bits;
  operator float() const { return emulation::bfloat16_to_float(bits); }
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {{emulation::float_to_bfloat16(x)}, {emulation::float_to_bfloat16(y)}};
}
