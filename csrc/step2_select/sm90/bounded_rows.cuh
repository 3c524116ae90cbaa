// What the three kernels share that make a selection of bounds: candidates_kernel.cuh,
// rescore_kernel.cuh, settle_kernel.cuh.
#pragma once

#include <cuda_runtime.h>

#include "device/common.cuh"
#include "device/dependent_launch.cuh"
#include "device/positions.cuh"
#include "step2_select/sm80/topk_row.cuh"
#include "step2_select/topk_blocks_params.h"

namespace msa::select_blocks::sm90 {

using topk_blocks::sm80::RowBlocks;
using topk_blocks::sm80::score_key;

constexpr int kRowEntries = 64;      // of a row's short list
constexpr int kSureEntry = 0x8000;   // an entry is a block, and this where it is surely selected
constexpr int kMostBlocks = 0x4000;  // of a table: an entry holds a block's number
constexpr int kWideRow = -1;         // a row that has more candidates than its list holds
constexpr int kItemRows = 256;       // rows of a work item of scoring again
constexpr int kCounterStride = 8;    // counters apart, as atomics meet one sector at a time
constexpr int kRowsPerCta = 4;       // a warp a row

// Rows of a window of query tokens: row = (token - first_token) * num_heads + head.
struct BoundedRows {
  RowsView index_q;
  PagedView index_k_cache;
  BatchView batch;
  SelectRule rule;
  IdsView ids;
  int32_t tokens_each;  // tokens_of_each(batch)
  int64_t first_token, num_tokens;
  int32_t num_heads;
  int64_t row_blocks;           // scores of a row
  float* scores;                // [rows][row_blocks]: bounds; of candidates later exact scores
  const float4* row_factors;    // [T * Hi]
  const float4* block_factors;  // [B * max_pages]
  uint16_t* entries;            // [rows][kRowEntries]: what may be selected, by block
  int32_t* num_entries;         // [rows], or kWideRow
  // Rows that want a block's exact score: [request][block][rows of the request in the window],
  // and of each such list how many it holds.
  int32_t* lists;
  int32_t* list_counts;  // [B * max_pages], kCounterStride apart
  int2* items;           // a list, and which kItemRows of it
  int32_t* num_items;
};

// Where a request's lists begin, and how long each may be.
struct RequestLists {
  int64_t begin;
  int32_t rows;
};

__device__ __forceinline__ RequestLists request_lists(const BoundedRows& work, int32_t request) {
  const int64_t first = max(int64_t{first_token_of(work.batch, request)}, work.first_token);
  const int64_t end = min(int64_t{first_token_of(work.batch, request + 1)},
                          work.first_token + work.num_tokens);
  return {(first - work.first_token) * work.num_heads * work.row_blocks,
          static_cast<int32_t>(end - first) * work.num_heads};
}

// Of a warp: its row, and what the rule says of it.
struct BoundedRow {
  int64_t row, token;
  int32_t head, request;
  RowBlocks blocks;

  static __device__ __forceinline__ BoundedRow find(const BoundedRows& work, int64_t row) {
    const int64_t token = work.first_token + static_cast<uint32_t>(row) / work.num_heads;
    const auto head = static_cast<int32_t>(static_cast<uint32_t>(row) % work.num_heads);
    const TokenPosition position =
        find_position_by_warp(work.batch, static_cast<int32_t>(token), work.tokens_each);
    const int32_t visible =
        position.request < 0 ? 0 : visible_blocks(work.batch, position.pos);
    return {row, token, head, position.request, RowBlocks(work.rule, visible)};
  }
};

}  // namespace msa::select_blocks::sm90
