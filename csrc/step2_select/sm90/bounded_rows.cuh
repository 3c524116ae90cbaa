// What the three kernels share that make a selection of bounds: candidates_kernel.cuh,
// rescore_kernel.cuh, settle_kernel.cuh.
#pragma once

#include <cuda_runtime.h>

#include "device/common.cuh"
#include "device/dependent_launch.cuh"
#include "device/positions.cuh"
#include "step2_select/sm80/topk_row.cuh"
#include "step2_select/sm90/bounded_select_run.h"
#include "step2_select/topk_blocks_params.h"

namespace msa::select_blocks::sm90 {

using topk_blocks::sm80::RowBlocks;
using topk_blocks::sm80::score_key;

constexpr int kRowEntries = 64;      // of a row's short list
constexpr int kSureEntry = 0x8000;   // an entry is a block, and this where it is surely selected
constexpr int kMostBlocks = 0x4000;  // of a table: an entry holds a block's number
constexpr int kWideRow = 255;        // entries of a row that has more than its list holds
constexpr int kItemRows = 256;       // rows of a work item of scoring again
constexpr int kCounterStride = 8;    // counters apart, as atomics meet one sector at a time
constexpr int kRowsPerCta = 4;       // a warp a row
static_assert(kRowEntries < kWideRow && kMostBlocks <= kSureEntry);
static_assert(kRowEntries <= 1 << (31 - kLogMostRows), "a place, and bit 31 of a wide row");

// Up to kItemRows rows of a list.
struct alignas(16) RescoreItem {
  int32_t begin;  // in `lists`
  int32_t list;   // of list_counts
  int32_t page;
  int32_t block_chunk;  // the block, and above kMostBlocks which kItemRows of the list
};

// Rows of a window of query tokens: row = (token - first_token) * num_heads + head. Scores and
// their bounds are ordered integers (topk_row.cuh).
struct BoundedRows {
  RowsView index_q;
  PagedView index_k_cache;
  BatchView batch;
  SelectRule rule;
  IdsView ids;
  int64_t first_token, num_tokens;
  int32_t num_heads;
  uint32_t inverse_heads;       // ceil(2^31 / num_heads)
  int64_t row_blocks;           // bounds of a row
  uint32_t* bounds;             // [rows][row_blocks]; of candidates of wide rows exact scores
  const int2* token_words;      // [T]: request, visible blocks
  const float4* row_factors;    // [T * Hi]
  const float4* block_factors;  // [B * max_pages]
  uint16_t* entries;            // [rows][kRowEntries]: what may be selected, by block
  uint32_t* exact;              // [rows][kRowEntries]: scores of entries that are not sure
  int32_t* row_words;           // [rows]: visible blocks * 256 + number of entries, or kWideRow
  // Rows that want a block's exact score: [request][block][rows of the request in the window],
  // and how many each such list holds. Bit 31: of a wide row; below, the place of its entry; in
  // the lowest kLogMostRows bits the row.
  int32_t* lists;
  int32_t* list_counts;  // [B * max_pages], kCounterStride apart
  RescoreItem* items;
  int32_t* num_items;
};

// Token of the window, of a row; fewer than 2^17 rows, and up to 64 heads.
__device__ __forceinline__ int32_t token_of_row(const BoundedRows& work, int32_t row) {
  return static_cast<int32_t>(__umulhi(static_cast<uint32_t>(row) * 2, work.inverse_heads));
}

__device__ __forceinline__ int32_t num_rows(const BoundedRows& work) {
  return static_cast<int32_t>(work.num_tokens) * work.num_heads;
}

// Where a request's lists begin, and how long each may be. All of a call's rows and of a window's
// places can be counted in 31 bits.
struct RequestLists {
  int32_t begin, rows;
};

__device__ __forceinline__ RequestLists request_lists(const BoundedRows& work, int32_t request) {
  const auto window_begin = static_cast<int32_t>(work.first_token);
  const int32_t window_end = window_begin + static_cast<int32_t>(work.num_tokens);
  const int32_t first = max(first_token_of(work.batch, request), window_begin);
  const int32_t end = min(first_token_of(work.batch, request + 1), window_end);
  return {(first - window_begin) * work.num_heads * static_cast<int32_t>(work.row_blocks),
          (end - first) * work.num_heads};
}

// Where the best keys of a warp end: at least as many as wanted reach `reached`, no more than those
// reach `missed`.
struct KeyCut {
  uint32_t reached, missed;  // keys
};

// By counting, of a key a lane, as many as wanted of which are not 0: exact. `words`: of the warp.
__device__ __forceinline__ KeyCut cut_keys(uint32_t key, int32_t wanted, uint32_t (&words)[32]) {
  words[threadIdx.x % 32] = key;
  __syncwarp();
  uint32_t larger = 0, more_larger = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint4 others = reinterpret_cast<const uint4*>(words)[i];
    larger = count_carry(others.x, ~key, larger);
    more_larger = count_carry(others.y, ~key, more_larger);
    larger = count_carry(others.z, ~key, larger);
    more_larger = count_carry(others.w, ~key, more_larger);
  }
  __syncwarp();
  const bool is_one = larger + more_larger < static_cast<uint32_t>(wanted);
  const uint32_t reached = __reduce_min_sync(kAllLanes, is_one ? key : ~0u);
  const int32_t reaching = __popc(__ballot_sync(kAllLanes, key >= reached));
  return {reached, reached + (reaching > wanted)};
}

// By halving, of kEach keys a lane, of which `reaching` reach `reached`, as many as wanted or more.
// Ends where as many as wanted are found, or `close` before the exact place.
template <int kEach>
__device__ __forceinline__ KeyCut cut_keys(const uint32_t (&keys)[kEach], uint32_t reached,
                                           int32_t reaching, int32_t wanted, uint32_t close) {
  uint32_t largest = keys[0];
#pragma unroll
  for (int i = 1; i < kEach; ++i) largest = max(largest, keys[i]);
  uint32_t missed = __reduce_max_sync(kAllLanes, largest) + 1;
#pragma unroll 1
  while (reaching > wanted && missed - reached > close) {
    const uint32_t middle = reached + (missed - reached) / 2;
    int32_t count = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) count += __popc(__ballot_sync(kAllLanes, keys[i] >= middle));
    if (count >= wanted) {
      reached = middle;
      reaching = count;
    } else {
      missed = middle;
    }
  }
  return {reached, reaching == wanted ? reached : missed};
}

}  // namespace msa::select_blocks::sm90
