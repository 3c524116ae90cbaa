// e4m3 as the kernels use it.
#pragma once

#include <cuda_runtime.h>

namespace emulation {

inline float e4m3_to_float(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if ((bits & 127) == 127) return NAN;
  const float value = exponent ? std::ldexp(8.0f + mantissa, exponent - 10)
                               : std::ldexp(static_cast<float>(mantissa), -9);
  return bits & 128 ? -value : value;
}

}  // namespace emulation

struct __nv_fp8_e4m3 {
  uint8_t bits;
  operator float() const { return emulation::e4m3_to_float(bits); }
};
