// Step 2 of FP8 prefill on Hopper, last part: the ids of every row, from what it may select
// (candidates_kernel.cuh), now that each such block is sure or has its exact score.
//
// Bound by latency: a warp a row reads its list and the exact scores of it, all at once.
//
// Grid      a warp a row.
// Method    what is left to select ends at a score that is found by counting what is larger (of more
//           than 32 entries by halving), of equal scores with the lower block. A wide row has no list: the c-th largest of its scores is found bit by
//           bit.
// Next      sets the counters of the window's lists to zero, for the next window.
#pragma once

#include "step2_select/sm90/bounded_rows.cuh"

namespace msa::select_blocks::sm90 {

struct RowSettler {
  const BoundedRows& work;
  const RowBlocks& blocks;
  int lane;
  const uint32_t* scores;
  int32_t* target;
  int32_t place;  // of the row's next id

  __device__ __forceinline__ RowSettler(const BoundedRows& work, const RowBlocks& blocks,
                                        int32_t row)
      : work(work), blocks(blocks), lane(threadIdx.x % 32), place(blocks.init_end) {
    const int32_t token_of_window = token_of_row(work, row);
    const int64_t token = work.first_token + token_of_window;
    const int64_t head = row - token_of_window * work.num_heads;
    scores = work.wide_scores + row * work.row_blocks;
    target = static_cast<int32_t*>(work.ids.data) + head * work.ids.head_stride +
             token * work.ids.token_stride;
  }

  // Appends the blocks of the lanes that take theirs.
  __device__ __forceinline__ void append(bool takes, int32_t block) {
    const unsigned taking = __ballot_sync(kAllLanes, takes);
    if (takes) {
      target[(place + __popc(taking & ((1u << lane) - 1))) * work.ids.slot_stride] = block;
    }
    place += __popc(taking);
  }

  // kEach entries a lane: whether they are sure, and the scores of the others, 0 where there is none.
  template <int kEach>
  __device__ __forceinline__ void settle_list(const uint32_t (&entries)[kEach],
                                              const bool (&sure)[kEach],
                                              const uint32_t (&key)[kEach], int32_t num_sure,
                                              int32_t open, uint32_t (&words)[32]) {
    bool takes[kEach];
    // Sure ones are no more than are selected, and with the open ones no fewer.
    const int32_t left = blocks.capacity - num_sure;
    uint32_t least = ~0u;
    if (left > 0 && kEach == 1) {
      least = cut_keys(key[0], left, words).reached;
    } else if (left > 0) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) least = min(least, key[i] - 1);
      least = cut_keys(key, __reduce_min_sync(kAllLanes, least) + 1, open, left, 1u).reached;
    }
    int32_t equal_left = left;  // of those at the cut the first
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      equal_left -= __popc(__ballot_sync(kAllLanes, key[i] > least));
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const unsigned equal = __ballot_sync(kAllLanes, key[i] == least);
      const int before = __popc(equal & ((1u << lane) - 1));
      takes[i] = key[i] > least || (key[i] == least && before < equal_left);
      equal_left -= __popc(equal);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      append(sure[i] || takes[i], static_cast<int32_t>(entries[i] & (kSureEntry - 1)));
    }
  }

  __device__ __forceinline__ uint32_t load_key(int32_t block) const {
    return block < blocks.local_begin ? scores[block] : 0;
  }

  __device__ __forceinline__ int32_t count(uint32_t least) const {
    int32_t reaching = 0;
#pragma unroll 4
    for (int32_t first = blocks.init_end; first < blocks.local_begin; first += 32) {
      reaching += load_key(first + lane) >= least;
    }
    return __reduce_add_sync(kAllLanes, reaching);
  }

  __device__ __forceinline__ void settle_wide() {
    uint32_t least = 0;  // the largest key that `capacity` keys reach
#pragma unroll 1
    for (uint32_t bit = 1u << 31; bit > 0; bit >>= 1) {
      if (count(least | bit) >= blocks.capacity) least |= bit;
    }
    int32_t equal_left = blocks.capacity - count(least + 1);
#pragma unroll 1
    for (int32_t first = blocks.init_end; first < blocks.local_begin; first += 32) {
      const uint32_t key = load_key(first + lane);
      const unsigned equal = __ballot_sync(kAllLanes, key == least);
      append(key > least || (key == least && __popc(equal & ((1u << lane) - 1)) < equal_left),
             first + lane);
      equal_left -= __popc(equal);
    }
  }

  // The forced blocks around the others, and -1 behind.
  __device__ __forceinline__ void finish() const {
    const int32_t selected = min(static_cast<int32_t>(work.rule.topk), blocks.visible);
    const int32_t local = blocks.init_end + max(blocks.capacity, 0);
    if (lane >= work.ids.topk) return;
    if (lane < blocks.init_end) {
      target[lane * work.ids.slot_stride] = lane;
    } else if (lane >= local) {
      target[lane * work.ids.slot_stride] =
          lane < selected ? blocks.local_begin + lane - local : -1;
    }
  }
};

__global__ void __launch_bounds__(kRowsPerCta * 32, 16)
    msa_settle_rows_sm90_kernel(const __grid_constant__ BoundedRows work) {
  alignas(16) __shared__ uint32_t words[kRowsPerCta][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto row = static_cast<int32_t>(blockIdx.x * kRowsPerCta + warp);
  wait_for_previous_kernel();
  start_next_kernel();
  const auto num_lists = static_cast<int32_t>(work.batch.num_requests * work.batch.max_pages);
#pragma unroll 1
  for (int32_t list = blockIdx.x * blockDim.x + threadIdx.x; list < num_lists;
       list += gridDim.x * blockDim.x) {
    work.list_counts[list * kCounterStride] = 0;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *work.num_items = 0;
  if (row >= num_rows(work)) return;

  // 32 entries are all of most rows. They are loaded, and counted, before it is known what the row
  // is: what only one branch wants would be loaded there, after the word.
  const int32_t word = work.row_words[row];
  const int32_t first = row * kRowEntries + lane;
  const uint32_t entry = work.entries[first];
  int32_t score = 0;
  load_if(true, reinterpret_cast<const int32_t*>(work.exact) + first, score);
  const int32_t listed = word % 256;
  const bool is_there = lane < listed, sure = is_there && (entry & kSureEntry);
  const uint32_t key = is_there && !sure ? static_cast<uint32_t>(score) : 0;
  const int32_t num_sure = __popc(__ballot_sync(kAllLanes, sure));
  const int32_t open = __popc(__ballot_sync(kAllLanes, key > 0));
  const RowBlocks blocks(work.rule, word / 256);
  RowSettler settler(work, blocks, row);
  if (listed == kWideRow) {
    settler.settle_wide();
  } else if (listed > 32) {
    const uint32_t other = work.entries[first + 32], other_score = work.exact[first + 32];
    const bool other_is_there = lane + 32 < listed;
    const bool other_sure = other_is_there && (other & kSureEntry);
    const uint32_t other_key = other_is_there && !other_sure ? other_score : 0;
    settler.settle_list<2>({entry, other}, {sure, other_sure}, {key, other_key},
                           num_sure + __popc(__ballot_sync(kAllLanes, other_sure)),
                           open + __popc(__ballot_sync(kAllLanes, other_key > 0)), words[warp]);
  } else if (listed > 0) {
    settler.settle_list<1>({entry}, {sure}, {key}, num_sure, open, words[warp]);
  }
  settler.finish();
}

}  // namespace msa::select_blocks::sm90
