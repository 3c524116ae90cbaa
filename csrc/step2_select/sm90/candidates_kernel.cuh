// Step 2 of FP8 prefill on Hopper, first part: which blocks a row may select, from bounds of its
// scores, and which of them must be scored exactly.
//
//   U_j = upper bound of block j's score (score_bounds_kernel.cuh), L_j its lower bound, c = how
//   many candidates the row selects. L, a lower bound of the c-th largest score, and the (c + 1)-th
//   largest U cut the row:
//     U_j < L                    out
//     L_j > (c + 1)-th largest U surely selected
//     else                       its exact score decides: the row joins the block's list
//   The row's scores with those exact ones put in select what all exact ones would: a bound that
//   stays is on the right side of every exact score that could be the c-th. A NaN is exact.
//
// Bound by its instructions and their latencies; reading the bounds is a third of it.
//
// Grid      a warp a row.
// Method    bounds as ordered integers (topk_row.cuh), lane l holds block 32 i + l:
//   bound   the c-th largest of the lanes' best, less twice their errors: a first L
//   compact what reaches it, by id, into a list of kRowEntries; bounds of the list are read again
//   cut     between the c-th largest U of the list and the rest, found by counting what is larger
//           (of more than 32 by halving)
//   search  where they are too many, an L by the c-th largest U, found bit by bit; then again. A
//           row with too many even so is wide: all that reach L are scored.
// Shared    of each row a list [kRowEntries] of blocks, and 32 keys: 1,024 bytes.
// Registers kValues keys a lane; kValues = 0: rows of any length, bounds read anew each pass.
// Order     lists fill in any order, of which no result depends: a list is a set of rows.
// Limits    c <= 32.
#pragma once

#include "step1_score/sm90/score_error.cuh"
#include "step2_select/sm90/bounded_rows.cuh"

namespace msa::select_blocks::sm90 {

using index_score::sm90::lower_bound;
using index_score::sm90::score_error;

constexpr uint32_t kClose = 1024;  // keys: 2^-13 of a score
constexpr uint32_t kMostSteps = kMostBlocks / 32;

// The score that a key stands for; NaN where none does.
__device__ __forceinline__ float score_of_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// Of a row, in shared memory.
struct alignas(16) CandidateScratch {
  uint32_t words[32];          // keys that are counted
  uint16_t list[kRowEntries];  // blocks
};

template <int kValues>
struct CandidateFinder {
  static constexpr bool kResident = kValues > 0;

  const BoundedRows& work;
  int32_t row, first_entry;  // of the request in the table
  int32_t request;
  const RowBlocks& blocks;
  CandidateScratch& scratch;
  int lane;
  const uint32_t* source;  // bounds of the row
  float4 row_factors;
  int32_t first, end, steps;  // this lane's blocks: first, first + 32, ... below end
  uint32_t keys[kResident ? kValues : 1];

  __device__ __forceinline__ CandidateFinder(const BoundedRows& work, int32_t row, int32_t request,
                                             const RowBlocks& blocks, CandidateScratch& scratch)
      : work(work),
        row(row),
        request(request),
        blocks(blocks),
        scratch(scratch),
        lane(threadIdx.x % 32) {
    first_entry = request * static_cast<int32_t>(work.batch.max_pages);
    source = work.bounds + row * work.row_blocks;
    row_factors = work.row_factors[static_cast<int32_t>(work.first_token) * work.num_heads + row];
    first = blocks.init_end + lane;
    end = blocks.local_begin;
    steps = (end - blocks.init_end + 31) / 32;
    if constexpr (kResident) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        keys[i] = 32 * i < end - first ? source[first + 32 * i] : 0;
      }
    }
  }

  // visit(key, i) for the lane's blocks of steps begin + i, i < count, in whole warps; key 0 where
  // there is none.
  template <typename Visit>
  __device__ __forceinline__ void for_steps(int32_t begin, int32_t count,
                                            const Visit& visit) const {
    if constexpr (kResident) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) visit(keys[i], i);
    } else {
      constexpr int kTogether = 16;  // loads under way before the first visit
#pragma unroll 1
      for (int32_t i = 0; i < count; i += kTogether) {
        uint32_t loaded[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          const int32_t block = first + 32 * (begin + i + j);
          loaded[j] = block < end ? source[block] : 0;
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) visit(loaded[j], i + j);
      }
    }
  }

  __device__ __forceinline__ float error_of(int32_t block) const {
    return score_error(row_factors, work.block_factors[first_entry + block]);
  }

  __device__ __forceinline__ uint32_t lower_key(uint32_t key, float error) const {
    return key > 1 ? score_key(lower_bound(score_of_key(key), error)) : key;
  }

  // Of the lanes' best the `capacity`-th largest lower bound: a lower bound of that of the row. 1
  // where lanes are too few for it, 0 where the row has no score but NaN.
  __device__ __forceinline__ uint32_t first_bound(int32_t capacity) const {
    // With the step in its lowest bits: 2^-14 of a score less at most, which is a lower bound too.
    uint32_t packed = 0;
    for_steps(0, steps, [&](uint32_t key, int i) {
      packed = max(packed, (key & ~(kMostSteps - 1)) | static_cast<uint32_t>(i));
    });
    uint32_t best = packed & ~(kMostSteps - 1);  // 0: none, or NaN alone
    if (best > 0) best = lower_key(best, error_of(first + 32 * (packed % kMostSteps)));
    const int32_t reaching = __popc(__ballot_sync(kAllLanes, best > 0));
    if (reaching < capacity) return min(reaching, 1);
    return cut_keys(best, capacity, scratch.words).reached;
  }

  // The same by the blocks with the `capacity` largest bounds.
  __device__ __forceinline__ uint32_t better_bound(int32_t capacity) const {
    uint32_t least = 0;  // the largest key that `capacity` keys reach
#pragma unroll 1
    for (uint32_t bit = 1u << 31; bit > 0; bit >>= 1) {
      int32_t reaching = 0;
      for_steps(0, steps, [&](uint32_t key, int) { reaching += key >= (least | bit); });
      if (__reduce_add_sync(kAllLanes, reaching) >= capacity) least |= bit;
    }
    least = max(least, 1u);
    uint32_t bound = ~0u;
#pragma unroll 1
    for (int32_t block = first; block < end; block += 32) {
      const uint32_t key = source[block];
      if (key >= least) bound = min(bound, lower_key(key, error_of(block)));
    }
    return max(__reduce_min_sync(kAllLanes, bound), 1u);
  }

  // Blocks that reach `least`, by id, into the list, as far as they fit. Returns how many they are.
  // Lane i takes those of step i, up to 32 steps at a time: most lanes have one or none, where a
  // place for each block of each lane would be sought.
  __device__ __forceinline__ int32_t compact(uint32_t least) const {
    int32_t listed = 0;
#pragma unroll 1
    for (int32_t begin = 0; begin < (kResident ? 1 : steps); begin += 32) {
      unsigned word = 0;
      for_steps(begin, min(steps - begin, 32), [&](uint32_t key, int i) {
        const unsigned reaching = __ballot_sync(kAllLanes, key >= least);
        if (lane == i) word = reaching;
      });
      const int32_t end_place = listed + sum_up_to_lane(__popc(word));
      int32_t place = end_place - __popc(word);
      listed = __shfl_sync(kAllLanes, end_place, 31);
      const int32_t first_block = blocks.init_end + 32 * (begin + lane);
#pragma unroll 1
      while (word != 0 && place < kRowEntries) {
        scratch.list[place++] = static_cast<uint16_t>(first_block + __ffs(word) - 1);
        word &= word - 1;
      }
    }
    __syncwarp();
    return listed;
  }

  // The row joins the list of `block`; `place`: of its entry.
  __device__ __forceinline__ void join(const RequestLists& lists, int32_t block,
                                       uint32_t place) const {
    const int32_t list = first_entry + block;
    const int32_t slot = atomicAdd(work.list_counts + int64_t{list} * kCounterStride, 1);
    const int32_t begin = lists.begin + block * lists.rows;
    work.lists[begin + slot] =
        static_cast<int32_t>(static_cast<uint32_t>(row) | place << kLogMostRows);
    if (slot % kItemRows == 0) {
      work.items[atomicAdd(work.num_items, 1)] = {begin + slot, list,
                                                  page_of(work.batch, request, block),
                                                  block + slot / kItemRows * kMostBlocks};
    }
  }

  __device__ __forceinline__ void leave_word(int32_t entries) const {
    if (lane == 0) work.row_words[row] = blocks.visible * 256 + entries;
  }

  // A wide row: every block that reaches `least` is scored again, but those whose bound is exact.
  __device__ __forceinline__ void join_all(const RequestLists& lists, uint32_t least) const {
    leave_word(kWideRow);
#pragma unroll 1
    for (int32_t block = first; block < end; block += 32) {
      const uint32_t key = source[block];
      if (key >= least && key > 1 && error_of(block) > 0.0f) {
        join(lists, block, 1u << (31 - kLogMostRows));
      }
    }
  }

  // Cuts the `listed` blocks of the list, kEach a lane, which reach `least`: what is kept are the
  // row's entries.
  template <int kEach>
  __device__ __forceinline__ void cut_list(const RequestLists& lists, int32_t listed,
                                           uint32_t least) const {
    uint32_t key[kEach], low[kEach];
    int32_t block[kEach];
    float error[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int place = lane + 32 * i;
      block[i] = place < listed ? scratch.list[place] : 0;
      key[i] = place < listed ? source[block[i]] : 0;
      error[i] = key[i] > 1 ? error_of(block[i]) : 0.0f;
      low[i] = lower_key(key[i], error[i]);
    }
    // Near enough will do: a cut that is not the best makes candidates, not errors.
    const KeyCut found = kEach == 1 ? cut_keys(key[0], blocks.capacity, scratch.words)
                                    : cut_keys(key, least, listed, blocks.capacity, kClose);
    // A lower bound of the c-th largest score, and the largest U of all entries but at most c.
    uint32_t cut = ~0u, largest_left = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (key[i] >= found.reached) cut = min(cut, low[i]);
      if (key[i] < found.missed) largest_left = max(largest_left, key[i]);
    }
    cut = __reduce_min_sync(kAllLanes, cut);
    largest_left = __reduce_max_sync(kAllLanes, largest_left);
    const unsigned lower_lanes = (1u << lane) - 1;
    int32_t place = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const bool sure = low[i] > largest_left;
      const bool kept = key[i] > 0 && (sure || key[i] >= cut);
      const unsigned keeping = __ballot_sync(kAllLanes, kept);
      if (kept) {
        const int mine = place + __popc(keeping & lower_lanes);
        const int32_t entry = row * kRowEntries + mine;
        work.entries[entry] = static_cast<uint16_t>(block[i] | (sure ? kSureEntry : 0));
        if (!sure) {
          if (error[i] > 0.0f) {
            join(lists, block[i], mine);
          } else {
            work.exact[entry] = key[i];
          }
        }
      }
      place += __popc(keeping);
    }
    leave_word(place);
  }

  __device__ __forceinline__ void find() const {
    const int32_t capacity = blocks.capacity;
    const RequestLists lists = request_lists(work, request);
    uint32_t least = first_bound(capacity);
    int32_t listed = compact(max(least, 1u));
    if (least == 0) {
      least = 1;
      listed = min(listed, kRowEntries);  // all are equal, and the first ones selected
    }
    if (listed > kRowEntries) {
      least = max(least, better_bound(capacity));
      __syncwarp();
      listed = compact(least);
    }
    // Most lists would leave half of the warp's work to nothing.
    if (listed > kRowEntries) {
      join_all(lists, least);
    } else if (listed <= 32) {
      cut_list<1>(lists, listed, least);
    } else {
      cut_list<2>(lists, listed, least);
    }
  }
};

template <int kValues>
__global__ void __launch_bounds__(kRowsPerCta * 32, kValues == 16 ? 10 : 6)
    msa_find_candidates_sm90_kernel(const __grid_constant__ BoundedRows work) {
  __shared__ CandidateScratch scratch[kRowsPerCta];
  const int warp = threadIdx.x / 32;
  const auto row = static_cast<int32_t>(blockIdx.x * kRowsPerCta + warp);
  if (row >= num_rows(work)) return;
  // The kernel before this one has waited for the one that wrote the words, and writes bounds.
  const int2 word = work.token_words[work.first_token + token_of_row(work, row)];
  const RowBlocks blocks(work.rule, word.y);
  wait_for_previous_kernel();
  start_next_kernel();
  if (blocks.capacity <= 0) {
    if (threadIdx.x % 32 == 0) work.row_words[row] = blocks.visible * 256;
    return;
  }
  const CandidateFinder<kValues> finder(work, row, word.x, blocks, scratch[warp]);
  finder.find();
}

}  // namespace msa::select_blocks::sm90
