// CUDA C++ as a C++ compiler knows it not: qualifiers, built-in variables, vectors, intrinsics.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#define __device__
#define __host__
#define __global__ inline
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// One thread runs all lanes of a CTA, so what is its own is theirs in common.
#define __shared__ thread_local

inline const emulation::ThreadIndex& threadIdx = emulation::thread_index;
inline const emulation::Index& blockIdx = emulation::block_index;
inline const emulation::Index& gridDim = emulation::grid_size;
inline const emulation::Index& blockDim = emulation::block_size;

using std::isfinite;
using std::max;
using std::min;

struct alignas(8) int2 {
  int32_t x, y;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) int4 {
  int32_t x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline int4 make_int4(int32_t x, int32_t y, int32_t z, int32_t w) { return {x, y, z, w}; }
inline int2 make_int2(int32_t x, int32_t y) { return {x, y}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulation {

template <typename To, typename From>
To bits_as(From from) {
  static_assert(sizeof(From) <= 8 && sizeof(To) <= 8);
  To to{};
  std::memcpy(&to, &from, std::min(sizeof(To), sizeof(From)));
  return to;
}

inline int lane() { return static_cast<int>(thread_index.x % 32); }

// What collectives do, which must be the same in all lanes of a warp.
enum Collective {
  kBallot,
  kShuffle,
  kShuffleXor,
  kShuffleUp,
  kReduce,
  kMatch,
  kSync,
  kElect,
  kMatrices,
  kMma
};

inline void require_all(unsigned mask) {
  if (mask != ~0u) fail("a collective of some lanes of a warp is not emulated");
}

template <typename Number, typename Combine>
Number reduce(unsigned mask, Number value, const Combine& combine) {
  require_all(mask);
  const uint64_t* const values = exchange(kReduce, bits_as<uint64_t>(value));
  Number result = bits_as<Number>(values[0]);
  for (int i = 1; i < 32; ++i) result = combine(result, bits_as<Number>(values[i]));
  return result;
}

}  // namespace emulation

inline unsigned __ballot_sync(unsigned mask, bool vote) {
  emulation::require_all(mask);
  const uint64_t* const votes = emulation::exchange(emulation::kBallot, vote);
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= static_cast<unsigned>(votes[i]) << i;
  return result;
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline bool __all_sync(unsigned mask, bool vote) { return !__any_sync(mask, !vote); }

// Lanes stay within their `width` neighbours.
template <typename Value>
Value __shfl_sync(unsigned mask, Value value, int source, int width = 32) {
  emulation::require_all(mask);
  const uint64_t* const values =
      emulation::exchange(emulation::kShuffle, emulation::bits_as<uint64_t>(value));
  return emulation::bits_as<Value>(values[emulation::lane() / width * width + source % width]);
}
template <typename Value>
Value __shfl_xor_sync(unsigned mask, Value value, int bits) {
  emulation::require_all(mask);
  const uint64_t* const values =
      emulation::exchange(emulation::kShuffleXor, emulation::bits_as<uint64_t>(value));
  return emulation::bits_as<Value>(values[emulation::lane() ^ bits]);
}
template <typename Value>
Value __shfl_up_sync(unsigned mask, Value value, int distance, int width = 32) {
  emulation::require_all(mask);
  const int lane = emulation::lane();
  const uint64_t* const values =
      emulation::exchange(emulation::kShuffleUp, emulation::bits_as<uint64_t>(value));
  return emulation::bits_as<Value>(values[lane % width >= distance ? lane - distance : lane]);
}
template <typename Value>
unsigned __match_any_sync(unsigned mask, Value value) {
  emulation::require_all(mask);
  const auto mine = emulation::bits_as<uint64_t>(value);
  const uint64_t* const values = emulation::exchange(emulation::kMatch, mine);
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= static_cast<unsigned>(values[i] == mine) << i;
  return result;
}
template <typename Number>
Number __reduce_add_sync(unsigned mask, Number value) {
  return emulation::reduce(mask, value,
                           [](Number a, Number b) { return static_cast<Number>(a + b); });
}
template <typename Number>
Number __reduce_max_sync(unsigned mask, Number value) {
  return emulation::reduce(mask, value, [](Number a, Number b) { return std::max(a, b); });
}
template <typename Number>
Number __reduce_min_sync(unsigned mask, Number value) {
  return emulation::reduce(mask, value, [](Number a, Number b) { return std::min(a, b); });
}
inline void __syncwarp(unsigned mask = ~0u) {
  emulation::require_all(mask);
  emulation::exchange(emulation::kSync, 0);
}
inline void __syncthreads() { emulation::meet_cta(); }
inline bool __syncthreads_or(bool vote) { return emulation::meet_cta(vote) != 0; }
inline int __syncthreads_count(bool vote) { return emulation::meet_cta(vote); }
inline void __nanosleep(unsigned) { emulation::nap(); }

inline size_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<const uint8_t*>(pointer) - emulation::shared_memory;
}

inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline int __ffs(uint32_t bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline int __clz(uint32_t bits) { return bits ? __builtin_clz(bits) : 32; }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t{a} * b >> 32; }
inline uint32_t __float_as_uint(float value) { return emulation::bits_as<uint32_t>(value); }
inline int32_t __float_as_int(float value) { return emulation::bits_as<int32_t>(value); }
inline float __uint_as_float(uint32_t bits) { return emulation::bits_as<float>(bits); }
inline float __int_as_float(int32_t bits) { return emulation::bits_as<float>(bits); }
// The GPU's may be off in the last two bits.
inline float __fdividef(float a, float b) { return a / b; }
// Bytes of b and a, by the selector's digits.
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = selector >> 4 * i & 7;
    result |= static_cast<uint32_t>(bytes >> 8 * digit & 255) << 8 * i;
  }
  return result;
}
inline int32_t __vimax3_s32(int32_t a, int32_t b, int32_t c) { return max(max(a, b), c); }
inline uint32_t __vimin3_u32(uint32_t a, uint32_t b, uint32_t c) { return min(min(a, b), c); }
template <typename Value>
Value __ldcs(const Value* address) {
  return *address;
}

// Lanes change over only where they wait, so these are atomic.
template <typename Number>
Number atomicAdd(Number* address, std::common_type_t<Number> value) {
  const Number before = *address;
  *address += value;
  return before;
}
template <typename Number>
Number atomicExch(Number* address, std::common_type_t<Number> value) {
  return std::exchange(*address, value);
}
template <typename Number>
Number atomicCAS(Number* address, std::common_type_t<Number> expected,
                 std::common_type_t<Number> value) {
  return *address == expected ? std::exchange(*address, value) : *address;
}
template <typename Number>
Number atomicOr(Number* address, std::common_type_t<Number> value) {
  const Number before = *address;
  *address |= value;
  return before;
}
