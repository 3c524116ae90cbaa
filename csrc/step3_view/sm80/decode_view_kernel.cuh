// Step 3, decode_view: a selection -> page tables over the cache seen as per-head pages.
//
//   row t * Hkv + h: page_table = page(j) * page_step + h * head_step for the selected blocks j of
//   (t, h), ascending, then 0;  kv_lens = (n - 1) * 128 + tokens of the last of these n blocks
//
// Left out of a row: entries of ids that count nothing, and blocks on a page outside the cache.
//
// Grid      T x ceil(Hkv / kWarps), CTAs of up to kWarps warps, a warp a row.
// Roles     all warps alike; lane k holds entry k of the row's ids (K <= 32).
// Shared    table  the first kTableRowPages pages of the token's probable request             4,096
// Barriers  __syncthreads: the table is there.
// Timeline  table, position by the same guess, ids: none waits for another | pages, from the table
//           | store. Latency is all that it costs. Pages further on, and those of tables whose rows
//           are no 16-byte vectors, are loaded behind the ids; all of them again where the guess
//           was wrong. Ids come ascending as a rule: ranks are counted only where they do not.
// Limits    K <= 32; view pages fit int32 (checked on the host).
#pragma once

#include <cuda_runtime.h>

#include "device/common.cuh"
#include "device/dependent_launch.cuh"
#include "device/instructions.cuh"
#include "device/positions.cuh"
#include "device/sm80_async_copy.cuh"
#include "device/table_row.cuh"
#include "step3_view/decode_view_params.h"

namespace msa::decode_view::sm80 {

constexpr int kWarps = 4;
constexpr int kSharedBytes = kTableRowPages * sizeof(int32_t);

__global__ void __launch_bounds__(kWarps * 32)
    msa_decode_view_sm80_kernel(const __grid_constant__ DecodeViewParams params,
                                const Division each) {
  constexpr uint32_t kNone = 0x7fffffff;
  extern __shared__ __align__(16) uint8_t shared_memory[];
  auto* const table = reinterpret_cast<int32_t*>(shared_memory);
  const BatchView& batch = params.batch;
  const IdsView& ids = params.ids;
  const int lane = threadIdx.x % 32;
  const auto token = static_cast<int32_t>(blockIdx.x);
  const auto head = static_cast<int32_t>(blockIdx.y * kWarps + threadIdx.x / 32);
  const bool has_entry =
      head < static_cast<int32_t>(ids.num_heads) && lane < static_cast<int32_t>(ids.topk);
  const bool guesses = batch.num_requests > 0;
  wait_for_previous_kernel();
  start_next_kernel();

  // The first __syncwarp() keeps the compiler from looking at the id before the loads above it are
  // under way, the second from waiting for the copies there.
  const int32_t request = guess_request(batch, token, each);
  const TableRow first_pages =
      copy_table_row<kTableRowPages>(batch, request, guesses, table, blockDim.x);
  const PositionGuess guess = guess_position(batch, request);
  __syncwarp();
  const LoadingId id = start_load_id(ids, head, token, lane, has_entry);
  const int64_t row = token * ids.num_heads + head;
  int32_t* entry =
      params.page_table + row * params.table_row_stride + lane * params.table_entry_stride;
  int32_t* const kv_len = params.kv_lens + row * params.kv_lens_stride;
  compute_here(entry);
  compute_here(kv_len);

  // The page by the guess, of an id that may be none.
  const auto block = static_cast<uint32_t>(id.low);
  int32_t page = -1;
  first_pages.load_others(batch, guesses, block, page);
  __syncwarp();
  wait_async_copies<0>();
  __syncthreads();
  if (block < first_pages.copied) page = table[block];

  TokenPosition position{request, max(guess.length, 0) - (guess.end - token)};
  const bool is_right = guess.begin <= token && token < guess.end;
  if (!is_right) position = find_position_by_warp(batch, token, guess);
  const int32_t visible = visible_blocks(batch, position.pos);
  const bool counts = lane < visible && is_visible(id, visible);
  if (!is_right) page = counts ? page_of(batch, position.request, block) : -1;
  const bool listed = counts && page >= 0 && page < params.num_pages;

  // Ranks are lanes where what is listed stands first, ascending. Equal blocks keep their order.
  const uint32_t before = __shfl_up_sync(kAllLanes, counts ? block : kNone, 1);
  const uint32_t listing = __ballot_sync(kAllLanes, listed);
  const bool falls = listed && lane > 0 && before > block;
  int32_t rank = lane;
  if (__any_sync(kAllLanes, falls) || (listing & (listing + 1)) != 0) {
    const uint32_t key = listed ? block : kNone;
    rank = 0;
#pragma unroll 1
    for (int other = 0; other < 32; ++other) {
      const uint32_t other_key = __shfl_sync(kAllLanes, key, other);
      rank += other_key < key || (other_key == key && other < lane);
    }
    entry += (rank - lane) * params.table_entry_stride;
  }
  if (!has_entry) return;
  *entry = listed ? static_cast<int32_t>(page * params.page_step + head * params.head_step) : 0;
  if (rank == max(__popc(listing) - 1, 0)) {
    const int32_t last_tokens =
        min(kBlock, position.pos + 1 - static_cast<int32_t>(block) * kBlock);
    *kv_len = listed ? rank * kBlock + last_tokens : 0;
  }
}

}  // namespace msa::decode_view::sm80
