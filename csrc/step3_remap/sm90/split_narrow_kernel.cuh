// Step 3 of prefill where no request has more blocks than a token selects (PrefillSizes::narrow):
// every tile is query-major, with all blocks that any of its tokens selected, so that the call is
// dense causal attention in one launch after this one. No leftovers, no pairs, nothing to clear.
//
// Grid      a warp a tile of any head; tiles of a request follow each other, the last is not full.
// Steps     1 the tile's request: a prefix sum over the requests' numbers of tiles
//           2 a lane a block: tokens that selected it   3 the list, ascending by block; a block
//           that a token lists twice stands in it twice, the second time for that token alone
// Also writes the result of tokens that attend to nothing: padding, and tiles without a block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "device/dependent_launch.cuh"
#include "device/positions.cuh"
#include "step3_remap/prefill_plan.h"
#include "step3_remap/sm90/split_selection_kernel.cuh"

namespace msa::split_selection::sm90 {

constexpr int kNarrowThreads = 256;

struct NarrowParams {
  SplitParams split;
  RowsView out;  // [T, Hq, D] bfloat16
  LseView lse;
  int64_t group_size;
};

struct NarrowTile {
  int32_t request;  // -1: no such tile
  int32_t first_token, tokens;
};

// Tile `index` of a head, by a warp.
__device__ __forceinline__ NarrowTile find_tile(const BatchView& batch, int32_t index,
                                                int32_t tile_tokens) {
  const int lane = threadIdx.x % 32;
  const auto num_requests = static_cast<int32_t>(batch.num_requests);
  int32_t before = 0;  // tiles of earlier requests
  for (int32_t first = 0; first < num_requests; first += 32) {
    const int32_t request = first + lane;
    const int32_t begin = request < num_requests ? first_token_of(batch, request) : 0;
    const int32_t end = request < num_requests ? first_token_of(batch, request + 1) : 0;
    const int32_t tiles = (end - begin + tile_tokens - 1) / tile_tokens;
    int32_t inclusive = tiles;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int32_t other = __shfl_up_sync(kAllLanes, inclusive, distance);
      if (lane >= distance) inclusive += other;
    }
    const uint32_t past = __ballot_sync(kAllLanes, before + inclusive > index);
    if (past != 0) {
      const int owner = __ffs(past) - 1;
      const int32_t skipped = index - before - inclusive + tiles;  // tiles of the owner before
      const int32_t first_token = begin + skipped * tile_tokens;
      const NarrowTile mine{request, first_token, min(tile_tokens, end - first_token)};
      return {__shfl_sync(kAllLanes, mine.request, owner),
              __shfl_sync(kAllLanes, mine.first_token, owner),
              __shfl_sync(kAllLanes, mine.tokens, owner)};
    }
    before += __shfl_sync(kAllLanes, inclusive, 31);
  }
  return {-1, 0, 0};
}

// The result of a token of one KV head that attends to nothing, by a warp.
__device__ __forceinline__ void write_nothing(const NarrowParams& params, int32_t head,
                                              int32_t token) {
  const int lane = threadIdx.x % 32, group = static_cast<int>(params.group_size);
  for (int i = lane; i < group * kHeadDim / 8; i += 32) {
    const int64_t q_head = head * group + i / (kHeadDim / 8);
    __nv_bfloat16* row = static_cast<__nv_bfloat16*>(params.out.data) +
                         token * params.out.token_stride + q_head * params.out.head_stride;
    *reinterpret_cast<uint4*>(row + i % (kHeadDim / 8) * 8) = make_uint4(0, 0, 0, 0);
  }
  if (lane < group && params.lse.data != nullptr) {
    params.lse
        .data[token * params.lse.token_stride + (head * group + lane) * params.lse.head_stride] =
        -INFINITY;
  }
}

static __global__ void __launch_bounds__(kNarrowThreads)
    msa_split_selection_narrow_sm90_kernel(const __grid_constant__ NarrowParams params) {
  start_next_kernel();
  const SplitParams& split = params.split;
  const PrefillPlan& plan = split.plan;
  const int lane = threadIdx.x % 32;
  const auto tiles = static_cast<uint32_t>(plan.sizes.tiles);
  const auto num_tokens = static_cast<int32_t>(plan.num_tokens);
  const uint32_t warp = blockIdx.x * (kNarrowThreads / 32) + threadIdx.x / 32;
  const uint32_t warps = gridDim.x * (kNarrowThreads / 32);
  const auto heads = static_cast<uint32_t>(split.ids.num_heads);

  // Padding.
  const int32_t real_tokens = first_token_of(split.batch, split.batch.num_requests);
  for (uint32_t unit = warp; unit < heads * max(0, num_tokens - real_tokens); unit += warps) {
    write_nothing(params, unit % heads, real_tokens + static_cast<int32_t>(unit / heads));
  }
  if (warp >= heads * tiles) return;

  const int32_t head = warp / tiles;
  const NarrowTile tile =
      find_tile(split.batch, warp % tiles, static_cast<int32_t>(plan.sizes.tile_tokens));
  int32_t count = 0;
  TileBlock* list = plan.tile_list + warp * plan.tile_capacity;
  if (tile.request >= 0) {
    const int32_t first_pos = seq_len_of(split.batch, tile.request) -
                              (first_token_of(split.batch, tile.request + 1) - tile.first_token);
    // Tokens that list block `lane` more than `level` times; more than once is a caller's mistake.
    for (int level = 0;; ++level) {
      uint32_t tokens = 0;
      bool more = false;
      for (int token = 0; token < tile.tokens; ++token) {
        const int32_t block = lane < split.ids.topk
                                  ? selected_block(split.ids, split.batch, split.num_pages,
                                                   {tile.request, first_pos + token}, head,
                                                   tile.first_token + token, lane)
                                  : -1;
        int32_t times = 0;
        if (level == 0) {
          const uint32_t blocks = __reduce_or_sync(kAllLanes, block >= 0 ? 1u << block : 0);
          times = blocks >> lane & 1;
          more |= __popc(blocks) != __popc(__ballot_sync(kAllLanes, block >= 0));
        } else {
          for (int other = 0; other < 32; ++other) {
            times += __shfl_sync(kAllLanes, block, other) == lane;
          }
          more |= __any_sync(kAllLanes, times > level + 1);
        }
        if (times > level) tokens |= 1u << token;
      }
      const uint32_t listed = __ballot_sync(kAllLanes, tokens != 0);
      if (tokens != 0) list[count + __popc(listed & ((1u << lane) - 1))] = {lane, tokens};
      count += __popc(listed);
      if (!more) break;
    }
  }
  if (lane == 0) {
    plan.tile_blocks[warp] = count;
    plan.tile_round[warp] = 0;
    plan.tile_place[warp] = {tile.first_token, tile.tokens};
  }
  for (int32_t token = lane; token < tile.tokens; token += 32) {
    plan.leftovers[head * plan.num_tokens + tile.first_token + token] = 0;
  }
  if (count > 0) return;
  for (int32_t token = 0; token < tile.tokens; ++token) {
    write_nothing(params, head, tile.first_token + token);
  }
}

}  // namespace msa::split_selection::sm90
