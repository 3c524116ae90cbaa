// FP8 caches of sparse_prefill: a page of e4m3 becomes the 16-bit block that the products read, by
// one warp, in shared memory.
//
//   V -> float16, which its weights are made in too;  K -> float16 where Q is made float16 (tiles,
//   which use it for many blocks), else bfloat16
//   k_scale multiplies the logits, v_scale the result
//
// In    [128 tokens][128 d] e4m3, 16 KB: rows of 128 bytes, 128-byte swizzle
// Out   [half of d][128 tokens][64 d], 32 KB: the same swizzle. The page may lie in the second half
//       of its own block: row t of a page has the address of row t of its second half of d, and a
//       group of eight rows is read before it is written.
// Lanes A group of eight rows at a time, two 16-byte reads and four 16-byte writes a lane: lane l
//       has row (l / 8) ^ (l & 4 ? 5 : 0), and of each half of d the 16 columns from 16 (l % 4).
//       Quarter warps then hold two rows that differ in bit 0 and in bit 2: neither the reads (two
//       64-byte halves) nor the writes (even and odd 16-byte columns) meet in a bank.
// Cost  a page has 16 groups of 8 words a lane: to bfloat16 1250 instructions, to float16 450.
#pragma once

#include "device/common.cuh"
#include "device/shared_memory.cuh"
#include "device/sm90/fp8.cuh"
#include "device/sm90/mbarrier.cuh"
#include "step4_attend/sm90/prefill_kv_block_tile.h"

namespace msa::sparse_prefill::sm90 {

using namespace msa::sm90;

constexpr int kFp8PageBytes = kBlock * kHeadDim;
constexpr int kGroupBytes = 1024;  // of eight rows, of the page and of half a block
constexpr int kPageGroups = kFp8PageBytes / kGroupBytes;

enum class Converted { kBFloat16, kFloat16 };

// 16 e4m3 -> two vectors of eight.
template <Converted kTo>
__device__ __forceinline__ void convert_vector(const uint4& bits, uint4 (&converted)[2]) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
  uint32_t pairs[4][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kTo == Converted::kBFloat16) {
      e4m3_to_bfloat16(words[i], pairs[i]);
    } else {
      e4m3_to_float16(words[i], pairs[i]);
    }
  }
  converted[0] = make_uint4(pairs[0][0], pairs[0][1], pairs[1][0], pairs[1][1]);
  converted[1] = make_uint4(pairs[2][0], pairs[2][1], pairs[3][0], pairs[3][1]);
}

// Makes the NaN of a vector 0. Was there any?
__device__ __forceinline__ bool clear_nan(uint4& bits) {
  const uint32_t nan[4] = {e4m3_nan_mask(bits.x), e4m3_nan_mask(bits.y), e4m3_nan_mask(bits.z),
                           e4m3_nan_mask(bits.w)};
  bits = make_uint4(bits.x & ~nan[0], bits.y & ~nan[1], bits.z & ~nan[2], bits.w & ~nan[3]);
  return (nan[0] | nan[1] | nan[2] | nan[3]) != 0;
}

// The page at `page`, or 8 kGroups rows of it, becomes the block at `block`; whole warp. With
// `clean` (of values) what must not meet a weight of 0 becomes 0: rows at or past `written`, and
// NaN, whose rows are noted in `wild`. `written` is a reference for the sake of registers: where it
// lies in shared memory, it is read when it is needed.
template <Converted kTo, int kGroups = kPageGroups>
__device__ __forceinline__ void convert_page(const uint8_t* page, uint8_t* block, bool clean,
                                             const int32_t& written, uint32_t* wild) {
  // Read anew for each page: kept over pages, what follows from it takes registers that are scarce.
  const int lane = read_lane();
  const int part = lane % 4, row = lane / 8 ^ (lane & 4 ? 5 : 0);
  // Both halves of d of the lane's columns; the block's columns are 0 to 7 and 8 to 15 of them. As
  // numbers, so that each is one register: of pointers the compiler keeps several terms.
  uint32_t in = shared_address(page) + row * 128 + (part ^ row) * 16;
  uint32_t out = shared_address(block) + row * 128 + (2 * part ^ row) * 16;
  uint4 bits[2] = {load_shared_16(in), load_shared_16(in ^ 64)};
#pragma unroll 1
  for (int group = 0; group < kGroups; ++group) {
    if (clean) {
      const int32_t token = group * 8 + row;
      if (token >= written) bits[0] = bits[1] = make_uint4(0, 0, 0, 0);
      if (clear_nan(bits[0]) | clear_nan(bits[1])) atomicOr(&wild[token / 32], 1u << token % 32);
    }
    __syncwarp();  // the page may lie in its own block
    in += kGroupBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 converted[2];
      convert_vector<kTo>(bits[half], converted);
      if (group + 1 < kGroups) bits[half] = load_shared_16(in ^ half * 64);
      store_shared_16(out + half * (kPageBytes / 2), converted[0]);
      store_shared_16((out ^ 16) + half * (kPageBytes / 2), converted[1]);
    }
    out += kGroupBytes;
  }
}

}  // namespace msa::sparse_prefill::sm90
