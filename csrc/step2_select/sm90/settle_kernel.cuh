// Step 2 of FP8 prefill on Hopper, last part: the ids of every row, from what it may select
// (candidates_kernel.cuh), now that each such block is sure or has its exact score.
//
// Bound by latency: a warp a row reads its list and the scores of those entries that are not sure.
//
// Grid      a warp a row.
// Method    entries of the list are ranked against each other, of equal scores the lower block
//           first. A wide row has no list: the c-th largest of its scores is found bit by bit.
// Next      sets the counters of the window's lists to zero, for the next window.
#pragma once

#include "step2_select/sm90/bounded_rows.cuh"

namespace msa::select_blocks::sm90 {

struct RowSettler {
  const BoundedRows& work;
  const BoundedRow& row;
  int lane;
  const float* scores;
  int32_t* target;
  int32_t place;  // of the row's next id

  __device__ __forceinline__ RowSettler(const BoundedRows& work, const BoundedRow& row)
      : work(work), row(row), lane(threadIdx.x % 32), place(row.blocks.init_end) {
    scores = work.scores + row.row * work.row_blocks;
    target = static_cast<int32_t*>(work.ids.data) + row.head * work.ids.head_stride +
             row.token * work.ids.token_stride;
  }

  // Appends the blocks of the lanes that take theirs.
  __device__ __forceinline__ void append(bool takes, int32_t block) {
    const unsigned taking = __ballot_sync(kAllLanes, takes);
    if (takes) {
      target[(place + __popc(taking & ((1u << lane) - 1))) * work.ids.slot_stride] = block;
    }
    place += __popc(taking);
  }

  __device__ __forceinline__ void settle_list(int32_t listed) {
    uint32_t key[2];
    int32_t block[2], rank[2] = {0, 0};
    bool sure[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int position = lane + 32 * i;
      const int32_t entry =
          position < listed ? work.entries[row.row * kRowEntries + position] : kSureEntry;
      sure[i] = position < listed && (entry & kSureEntry);
      block[i] = entry & (kSureEntry - 1);
      key[i] = entry & kSureEntry ? 0 : score_key(scores[block[i]]);
    }
    const int32_t left = row.blocks.capacity - __popc(__ballot_sync(kAllLanes, sure[0])) -
                         __popc(__ballot_sync(kAllLanes, sure[1]));
#pragma unroll 4
    for (int other = 0; other < min(listed, 32); ++other) {
      const uint32_t theirs = __shfl_sync(kAllLanes, key[0], other);
      rank[0] += theirs > key[0] || (theirs == key[0] && other < lane);
      rank[1] += theirs >= key[1];
    }
#pragma unroll 4
    for (int other = 0; other < listed - 32; ++other) {
      const uint32_t theirs = __shfl_sync(kAllLanes, key[1], other);
      rank[0] += theirs > key[0];
      rank[1] += theirs > key[1] || (theirs == key[1] && other < lane);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      append(sure[i] || (key[i] > 0 && rank[i] < left), block[i]);
    }
  }

  __device__ __forceinline__ uint32_t load_key(int32_t block) const {
    return block < row.blocks.local_begin ? score_key(scores[block]) : 0;
  }

  __device__ __forceinline__ int32_t count(uint32_t least) const {
    int32_t reaching = 0;
#pragma unroll 4
    for (int32_t first = row.blocks.init_end; first < row.blocks.local_begin; first += 32) {
      reaching += load_key(first + lane) >= least;
    }
    return __reduce_add_sync(kAllLanes, reaching);
  }

  __device__ __forceinline__ void settle_wide() {
    const int32_t capacity = row.blocks.capacity;
    uint32_t least = 0;  // the largest key that `capacity` keys reach
#pragma unroll 1
    for (uint32_t bit = 1u << 31; bit > 0; bit >>= 1) {
      if (count(least | bit) >= capacity) least |= bit;
    }
    int32_t equal_left = capacity - count(least + 1);
#pragma unroll 1
    for (int32_t first = row.blocks.init_end; first < row.blocks.local_begin; first += 32) {
      const uint32_t key = load_key(first + lane);
      const unsigned equal = __ballot_sync(kAllLanes, key == least);
      append(key > least ||
                 (key == least && __popc(equal & ((1u << lane) - 1)) < equal_left),
             first + lane);
      equal_left -= __popc(equal);
    }
  }

  // The forced blocks around the others, and -1 behind.
  __device__ __forceinline__ void finish() const {
    const RowBlocks& blocks = row.blocks;
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

__global__ void __launch_bounds__(kRowsPerCta * 32, 1)
    msa_settle_rows_sm90_kernel(const __grid_constant__ BoundedRows work) {
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kRowsPerCta + threadIdx.x / 32;
  wait_for_previous_kernel();
  const int64_t num_lists = work.batch.num_requests * work.batch.max_pages;
  for (int64_t list = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       list < num_lists; list += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    work.list_counts[list * kCounterStride] = 0;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *work.num_items = 0;
  if (number >= work.num_tokens * work.num_heads) return;

  const int32_t listed = work.num_entries[number];
  const BoundedRow row = BoundedRow::find(work, number);
  RowSettler settler(work, row);
  if (listed > 0) settler.settle_list(listed);
  if (listed == kWideRow) settler.settle_wide();
  settler.finish();
}

}  // namespace msa::select_blocks::sm90
