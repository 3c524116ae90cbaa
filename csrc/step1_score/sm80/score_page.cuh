// The products of one page of index keys with the query rows of one warp, and their maxima: what
// all score kernels share, so that a score has the same bits whichever of them computes it.
//
//   best[n] = max over keys m of the page, as far as n's token sees them, of key[m] . query[n]
//
// mma.m16n8k16. The query rows stay in registers, the keys come from shared memory by 16-byte
// loads: lane (g, t) = (lane / 4, lane % 4) of a warp reads chunk 4 c + t of a key and takes it as
// the k's that the instruction wants of it. Which k an element is called does not matter, as keys
// and queries agree on it.
//   bfloat16  query rows as M, keys as N: an operand of a key are two registers side by side, where
//             the load leaves them; as M it would take 4 of two keys, moved together.
//   FP8       keys as M, query rows as N: the conversion leaves operands where they belong, and
//             of 8 query rows no half of a product is wasted.
// FP8 is turned into float16, exactly; products of either type are exact, sums are float32.
// A NaN product makes its score NaN. Keys that a token does not see cannot reach its score.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "common/views.h"
#include "device/common.cuh"
#include "device/fp8.cuh"
#include "device/shared_memory.cuh"
#include "device/sm80_mma.cuh"

namespace msa::index_score::sm80 {

constexpr int kSteps = kHeadDim / 16;  // k steps of a product
constexpr int kChunkBytes = 16;

// What a chunk of 16 bytes gives: kChunkSteps pairs of registers, for k steps one after the other.
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
    multiply_bf16(sum, a, b[0], b[1]);
  }
};

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
    multiply_f16(sum, a, b[0], b[1]);
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
  using Element = IndexElement<dtype>;
  static constexpr bool kAreM = dtype == DType::kBFloat16;
  static constexpr int kTiles = kAreM ? (kRows + 15) / 16 : kRows / 8;
  static constexpr int kWords = kAreM ? 4 : 2;  // of an operand
  uint32_t words[kSteps][kTiles][kWords];

  // row(n): the query row's address, null where there is none, as of rows 8 to 15 where there
  // are 8. zero: 0, which the compiler must not know. Words that it knew as zeros, or as what a
  // load left elsewhere, it would move together anew for every product. Waits for the loads, so.
  template <typename Row>
  __device__ __forceinline__ void load(const Row& row, uint32_t zero) {
    constexpr int kTileRows = kAreM ? 16 : 8;
    const int lane = threadIdx.x % 32, group = lane / 4, chunk = lane % 4;
#pragma unroll
    for (int i = 0; i < kTiles * kTileRows / 8; ++i) {
      const int tile = i * 8 / kTileRows, half = i * 8 % kTileRows / 8;
      const uint8_t* source = row(8 * i + group);
#pragma unroll
      for (int c = 0; c < kSteps / Element::kChunkSteps; ++c) {
        uint4 bits{0, 0, 0, 0};
        if (source) {
          bits = *reinterpret_cast<const uint4*>(source + (4 * c + chunk) * kChunkBytes);
        }
        uint32_t pairs[Element::kChunkSteps][2];
        Element::unpack(bits, pairs);
#pragma unroll
        for (int step = 0; step < Element::kChunkSteps; ++step) {
          uint32_t (&operand)[kWords] = words[c * Element::kChunkSteps + step][tile];
          operand[half] = kAreM ? pairs[step][0] ^ zero : pairs[step][0];
          operand[half + kWords / 2] = kAreM ? pairs[step][1] ^ zero : pairs[step][1];
        }
      }
    }
  }
};

// The largest scores of a warp's rows over the keys that a lane saw. Value i is of row
//   8 i + g                     queries as M: lanes of a quad hold the same rows
//   8 (i / 2) + 2 t + i % 2     as N: lanes with the same t do
template <DType dtype, int kRows>
struct RowMaxima {
  static constexpr bool kAreM = QueryRows<dtype, kRows>::kAreM;
  static constexpr int kValues = kAreM ? kRows / 8 : kRows / 4;
  static constexpr int kHighBit = kAreM ? 2 : 16, kLowBit = kAreM ? 1 : 4;  // of lanes to reduce
  static constexpr int kLanes = 2 * kHighBit / kLowBit;
  static constexpr int kKept = kValues > kLanes ? kValues / kLanes : 1;
  float values[kValues];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float& value : values) value = -INFINITY;
  }

  static __device__ __forceinline__ int row_of(int value) {
    const int lane = threadIdx.x % 32;
    return kAreM ? value * 8 + lane / 4 : value / 2 * 8 + lane % 4 * 2 + value % 2;
  }

  __device__ __forceinline__ void add(int value, float first, float second) {
    values[value] = max_or_nan(values[value], max_or_nan(first, second));
  }

  // Over all lanes each lane is left with kKept rows: their numbers, the same for every page, -1
  // where another lane has them too.
  static __device__ __forceinline__ void kept_rows(int (&rows)[kKept]) {
    const int lane = threadIdx.x % 32;
    int count = kValues, first = 0;
    bool other_has_it = false;
#pragma unroll
    for (int bit = kHighBit; bit >= kLowBit; bit /= 2) {
      const bool upper = lane & bit;
      if (count > 1) {
        count /= 2;
        if (upper) first += count;
      } else {
        other_has_it |= upper;
      }
    }
#pragma unroll
    for (int i = 0; i < kKept; ++i) rows[i] = other_has_it ? -1 : row_of(first + i);
  }

  __device__ __forceinline__ void reduce(float (&kept)[kKept]) const {
    const int lane = threadIdx.x % 32;
    float left[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) left[i] = values[i];
    int count = kValues;
#pragma unroll
    for (int bit = kHighBit; bit >= kLowBit; bit /= 2) {
      const bool upper = lane & bit;
      if (count > 1) {
        count /= 2;
#pragma unroll
        for (int i = 0; i < (kValues + 1) / 2; ++i) {
          if (i < count) {
            const float mine = upper ? left[i + count] : left[i];
            const float theirs = upper ? left[i] : left[i + count];
            left[i] = max_or_nan(mine, __shfl_xor_sync(kAllLanes, theirs, bit));
          }
        }
      } else {
        left[0] = max_or_nan(left[0], __shfl_xor_sync(kAllLanes, left[0], bit));
      }
    }
#pragma unroll
    for (int i = 0; i < kKept; ++i) kept[i] = left[i];
  }
};

// Keys [first_key, first_key + kKeys) of a page, at `keys` in shared memory. Where `masked`,
// last_key(n) is the last key that row n sees.
template <DType dtype, int kRows, int kKeys, bool kSwizzled, typename LastKey>
__device__ __forceinline__ void score_keys(uint32_t keys, int first_key,
                                           const QueryRows<dtype, kRows>& queries,
                                           RowMaxima<dtype, kRows>& best, bool masked,
                                           const LastKey& last_key) {
  using Element = IndexElement<dtype>;
  constexpr bool kAreM = QueryRows<dtype, kRows>::kAreM;
  constexpr int kTiles = QueryRows<dtype, kRows>::kTiles, kTileKeys = kAreM ? 8 : 16;
  // Tiles of keys at a time: enough products that do not wait for each other.
  constexpr int kMost = kAreM ? 8 / kTiles : (kTiles >= 8 ? 1 : kTiles >= 4 ? 2 : 4);
  constexpr int kKeyTiles = kKeys / kTileKeys < kMost ? kKeys / kTileKeys : kMost;
  const int lane = threadIdx.x % 32, group = lane / 4, chunk = lane % 4;
  // Of key g on top of `key`, a multiple of 8: constants away from that of key 0.
  const uint32_t place = keys + chunk_offset<dtype, kSwizzled>(group, chunk);
  const auto key_address = [&](int key, int c) {
    const uint32_t four = c % 2 * 4 * kChunkBytes;
    return (kSwizzled ? place ^ four : place + four) + key * Element::kRowBytes +
           c / 2 * 8 * kChunkBytes;
  };
#pragma unroll 1
  for (int first = 0; first < kKeys; first += kTileKeys * kKeyTiles) {
    float sums[kKeyTiles][kTiles][4] = {};
#pragma unroll
    for (int c = 0; c < kSteps / Element::kChunkSteps; ++c) {
      uint32_t pairs[kKeyTiles][kTileKeys / 8][Element::kChunkSteps][2];  // of keys g and g + 8
#pragma unroll
      for (int key_tile = 0; key_tile < kKeyTiles; ++key_tile) {
#pragma unroll
        for (int eight = 0; eight < kTileKeys / 8; ++eight) {
          const int key = first + kTileKeys * key_tile + 8 * eight;
          Element::unpack(load_shared_16(key_address(key, c)), pairs[key_tile][eight]);
        }
      }
#pragma unroll
      for (int step = 0; step < Element::kChunkSteps; ++step) {
        const auto& query = queries.words[c * Element::kChunkSteps + step];
#pragma unroll
        for (int key_tile = 0; key_tile < kKeyTiles; ++key_tile) {
          const auto& key = pairs[key_tile];
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            if constexpr (kAreM) {
              Element::multiply(query[tile], key[0][step], sums[key_tile][tile]);
            } else {
              const uint32_t a[4] = {key[0][step][0], key[1][step][0], key[0][step][1],
                                     key[1][step][1]};
              Element::multiply(a, query[tile], sums[key_tile][tile]);
            }
          }
        }
      }
    }
    // Of a row's value, and of two keys, one `kApart` above the other.
    constexpr int kApart = kAreM ? 1 : 8;
    const auto sum_of = [&](int value, int key_tile, int above) -> float& {
      const int side = value % 2;
      return sums[key_tile][value / 2][kAreM ? 2 * side + above : side + 2 * above];
    };
    constexpr int kValues = RowMaxima<dtype, kRows>::kValues;
    if (masked) {
#pragma unroll
      for (int value = 0; value < kValues; ++value) {
        const int last = last_key(best.row_of(value));
#pragma unroll
        for (int key_tile = 0; key_tile < kKeyTiles; ++key_tile) {
          const int key = first_key + first + kTileKeys * key_tile + (kAreM ? 2 * chunk : group);
          if (key > last) sum_of(value, key_tile, 0) = -INFINITY;
          if (key + kApart > last) sum_of(value, key_tile, 1) = -INFINITY;
        }
      }
    }
#pragma unroll
    for (int key_tile = 0; key_tile < kKeyTiles; ++key_tile) {
#pragma unroll
      for (int value = 0; value < kValues; ++value) {
        best.add(value, sum_of(value, key_tile, 0), sum_of(value, key_tile, 1));
      }
    }
  }
}

}  // namespace msa::index_score::sm80
