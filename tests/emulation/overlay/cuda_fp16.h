// float16 as the kernels use it.
#pragma once

#include <cuda_runtime.h>

#include <array>

struct __half2 {
  uint16_t x, y;
};

namespace emulation {

inline float half_to_float(uint16_t bits) {
  static const auto table = [] {  // a conversion may be a call
    std::array<float, 1 << 16> values;
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<float>(bits_as<_Float16>(static_cast<uint16_t>(i)));
    }
    return values;
  }();
  return table[bits];
}
inline uint16_t float_to_half(float value) {
  return bits_as<uint16_t>(static_cast<_Float16>(value));
}

}  // namespace emulation

inline float2 __half22float2(__half2 pair) {
  return {emulation::half_to_float(pair.x), emulation::half_to_float(pair.y)};
}
inline __half2 __floats2half2_rn(float x, float y) {
  return {emulation::float_to_half(x), emulation::float_to_half(y)};
}
