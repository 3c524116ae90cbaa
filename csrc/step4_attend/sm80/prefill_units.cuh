// How 64 keys of a K or V block come to shared memory as bfloat16, on any GPU from sm_80 on.
//
// A *unit* is 64 keys x 128 d of bfloat16: rows of 256 bytes, of which 16-byte vector c of row r
// stands at c ^ (r % 8), so that neither the copies nor ldmatrix meet bank conflicts.
//
//   bfloat16 caches   cp.async writes the unit itself
//   FP8 caches        cp.async writes the bytes beside it; the thread that copied them converts
//                     them, once a CTA, into the unit
//
// *Wild* numbers are NaN and Inf in V. They must not meet a weight of 0, which would make NaN of
// it: they are replaced by 0, their rows noted, and whoever sees them adds them afterwards.
#pragma once

#include <cuda_bf16.h>

#include "common/views.h"
#include "device/sm80_async_copy.cuh"
#include "device/sm80_mma.cuh"

namespace msa::sparse_prefill::sm80 {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kUnitKeys = kBlock / 2;
constexpr int kUnitRowBytes = kHeadDim * 2;
constexpr int kUnitBytes = kUnitKeys * kUnitRowBytes;
constexpr int kRingBytes = 3 * kUnitBytes;

// Keeps the compiler from computing what follows from the value ahead of a loop, in registers that
// there are not.
__device__ __forceinline__ uint32_t within_loop(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Which rows of a unit hold wild numbers, a bit each.
using WildRows = unsigned long long;
static_assert(kUnitKeys == 64, "a bit each");

// The stages of a CTA's pipeline. In each turn, counted 0, 1, 2, 0, ..., it attends to half a
// block: a unit of K, then one of V. While a unit is used the next one is on its way, and the
// copies of the one after that begin: of bfloat16 in the third stage, of FP8 where the bytes of the
// unit lay.
template <DType kCache>
struct UnitRing;

template <>
struct UnitRing<DType::kBFloat16> {
  static constexpr int kElementBytes = 2;
  static constexpr int kUnits = 3;
  static constexpr int kRowVectors = kHeadDim * kElementBytes / 16;
  static constexpr int kPassRows = kThreads / kRowVectors;
  static constexpr int kPasses = kUnitKeys / kPassRows;
  static_assert(kUnits * kUnitBytes == kRingBytes, "K, V and the next K");
  static_assert(kPassRows == 8, "row % 8 is the same in all passes");
  // Three stages in a circle: K V K, V K V, ...
  static __device__ __forceinline__ int k_stage(int turn) { return turn == 0 ? 0 : 3 - turn; }
  static __device__ __forceinline__ int v_stage(int turn) { return turn == 2 ? 2 : 1 - turn; }

  uint32_t base;  // shared address

  __device__ __forceinline__ uint32_t unit(int index) const { return base + index * kUnitBytes; }
  // This thread's vector of pass 0.
  __device__ __forceinline__ uint32_t vector(int index) const {
    const uint32_t thread = within_loop(threadIdx.x);
    const uint32_t row = thread / kRowVectors, column = thread % kRowVectors;
    return unit(index) + row * kUnitRowBytes + (column ^ row) * 16;
  }

  __device__ __forceinline__ void copy(int index, const uint8_t* source, int64_t row_bytes) const {
    const uint32_t target = vector(index);
    const uint32_t thread = within_loop(threadIdx.x);
    source += thread / kRowVectors * row_bytes + thread % kRowVectors * 16;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      copy_async_16(target + pass * kPassRows * kUnitRowBytes, source);
      source += kPassRows * row_bytes;
    }
  }

  __device__ __forceinline__ void finish_keys(int) const {}

  // Takes the wild numbers out of what this thread copied, where `look` says that they matter.
  __device__ __forceinline__ bool finish_values(int index, bool look, WildRows& wild) const {
    if (!look) return false;
    bool found = false;
#pragma unroll 2  // registers are short here
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint32_t address = vector(index) + pass * kPassRows * kUnitRowBytes;
      uint32_t words[4];
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "r"(address)
                   : "memory");
      bool wild_here = false;
#pragma unroll
      for (uint32_t& word : words) {
        if ((word & 0x7f80u) == 0x7f80u) word &= 0xffff0000u, wild_here = true;
        if ((word & 0x7f800000u) == 0x7f800000u) word &= 0x0000ffffu, wild_here = true;
      }
      if (wild_here) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
                     "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
        const int row = within_loop(threadIdx.x) / kRowVectors + pass * kPassRows;
        atomicOr(&wild, 1ull << row);
        found = true;
      }
    }
    return found;
  }
};

// Four e4m3 numbers -> four bfloat16. Exponent and mantissa move to their places in bfloat16, which
// is the number times 2^-120, denormals included. NaN becomes 480: the caller sees to it.
__device__ __forceinline__ void e4m3_to_bfloat16(uint32_t bytes, uint32_t& low, uint32_t& high) {
  const auto convert = [](uint32_t pair) {  // bytes 1 and 3
    const uint32_t bits = (pair & 0x80008000u) | (pair & 0x7f007f00u) >> 4;
    uint32_t result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(result)
        : "r"(bits), "r"(0x7b807b80u) /* 2^120 */, "r"(0x80008000u) /* -0 */);
    return result;
  };
  low = convert(__byte_perm(bytes, 0, 0x1404));
  high = convert(__byte_perm(bytes, 0, 0x3424));
}

// Bit 7 of each byte that is a NaN of e4m3 (it has no Inf).
__device__ __forceinline__ uint32_t e4m3_nans(uint32_t bytes) {
  return ((bytes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
}

template <>
struct UnitRing<DType::kFloat8E4M3> {
  static constexpr int kElementBytes = 1;
  static constexpr int kUnits = 2;
  static constexpr int kRowVectors = kHeadDim * kElementBytes / 16;
  static constexpr int kPassRows = kThreads / kRowVectors;
  static constexpr int kPasses = kUnitKeys / kPassRows;
  static constexpr int kRawBytes = kUnitKeys * kHeadDim;
  static_assert(kUnits * (kUnitBytes + kRawBytes) <= kRingBytes, "two units and their bytes");
  static __device__ __forceinline__ int k_stage(int) { return 0; }
  static __device__ __forceinline__ int v_stage(int) { return 1; }

  uint32_t base;

  __device__ __forceinline__ uint32_t unit(int index) const { return base + index * kUnitBytes; }
  // What a thread copied: only itself reads it, so it lies in the order of the threads.
  __device__ __forceinline__ uint32_t raw(int index, int pass) const {
    return within_loop(base) + kUnits * kUnitBytes + index * kRawBytes +
           (pass * kThreads + within_loop(threadIdx.x)) * 16;
  }
  // A thread's vector of a row, 16 numbers. Eight threads have four vectors of two rows: those of
  // one row alone would meet in the banks that every other vector of bfloat16 lies in.
  static __device__ __forceinline__ uint32_t row(uint32_t thread) {
    return thread / 4 % 2 + thread / 16 * 2;
  }
  static __device__ __forceinline__ uint32_t column(uint32_t thread) {
    return thread % 4 + thread / 8 % 2 * 4;
  }

  __device__ __forceinline__ void copy(int index, const uint8_t* source, int64_t row_bytes) const {
    const uint32_t thread = within_loop(threadIdx.x);
    source += row(thread) * row_bytes + column(thread) * 16;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      copy_async_16(raw(index, pass), source);
      source += kPassRows * row_bytes;
    }
  }

  __device__ __forceinline__ void finish_keys(int index) const {
    convert(index, [](uint32_t, uint32_t nans, uint32_t& low, uint32_t& high) {
      if (nans & 0x00000080u) low |= 0x00007fffu;
      if (nans & 0x00008000u) low |= 0x7fff0000u;
      if (nans & 0x00800000u) high |= 0x00007fffu;
      if (nans & 0x80000000u) high |= 0x7fff0000u;
    });
  }

  __device__ __forceinline__ bool finish_values(int index, bool, WildRows& wild) const {
    bool found = false;
    convert(index, [&](uint32_t row, uint32_t nans, uint32_t& low, uint32_t& high) {
      if (nans & 0x00000080u) low &= 0xffff0000u;
      if (nans & 0x00008000u) low &= 0x0000ffffu;
      if (nans & 0x00800000u) high &= 0xffff0000u;
      if (nans & 0x80000000u) high &= 0x0000ffffu;
      atomicOr(&wild, 1ull << row);
      found = true;
    });
    return found;
  }

  // patch(row, nans, low, high) mends four numbers of which some are NaN.
  template <typename Patch>
  __device__ __forceinline__ void convert(int index, const Patch& patch) const {
    const uint32_t thread = within_loop(threadIdx.x);
#pragma unroll 1  // registers are short here
    for (int pass = 0; pass < kPasses; ++pass) {
      uint32_t words[4], numbers[8];
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "r"(raw(index, pass))
                   : "memory");
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        e4m3_to_bfloat16(words[i], numbers[2 * i], numbers[2 * i + 1]);
      }
      const uint32_t pass_row = row(thread) + pass * kPassRows;
      if ((e4m3_nans(words[0]) | e4m3_nans(words[1]) | e4m3_nans(words[2]) | e4m3_nans(words[3])) !=
          0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t nans = e4m3_nans(words[i]);
          if (nans != 0) patch(pass_row, nans, numbers[2 * i], numbers[2 * i + 1]);
        }
      }
      const uint32_t target =
          unit(index) + pass_row * kUnitRowBytes + ((2 * column(thread) ^ pass_row % 8) * 16);
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(numbers[0]),
                   "r"(numbers[1]), "r"(numbers[2]), "r"(numbers[3])
                   : "memory");
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(target ^ 16), "r"(numbers[4]),
                   "r"(numbers[5]), "r"(numbers[6]), "r"(numbers[7])
                   : "memory");
    }
  }
};

// The number of a cache where it is NaN or Inf, else 0.
template <DType kCache>
__device__ __forceinline__ float wild_number(const uint8_t* address) {
  if constexpr (kCache == DType::kBFloat16) {
    const uint32_t bits = *reinterpret_cast<const uint16_t*>(address);
    return (bits & 0x7f80u) == 0x7f80u ? __uint_as_float(bits << 16) : 0.0f;
  } else {
    return (*address & 0x7f) == 0x7f ? __uint_as_float(0x7fffffffu) : 0.0f;
  }
}

}  // namespace msa::sparse_prefill::sm80
