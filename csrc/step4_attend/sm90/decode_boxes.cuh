// Slices of a block by Hopper's bulk copies: K or V of a slice is a box of a tensor map, which one
// lane asks for and a barrier counts. Any strides of a cache that contract and map allow; layout in
// shared memory: decode_slice.cuh, boxes.
//
// L2        blocks that one token reads are read once: their lines give way to each other before
// they
//           displace others, which are to be written back first where they are dirty. Tokens of a
//           request share blocks, whose lines stay.
// Unseen    a box is whole, whatever of it counts: tokens past pos are masked in S, and their rows
//           of V, where 0 * NaN would be NaN, become 0 in shared memory before they are read.
#pragma once

#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"
#include "step4_attend/sm80/decode_walk.cuh"

namespace msa::decode::sm90 {

using namespace msa::decode::sm80;
namespace hopper = msa::sm90;

// How slices of a KV head come to shared memory; by one thread.
struct SliceBoxes {
  const CUtensorMap* k_map;
  const CUtensorMap* v_map;
  int head;
  uint64_t policy;

  __device__ __forceinline__ SliceBoxes(const DecodeParams& params, const CUtensorMap& k,
                                        const CUtensorMap& v, int kv_head)
      : k_map(&k),
        v_map(&v),
        head(kv_head),
        policy(params.tokens_each == 1 ? hopper::evict_first_policy()
                                       : hopper::evict_normal_policy()) {}

  __device__ __forceinline__ void copy_k(uint8_t* part, const SliceTokens& tokens,
                                         uint64_t* full) const {
    hopper::copy_box(part, k_map, full, 0, tokens.first, 0, head, tokens.page, policy);
  }
  __device__ __forceinline__ void copy_v(uint8_t* part, const SliceTokens& tokens,
                                         uint64_t* full) const {
    hopper::copy_box(part, v_map, full, 0, tokens.first, 0, head, tokens.page, policy);
  }
};

// Makes 0 of the rows of V at or past `valid`; by the warp that read or will read them.
template <typename Element>
__device__ __forceinline__ void clear_unseen_values(uint8_t* v, int valid) {
  using S = Slice<Element>;
  const int lane = threadIdx.x % 32;  // of bfloat16 lanes 16 to 31 have the rows' other halves
  if (lane % S::kTokens >= valid) {
    auto* row = reinterpret_cast<uint4*>(v + lane * S::kBoxRowBytes);
#pragma unroll 1
    for (int i = 0; i < S::kBoxRowBytes / 16; ++i) row[i] = make_uint4(0, 0, 0, 0);
  }
  hopper::fence_async_proxy();  // the stage's next box is written after these zeros
  __syncwarp();
}

}  // namespace msa::decode::sm90
