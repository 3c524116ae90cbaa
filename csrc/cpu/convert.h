// Conversions between float32 and the storage types, one value at a time and without branches,
// so that loops over them vectorise.
#pragma once

#include <cstdint>
#include <cstring>

namespace msa {

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float bf16_to_float(uint16_t stored) { return float_from_bits(uint32_t{stored} << 16); }

// Round to nearest even; a NaN stays a NaN (rounding its payload up could make it an infinity).
inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const uint32_t is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>((is_nan ? bits | 0x00400000u : rounded) >> 16);
}

// All ones where the condition holds. Selecting with a mask and not with ?: keeps the float
// arithmetic of both sides out of branches, without which the loop would not vectorise.
inline uint32_t mask_if(bool condition) { return 0u - static_cast<uint32_t>(condition); }

inline uint32_t select(uint32_t mask, uint32_t if_set, uint32_t if_clear) {
  return (if_set & mask) | (if_clear & ~mask);
}

// e4m3fn: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, 0x7f is NaN.
inline float e4m3_to_float(uint8_t stored) {
  const uint32_t magnitude = stored & 0x7fu;
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  // Below 8 the exponent field is 0: mantissa * 2^-9. Made from an integer and not from a float32
  // subnormal, which flush-to-zero mode would lose.
  const uint32_t subnormal =
      float_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * (1.0f / 512.0f));
  uint32_t bits = select(mask_if(magnitude < 8u), subnormal, normal);
  bits |= mask_if(magnitude == 0x7fu) & 0x7fc00000u;
  return float_from_bits(bits | (uint32_t{stored} & 0x80u) << 24);
}

// Round to nearest even, saturate at +-448 (infinities too), keep NaN.
inline uint8_t float_to_e4m3(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // 0x43e00000 is 448, code 0x7e.
  const uint32_t bounded = select(mask_if(magnitude > 0x43e00000u), 0x43e00000u, magnitude);
  const uint32_t normal = ((bounded + 0x7ffffu + ((bounded >> 20) & 1u)) >> 20) - (120u << 3);
  // Under 2^-6 the unit is 2^-9; adding 2^23 rounds to that unit, half to even.
  const uint32_t subnormal = float_bits(float_from_bits(bounded) * 512.0f + 8388608.0f) & 0xfu;
  uint32_t code = select(mask_if(magnitude < 0x3c800000u), subnormal, normal);
  code |= mask_if(magnitude > 0x7f800000u) & 0x7fu;
  return static_cast<uint8_t>(code | (bits >> 24 & 0x80u));
}

}  // namespace msa
