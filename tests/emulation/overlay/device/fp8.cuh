// csrc/device/fp8.cuh, emulated.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <array>

namespace msa {

inline uint32_t e4m3_to_half(uint32_t bits) {
  const auto half = [](uint8_t byte) {
    const float value = emulation::e4m3_to_float(byte);
    return value != value ? uint32_t{0x7fff} : uint32_t{emulation::float_to_half(value)};
  };
  static const auto table = [&half] {
    std::array<uint16_t, 256> halves{};
    for (int byte = 0; byte < 256; ++byte) halves[byte] = half(byte);
    return halves;
  }();
  return table[bits & 255] | static_cast<uint32_t>(table[bits >> 8 & 255]) << 16;
}

inline void fp8_to_f16(uint32_t word, uint32_t& low, uint32_t& high) {
  low = e4m3_to_half(word);
  high = e4m3_to_half(word >> 16);
}

}  // namespace msa
