// csrc/device/sm80_mma.cuh, emulated, as far as the scores use it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace msa {
namespace detail {

// In order of k, in float32.
template <typename ToFloat>
void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
              const ToFloat& to_float) {
  const int lane = emulation::lane(), group = lane / 4, quad = lane % 4;
  // Words of the lanes: a[0] | a[1], a[2] | a[3], b0 | b1.
  uint64_t words[3][32];
  const auto share = [&](int i, uint32_t low, uint32_t high) {
    const uint64_t* const values =
        emulation::exchange(emulation::kMma, low | static_cast<uint64_t>(high) << 32);
    std::copy(values, values + 32, words[i]);
  };
  share(0, a[0], a[1]);
  share(1, a[2], a[3]);
  share(2, b0, b1);
  const auto element = [&](uint64_t word, int high, int which) {
    return to_float(static_cast<uint16_t>(word >> (32 * high + 16 * which)));
  };
  for (int i = 0; i < 4; ++i) {
    const int column = 2 * quad + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int owner = k % 8 / 2;
      sum[i] += element(words[k / 8][4 * group + owner], i / 2, k % 2) *
                element(words[2][4 * column + owner], k / 8, k % 2);
    }
  }
}

}  // namespace detail

inline void multiply_bf16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  detail::multiply(sum, a, b0, b1, emulation::bfloat16_to_float);
}

inline void multiply_f16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  detail::multiply(sum, a, b0, b1, emulation::half_to_float);
}

}  // namespace msa
