// Divisions by what the host knows: 32-bit ones cost some 20 instructions each on the device.
#pragma once

#include <cstdint>

namespace msa {

struct Division {
  uint32_t divisor, factor, shift;

  constexpr uint32_t operator()(uint32_t number) const {  // below 2^31
    return static_cast<uint32_t>(static_cast<uint64_t>(number) * factor >> shift);
  }
};

// factor = 2^shift / divisor rounded up, and less than divisor <= 2^(shift - 31) too large in all.
inline Division division_by(uint32_t divisor) {
  uint32_t shift = 31;
  while (uint64_t{1} << (shift - 31) < divisor) ++shift;
  return {divisor, static_cast<uint32_t>(((uint64_t{1} << shift) - 1) / divisor + 1), shift};
}

}  // namespace msa
