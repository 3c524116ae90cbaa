// Step 3, decode_view: a selection -> page tables over the cache seen as per-head pages.
//
//   row t * Hkv + h: page_table = page(j) * page_step + h * head_step for the selected blocks j of
//   (t, h), ascending, then 0;  kv_lens = (n - 1) * 128 + tokens of the last of these n blocks
//
// Left out of a row: entries of ids that count nothing, and blocks on a page outside the cache.
//
// Grid      a warp a row, kWarps rows a CTA.
// Roles     all warps alike; lane k holds entry k of the row's ids (K <= 32).
// Shared    none.  Barriers  none.
// Timeline  position of the token, and its ids beside it | pages | ranks by shuffles | store
//           Three dependent loads: latency is all that it costs.
// Limits    K <= 32; view pages fit int32 (checked on the host).
#pragma once

#include <cuda_runtime.h>

#include "device/common.cuh"
#include "device/dependent_launch.cuh"
#include "device/positions.cuh"
#include "step3_view/decode_view_params.h"

namespace msa::decode_view::sm80 {

constexpr int kWarps = 4;

__global__ void __launch_bounds__(kWarps * 32)
    msa_decode_view_sm80_kernel(const __grid_constant__ DecodeViewParams params,
                                int32_t tokens_each) {
  const int lane = threadIdx.x % 32;
  const int64_t heads = params.ids.num_heads;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= params.batch.num_tokens * heads) return;
  const int64_t token = row / heads, head = row % heads;
  const int topk = static_cast<int>(params.ids.topk);
  wait_for_previous_kernel();

  const int64_t id = lane < topk ? load_id(params.ids, head, token, lane) : -1;
  const TokenPosition position =
      find_position_by_warp(params.batch, static_cast<int32_t>(token), tokens_each);
  const int32_t visible = position.request < 0 ? 0 : visible_blocks(params.batch, position.pos);
  int32_t page = -1;
  if (lane < visible && id >= 0 && id < visible) {
    page = page_of(params.batch, position.request, id);
  }
  const bool listed = page >= 0 && page < params.num_pages;

  // Equal blocks keep their order. What is left out ranks behind everything listed.
  const int32_t block = listed ? static_cast<int32_t>(id) : 0x7fffffff;
  int rank = 0;
  for (int other = 0; other < topk; ++other) {
    const int32_t other_block = __shfl_sync(kAllLanes, block, other);
    rank += other_block < block || (other_block == block && other < lane);
  }
  const int count = __popc(__ballot_sync(kAllLanes, listed));
  if (lane < topk) {
    params.page_table[row * params.table_row_stride + rank * params.table_entry_stride] =
        listed ? static_cast<int32_t>(page * params.page_step + head * params.head_step) : 0;
  }
  if (listed && rank == count - 1) {
    const int32_t last_tokens = min(kBlock, position.pos - block * kBlock + 1);
    params.kv_lens[row * params.kv_lens_stride] = (count - 1) * kBlock + last_tokens;
  }
  if (count == 0 && lane == 0) params.kv_lens[row * params.kv_lens_stride] = 0;
}

}  // namespace msa::decode_view::sm80
