// The products of one page of index keys with the query rows of one warp, and their maxima: what
// all score kernels share, so that a score has the same bits whichever of them computes it.
//
//   best[n] = max over keys m of the page, as far as n's token sees them, of key[m] . query[n]
//
// mma.m16n8k16, keys as M and query rows as N. The query rows stay in registers, the keys come from
// shared memory by 16-byte loads: lane (g, t) = (lane / 4, lane % 4) of a warp reads chunk
// 4 c + t of rows g and g + 8 of 16 keys and takes it as the k's that the instruction wants of it.
// Which k an element is called does not matter, as keys and queries agree on it.
//
// FP8 is turned into float16, exactly; products of either type are exact, sums are float32.
// A NaN product makes its score NaN. Keys that a token does not see cannot reach its score.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "common/views.h"
#include "device/common.cuh"
#include "device/shared_memory.cuh"

namespace msa::index_score::sm80 {

constexpr int kSteps = kHeadDim / 16;  // k steps of a product
constexpr int kChunkBytes = 16;

// What a chunk of 16 bytes gives: kSteps pairs of registers, for k steps one after the other.
template <DType dtype>
struct IndexElement;

template <>
struct IndexElement<DType::kBFloat16> {
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kChunkSteps = 2;

  static __device__ __forceinline__ void unpack(const uint4& bits, uint32_t (&pairs)[2][2]) {
    pairs[0][0] = bits.x;
    pairs[0][1] = bits.y;
    pairs[1][0] = bits.z;
    pairs[1][1] = bits.w;
  }

  static __device__ __forceinline__ void multiply(const uint32_t (&a)[4], const uint32_t (&b)[2],
                                                  float (&sum)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};

// The two low bytes of `bits`, e4m3, as two float16.
__device__ __forceinline__ uint32_t e4m3_to_half(uint32_t bits) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("{\n"
      ".reg .b16 bytes;\n"
      "cvt.u16.u32 bytes, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, bytes;\n"
      "}\n"
      : "=r"(halves)
      : "r"(bits));
  return halves;
#else
  // Exponent and mantissa one place down have a float16's exponent, 2^8 too small.
  const uint32_t high = __byte_perm(bits, 0, 0x1404);  // each byte in the upper half of 16 bits
  const uint32_t magnitude = high & 0x7f007f00u;
  const uint32_t nan = (magnitude + 0x01000100u) & 0x80008000u;  // of 0x7f alone
  const uint32_t small = (high & 0x80008000u) | magnitude >> 1;
  uint32_t halves;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(small), "r"(0x5c005c00u));  // 256
  return halves | (nan >> 15) * 0x7fffu;
#endif
}

template <>
struct IndexElement<DType::kFloat8E4M3> {
  static constexpr int kRowBytes = kHeadDim;
  static constexpr int kChunkSteps = 4;

  static __device__ __forceinline__ void unpack(const uint4& bits, uint32_t (&pairs)[4][2]) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      pairs[word][0] = e4m3_to_half(words[word]);
      pairs[word][1] = e4m3_to_half(words[word] >> 16);
    }
  }

  static __device__ __forceinline__ void multiply(const uint32_t (&a)[4], const uint32_t (&b)[2],
                                                  float (&sum)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};

// Rows of a page in shared memory: kSwizzled, where odd rows have the halves of each 128 bytes
// exchanged, so that a load meets each bank once.
template <DType dtype, bool kSwizzled>
__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
  return row * IndexElement<dtype>::kRowBytes +
         ((kSwizzled ? chunk ^ (row & 1) << 2 : chunk) * kChunkBytes);
}

// kRows query rows of a warp: row n is token n / heads, head n % heads of the warp's rows.
template <DType dtype, int kRows>
struct QueryRows {
  static constexpr int kColumns = kRows / 8;  // n tiles
  uint32_t pairs[kSteps][kColumns][2];

  // row(n): the query row's address, null where there is none.
  template <typename Row>
  __device__ __forceinline__ void load(const Row& row) {
    using Element = IndexElement<dtype>;
    const int lane = threadIdx.x % 32, group = lane / 4, chunk = lane % 4;
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      const uint8_t* source = row(column * 8 + group);
#pragma unroll
      for (int c = 0; c < kSteps / Element::kChunkSteps; ++c) {
        uint4 bits{0, 0, 0, 0};
        if (source) {
          bits = *reinterpret_cast<const uint4*>(source + (4 * c + chunk) * kChunkBytes);
        }
        uint32_t unpacked[Element::kChunkSteps][2];
        Element::unpack(bits, unpacked);
#pragma unroll
        for (int step = 0; step < Element::kChunkSteps; ++step) {
          pairs[c * Element::kChunkSteps + step][column][0] = unpacked[step][0];
          pairs[c * Element::kChunkSteps + step][column][1] = unpacked[step][1];
        }
      }
    }
  }
};

// Lane (g, t) holds maxima of rows 8 column + 2 t and the next over the keys that it saw.
template <int kRows>
using Maxima = float[kRows / 8][2];

template <int kRows>
__device__ __forceinline__ void clear(Maxima<kRows>& best) {
#pragma unroll
  for (int column = 0; column < kRows / 8; ++column) {
    best[column][0] = -INFINITY;
    best[column][1] = -INFINITY;
  }
}

// Keys [first_key, first_key + kKeys) of a page, at `keys` in shared memory. Where `masked`,
// last_key(n) is the last key that row n sees.
template <DType dtype, int kRows, int kKeys, bool kSwizzled, typename LastKey>
__device__ __forceinline__ void score_keys(uint32_t keys, int first_key,
                                           const QueryRows<dtype, kRows>& queries,
                                           Maxima<kRows>& best, bool masked,
                                           const LastKey& last_key) {
  using Element = IndexElement<dtype>;
  constexpr int kColumns = kRows / 8;
  // Tiles of 16 keys at a time: enough products that do not wait for each other.
  constexpr int kTiles = kRows >= 32 ? (kRows == 32 ? 2 : 1) : (kKeys >= 64 ? 4 : kKeys / 16);
  const int lane = threadIdx.x % 32, group = lane / 4, chunk = lane % 4;
#pragma unroll 1
  for (int first = 0; first < kKeys; first += 16 * kTiles) {
    float sums[kTiles][kColumns][4] = {};
#pragma unroll
    for (int c = 0; c < kSteps / Element::kChunkSteps; ++c) {
      uint32_t low[kTiles][Element::kChunkSteps][2], high[kTiles][Element::kChunkSteps][2];
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int row = first + 16 * tile + group;
        const uint32_t offset = chunk_offset<dtype, kSwizzled>(row, 4 * c + chunk);
        Element::unpack(load_shared_16(keys + offset), low[tile]);
        Element::unpack(load_shared_16(keys + offset + 8 * Element::kRowBytes), high[tile]);
      }
#pragma unroll
      for (int step = 0; step < Element::kChunkSteps; ++step) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const uint32_t a[4] = {low[tile][step][0], high[tile][step][0], low[tile][step][1],
                                 high[tile][step][1]};
#pragma unroll
          for (int column = 0; column < kColumns; ++column) {
            Element::multiply(a, queries.pairs[c * Element::kChunkSteps + step][column],
                              sums[tile][column]);
          }
        }
      }
    }
    if (masked) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const int last = last_key(column * 8 + 2 * chunk + side);
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            const int key = first_key + first + 16 * tile + group;
            if (key > last) sums[tile][column][side] = -INFINITY;
            if (key + 8 > last) sums[tile][column][side + 2] = -INFINITY;
          }
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          best[column][side] =
              max_or_nan(best[column][side],
                         max_or_nan(sums[tile][column][side], sums[tile][column][side + 2]));
        }
      }
    }
  }
}

// The maxima of a warp over all its lanes: each lane is left with kKept rows, whose numbers
// `kept_rows` gives (the same for every page), -1 where another lane has them too.
template <int kRows>
struct RowMaxima {
  static constexpr int kKept = kRows > 32 ? kRows / 32 : 1;

  static __device__ __forceinline__ void kept_rows(int (&rows)[kKept]) {
    const int lane = threadIdx.x % 32;
    int count = kRows / 4, first = 0;  // values of a lane, 2 column + side
    bool other_has_it = false;
#pragma unroll
    for (int bit = 16; bit >= 4; bit /= 2) {
      const bool upper = lane & bit;
      if (count > 1) {
        count /= 2;
        if (upper) first += count;
      } else {
        other_has_it |= upper;
      }
    }
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int value = first + i;
      rows[i] = other_has_it ? -1 : value / 2 * 8 + lane % 4 * 2 + value % 2;
    }
  }

  static __device__ __forceinline__ void reduce(const Maxima<kRows>& best, float (&kept)[kKept]) {
    constexpr unsigned kAll = 0xffffffffu;
    const int lane = threadIdx.x % 32;
    float values[kRows / 4];
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) values[i] = best[i / 2][i % 2];
    int count = kRows / 4;
#pragma unroll
    for (int bit = 16; bit >= 4; bit /= 2) {
      const bool upper = lane & bit;
      if (count > 1) {
        count /= 2;
#pragma unroll
        for (int i = 0; i < kRows / 8; ++i) {
          if (i < count) {
            const float mine = upper ? values[i + count] : values[i];
            const float theirs = upper ? values[i] : values[i + count];
            values[i] = max_or_nan(mine, __shfl_xor_sync(kAll, theirs, bit));
          }
        }
      } else {
        values[0] = max_or_nan(values[0], __shfl_xor_sync(kAll, values[0], bit));
      }
    }
#pragma unroll
    for (int i = 0; i < kKept; ++i) kept[i] = values[i];
  }
};

}  // namespace msa::index_score::sm80
