// csrc/device/instructions.cuh, emulated.
#pragma once

#include <cuda_runtime.h>

namespace msa {

// The GPU's may be off by 2^-22.
inline float exp2_fast(float x) {
  const float result = std::exp2(x);
  return result < 0x1p-126f ? 0.0f : result;
}

template <typename Value>
void load_if(bool there, const Value* address, Value& value) {
  if (there) value = *address;
}

inline uint32_t count_carry(uint32_t a, uint32_t b, uint32_t count) { return count + (a > ~b); }

inline int32_t fetch_and_increment(int32_t* counter) {
  const int32_t before = *counter;
  *counter = before == 0x7fffffff ? 0 : before + 1;
  return before;
}

inline void wait_for_word(const int32_t* word, int32_t value) {
  while (!__all_sync(0xffffffffu, *static_cast<const volatile int32_t*>(word) == value)) {
    __nanosleep(0);
  }
}

inline void prefetch_to_l2(const void*) {}

inline float max_or_nan(float a, float b) {
  if (a != a || b != b) return __uint_as_float(0x7fffffff);
  return std::max(a, b);
}

// Only whether the sums are NaN is looked at.
inline uint32_t add_zero_times(uint32_t pair, uint32_t sum) {
  if ((pair & 0x7f80u) == 0x7f80u) sum |= 0x7fc0u;
  if ((pair & 0x7f800000u) == 0x7f800000u) sum |= 0x7fc00000u;
  return sum;
}

inline void compute_here(float&) {}
inline void compute_here(const void*) {}
inline void compute_here(uint32_t&) {}

inline int read_lane() { return emulation::lane(); }

}  // namespace msa
