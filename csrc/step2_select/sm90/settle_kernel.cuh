// Step 2 of FP8 prefill on Hopper, last part: the ids of every row, from what it may select
// (candidates_kernel.cuh), now that each such block is sure or has its exact score.
//
// Bound by latency: a warp a row reads its list and the exact scores of it, all at once.
//
// Grid      a warp a row.
// Method    what is left to select ends at a score that is found by halving, of equal scores with
//           the lower block. A wide row has no list: the c-th largest of its scores is found bit by
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
    scores = work.bounds + row * work.row_blocks;
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

  // kEach entries a lane, and what was written where their exact scores would be.
  template <int kEach>
  __device__ __forceinline__ void settle_list(int32_t listed, const int32_t (&entries)[2],
                                              const uint32_t (&exact)[2]) {
    uint32_t key[kEach];
    bool sure[kEach], takes[kEach];
    int32_t left = blocks.capacity, open = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const bool is_there = lane + 32 * i < listed;
      sure[i] = is_there && (entries[i] & kSureEntry);
      key[i] = is_there && !sure[i] ? exact[i] : 0;
      left -= __popc(__ballot_sync(kAllLanes, sure[i]));
      open += __popc(__ballot_sync(kAllLanes, key[i] > 0));
    }
    // Sure ones are no more than are selected, and with the open ones no fewer.
    const uint32_t least = left > 0 ? cut_keys(key, 1u, open, left, 1u).reached : ~0u;
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
      append(sure[i] || takes[i], entries[i] & (kSureEntry - 1));
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

__global__ void __launch_bounds__(kRowsPerCta * 32, 1)
    msa_settle_rows_sm90_kernel(const __grid_constant__ BoundedRows work) {
  const auto row = static_cast<int32_t>(blockIdx.x * kRowsPerCta + threadIdx.x / 32);
  const int lane = threadIdx.x % 32;
  wait_for_previous_kernel();
  start_next_kernel();
  const int64_t num_lists = work.batch.num_requests * work.batch.max_pages;
  for (int64_t list = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; list < num_lists;
       list += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    work.list_counts[list * kCounterStride] = 0;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *work.num_items = 0;
  if (row >= num_rows(work)) return;

  // All loads at once, whatever the row is.
  const int32_t word = work.row_words[row];
  int32_t entries[2];
  uint32_t exact[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    entries[i] = work.entries[row * kRowEntries + lane + 32 * i];
    exact[i] = work.exact[row * kRowEntries + lane + 32 * i];
  }
  const RowBlocks blocks(work.rule, word / 256);
  const int32_t listed = word % 256;
  RowSettler settler(work, blocks, row);
  if (listed == kWideRow) {
    settler.settle_wide();
  } else if (listed > 32) {
    settler.settle_list<2>(listed, entries, exact);
  } else if (listed > 0) {
    settler.settle_list<1>(listed, entries, exact);
  }
  settler.finish();
}

}  // namespace msa::select_blocks::sm90
