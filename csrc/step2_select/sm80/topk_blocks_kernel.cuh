// Step 2, topk_blocks: scores -> ids, an exact top-K of every row (index head, token).
//
//   ids[h, t] = forced blocks and the highest scores of scores[h, t, candidates], min(K, visible)
//               in all, ascending, then -1; of equal scores the lower ids, NaN below -inf.
//
// Portable: every GPU from sm_80 on. Bound by latency on few rows and by reading the scores on
// many: one pass over them, into registers.
//
// Grid      kWarps = 1: a warp a row, kRowsPerCta rows a CTA. Above: a CTA a row, each warp a
//           contiguous segment of it.
// Method    scores as ordered integers (topk_row.cuh), lane l of a warp holds block 32 i + l:
//   bound   lane l's largest, over all warps, is a group's largest; the groups part the row. The
//           c-th largest of the 32 group maxima is a lower bound of the c-th largest of all,
//           c = how many candidates are selected (at most 32).
//   compact what reaches the bound, in order of id, by ballots: c and a few for ordinary scores
//   rank    of at most kShortList such: counted against each other; (score, place in the list) is
//           a total order, so exactly c have a rank below c, and their places are in order of id.
//   search  of more (equal scores, or K = 32): the c-th largest key bit by bit, then all above it
//           and the first of those equal to it. 32 counts, whatever the scores.
// Next      the next kernel's launch begins when the scores are there.
// Registers kValues keys a lane; kValues = 0: rows of any length, the scores read anew each pass.
//           So are those of rows longer than the kernel was launched for.
// Shared    group maxima, counts, the short list and the result of a row. What every lane compares
//           with every other's it reads there, 16 bytes a load: 32 shuffles took 17 clocks each.
// Barriers  __syncwarp for a warp a row, __syncthreads above.
// Order     no atomics: the same bits every time, wherever the row stands.
// Limits    K <= 32; fewer than 2^31 rows; 64-bit offsets. Scores of forced and of invisible blocks
// are not read.
#pragma once

#include "device/dependent_launch.cuh"
#include "step2_select/sm80/topk_blocks_run.h"
#include "step2_select/sm80/topk_row.cuh"

namespace msa::topk_blocks::sm80 {

constexpr int kRowsPerCta = 4;  // of kernels with a warp a row
constexpr int kShortList = 64;  // two candidates a lane

template <int kWarps>
struct RowScratch {
  uint32_t maxima[kWarps][32];
  alignas(16) uint32_t group_maxima[kWarps][32];  // a copy a warp
  int32_t counts[2][kWarps];
  // Key and block; the last takes what does not fit or belong.
  alignas(16) uint2 list[kShortList + 1];
  int32_t chosen[kMaxTopk];
};

template <int kWarps, int kValues>
struct RowSelector {
  static constexpr bool kResident = kValues > 0;
  static constexpr int kGroup = 8;  // keys of a lane that are there, or looked at, together

  const float* scores;  // of block 0
  int64_t block_stride;
  RowScratch<kWarps>& scratch;
  int lane, warp;
  int32_t first, end;  // this lane's blocks: first, first + 32, ... below end, `steps` of them
  int32_t steps;
  const float* source;  // of block `first`; `left` scores from it on are the lane's, 32 apart
  int32_t left;
  uint32_t keys[kResident ? kValues : 1];

  static __device__ __forceinline__ void sync() {
    if constexpr (kWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  __device__ __forceinline__ uint32_t load(int32_t step) const {
    const int32_t block = first + 32 * step;
    return step < steps && block < end ? score_key(scores[block * block_stride]) : 0;
  }

  // Which blocks are the lane's; reads no score.
  __device__ __forceinline__ void place(const RowBlocks& blocks) {
    const int32_t count = blocks.local_begin - blocks.init_end;
    steps = ((count + 31) / 32 + kWarps - 1) / kWarps;
    first = blocks.init_end + warp * steps * 32 + lane;
    end = blocks.local_begin;
    source = scores + first * block_stride;
    left = steps > 0 ? min(end - first, steps * 32) : 0;
  }

  __device__ __forceinline__ void load_keys() {
    if constexpr (kResident) {
      // All loads before the first use; of neighbouring scores, from one address.
      float values[kValues];
      if (block_stride == 1) {
#pragma unroll
        for (int begin = 0; begin < kValues; begin += kGroup) {
          if (ends_before(begin)) break;
#pragma unroll
          for (int i = begin; i < begin + kGroup; ++i) {
            values[i] = 32 * i < left ? source[32 * i] : 0.0f;
          }
        }
      } else {
        const float* address = source;
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          values[i] = 32 * i < left ? *address : 0.0f;
          address += 32 * block_stride;
        }
      }
#pragma unroll
      for (int begin = 0; begin < kValues; begin += kGroup) {
        if (ends_before(begin)) break;
#pragma unroll
        for (int i = begin; i < begin + kGroup; ++i) {
          keys[i] = 32 * i < left ? score_key(values[i]) : 0;
        }
      }
    }
  }

  // Keys [begin, begin + kGroup) of the lane are none: rows may be shorter than the kernel's most.
  __device__ __forceinline__ bool ends_before(int begin) const {
    return begin > 0 && begin >= steps;
  }

  // visit(key, block) for every block of the lane, in whole warps; key 0 where there is none.
  template <typename Visit>
  __device__ __forceinline__ void for_each(const Visit& visit) const {
    if constexpr (kResident) {
#pragma unroll
      for (int begin = 0; begin < kValues; begin += kGroup) {
        if (ends_before(begin)) break;
#pragma unroll
        for (int i = begin; i < begin + kGroup; ++i) visit(keys[i], first + 32 * i);
      }
    } else {
#pragma unroll 4
      for (int32_t i = 0; i < steps; ++i) visit(load(i), first + 32 * i);
    }
  }

  // How many keys of the row reach `least`, known to all threads.
  __device__ __forceinline__ int32_t count(uint32_t least, int32_t (&counts)[kWarps]) const {
    int32_t mine = 0;
    for_each([&](uint32_t key, int32_t) { mine += key >= least; });
    mine = __reduce_add_sync(kAllLanes, mine);
    if constexpr (kWarps == 1) return mine;
    sync();  // the counts of the call before have been read
    if (lane == 0) counts[warp] = mine;
    sync();
    int32_t sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += counts[w];
    return sum;
  }

  // Of what the warps before this one counted.
  __device__ __forceinline__ int32_t before(const int32_t (&counts)[kWarps]) const {
    int32_t sum = 0;
#pragma unroll
    for (int w = 0; w + 1 < kWarps; ++w) sum += w < warp ? counts[w] : 0;
    return sum;
  }

  __device__ __forceinline__ uint32_t lower_bound(int32_t capacity) const {
    uint32_t largest = 0;
    for_each([&](uint32_t key, int32_t) { largest = max(largest, key); });
    if constexpr (kWarps > 1) {
      scratch.maxima[warp][lane] = largest;
      sync();
#pragma unroll
      for (int w = 0; w < kWarps; ++w) largest = max(largest, scratch.maxima[w][lane]);
    }
    // The least of those that fewer than `capacity` exceed.
    scratch.group_maxima[warp][lane] = largest;
    __syncwarp();
    int32_t exceeding = 0;
#pragma unroll
    for (int other = 0; other < 32; other += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(&scratch.group_maxima[warp][other]);
      exceeding += (four.x > largest) + (four.y > largest);
      exceeding += (four.z > largest) + (four.w > largest);
    }
    return max(__reduce_min_sync(kAllLanes, exceeding < capacity ? largest : ~0u), 1u);
  }

  // Blocks whose keys reach `least`, by id, into the short list, as far as they fit. Returns how
  // many they are, of this warp and those before it.
  __device__ __forceinline__ int32_t compact(uint32_t least, int32_t place) const {
    const unsigned lower_lanes = (1u << lane) - 1;
    for_each([&](uint32_t key, int32_t block) {
      const bool passes = key >= least;
      const unsigned passing = __ballot_sync(kAllLanes, passes);
      if (kWarps > 1 && passing == 0) return;  // the rule in long rows
      const int32_t mine = min(place + __popc(passing & lower_lanes), kShortList);
      scratch.list[passes ? mine : kShortList] = {key, static_cast<uint32_t>(block)};
      place += __popc(passing);
    });
    return place;
  }

  // The best `capacity` of the list, one warp. Of equal keys the first in the list is the better.
  __device__ __forceinline__ void rank(int32_t listed, int32_t capacity) const {
    if (lane >= listed) scratch.list[lane] = {0, 0};
    if (lane + 32 >= listed) scratch.list[lane + 32] = {0, 0};
    __syncwarp();
    const uint2 low = scratch.list[lane], high = scratch.list[lane + 32];
    const unsigned lower_lanes = (1u << lane) - 1;
    const auto pair_of = [&](int place) {  // two keys, and their blocks
      return *reinterpret_cast<const uint4*>(&scratch.list[place]);
    };
    int32_t low_rank = __popc(__match_any_sync(kAllLanes, low.x) & lower_lanes), high_rank = 0;
#pragma unroll
    for (int other = 0; other < 32; other += 2) {
      const uint4 pair = pair_of(other);
      low_rank += (pair.x > low.x) + (pair.z > low.x);
    }
    if (listed > 32) {
      high_rank = __popc(__match_any_sync(kAllLanes, high.x) & lower_lanes);
#pragma unroll
      for (int other = 0; other < 32; other += 2) {
        const uint4 before = pair_of(other), pair = pair_of(32 + other);
        low_rank += (pair.x > low.x) + (pair.z > low.x);
        high_rank += (pair.x > high.x) + (pair.z > high.x);
        high_rank += (before.x >= high.x) + (before.z >= high.x);
      }
    }
    const bool take_low = low.x > 0 && low_rank < capacity;
    const bool take_high = high.x > 0 && high_rank < capacity;
    const unsigned lows = __ballot_sync(kAllLanes, take_low);
    const unsigned highs = __ballot_sync(kAllLanes, take_high);
    if (take_low) scratch.chosen[__popc(lows & lower_lanes)] = static_cast<int32_t>(low.y);
    if (take_high) {
      scratch.chosen[__popc(lows) + __popc(highs & lower_lanes)] = static_cast<int32_t>(high.y);
    }
  }

  // The same without a list, all warps.
  __device__ __forceinline__ void search(int32_t capacity) const {
    uint32_t least = 0;  // the largest key that `capacity` keys reach
#pragma unroll 1
    for (uint32_t bit = 1u << 31; bit > 0; bit >>= 1) {
      if (count(least | bit, scratch.counts[0]) >= capacity) least |= bit;
    }
    // The CTA's warps keep their counts of both kinds; no key is the largest integer.
    const int32_t above = count(least + 1, scratch.counts[0]);
    count(least, scratch.counts[1]);
    const int32_t above_before = kWarps == 1 ? 0 : before(scratch.counts[0]);
    int32_t equal_before = kWarps == 1 ? 0 : before(scratch.counts[1]) - above_before;
    const int32_t equal_taken = capacity - above;
    int32_t place = above_before + min(equal_before, equal_taken);
    const unsigned lower_lanes = (1u << lane) - 1;
    for_each([&](uint32_t key, int32_t block) {
      const unsigned equal = __ballot_sync(kAllLanes, key == least);
      const bool take =
          key > least || (key == least && equal_before + __popc(equal & lower_lanes) < equal_taken);
      const unsigned taken = __ballot_sync(kAllLanes, take);
      if (take) scratch.chosen[place + __popc(taken & lower_lanes)] = block;
      equal_before += __popc(equal);
      place += __popc(taken);
    });
  }

  // After place(), once the scores are there.
  __device__ __forceinline__ void select(const RowBlocks& blocks) {
    load_keys();
    const uint32_t bound = lower_bound(blocks.capacity);
    int32_t listed;
    if constexpr (kWarps == 1) {
      listed = compact(bound, 0);
    } else {
      listed = count(bound, scratch.counts[0]);
      if (listed <= kShortList) compact(bound, before(scratch.counts[0]));
    }
    if (listed > kShortList) return search(blocks.capacity);
    sync();
    if (warp == 0) rank(listed, blocks.capacity);
  }
};

// One CTA an SM, said aloud: left to itself ptxas spills keys for the sake of occupancy.
template <int kWarps, int kValues>
__global__ void __launch_bounds__(kWarps == 1 ? kRowsPerCta * 32 : kWarps * 32, 1)
    msa_topk_blocks_sm80_kernel(const __grid_constant__ TopkKernelParams params) {
  constexpr int kRows = kWarps == 1 ? kRowsPerCta : 1;
  __shared__ RowScratch<kWarps> scratches[kRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  RowScratch<kWarps>& scratch = scratches[kWarps == 1 ? warp : 0];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + (kWarps == 1 ? warp : 0);
  if (row >= params.num_tokens * params.scores.num_heads) return;
  if (!params.after_scores) wait_for_previous_kernel();
  const auto num_heads = static_cast<uint32_t>(params.scores.num_heads);
  const int64_t token = static_cast<uint32_t>(row) / num_heads;
  const int64_t head = static_cast<uint32_t>(row) % num_heads;

  int32_t visible;
  if (params.visible_blocks) {
    const int32_t listed = params.visible_blocks[token * params.visible_stride];
    visible =
        static_cast<int32_t>(min(static_cast<int64_t>(max(listed, 0)), params.scores.num_blocks));
  } else {
    const TokenPosition position = find_position_by_warp(
        params.batch, static_cast<int32_t>(params.first_token + token), params.tokens_each);
    visible = position.request < 0 ? 0 : visible_blocks(params.batch, position.pos);
  }
  const RowBlocks blocks(params.rule, visible);
  const float* const scores =
      params.scores.data + head * params.scores.head_stride + token * params.scores.token_stride;
  RowSelector<kWarps, kValues> selector{scores, params.scores.block_stride, scratch, lane,
                                        kWarps == 1 ? 0 : warp};
  selector.place(blocks);
  int32_t* const target = static_cast<int32_t*>(params.ids.data) + head * params.ids.head_stride +
                          (params.first_token + token) * params.ids.token_stride +
                          lane * params.ids.slot_stride;
  if (params.after_scores) wait_for_previous_kernel();
  // Not sooner: beside kernels that still score, the next one began 5 us late at times.
  start_next_kernel();

  if (blocks.capacity > 0) {
    if (kValues == 0 || selector.steps <= kValues) {
      selector.select(blocks);
    } else {
      RowSelector<kWarps, 0> longer{scores, params.scores.block_stride, scratch, lane,
                                    selector.warp};
      longer.place(blocks);
      longer.select(blocks);
    }
  }
  RowSelector<kWarps, kValues>::sync();
  if (kWarps > 1 && warp > 0) return;
  int32_t id = -1;
  if (lane < blocks.init_end) {
    id = lane;
  } else if (lane < blocks.init_end + blocks.capacity) {
    id = scratch.chosen[lane - blocks.init_end];
  } else if (lane < min(static_cast<int32_t>(params.rule.topk), visible)) {
    id = blocks.local_begin + lane - blocks.init_end - blocks.capacity;
  }
  if (lane < params.ids.topk) *target = id;
}

}  // namespace msa::topk_blocks::sm80
