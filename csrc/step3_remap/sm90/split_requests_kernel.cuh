// Step 3 of prefill where tiles are of requests (PrefillSizes::by_request): every tile is
// query-major, with all blocks that any of its tokens selected, so that the call is one launch
// after this one. No leftovers, no pairs, nothing to clear.
//
// Grid      a CTA a tile of any head; tiles of a request follow each other, the last may be short.
// Shared    as request_tile.cuh says
// Also writes the result of tokens that attend to nothing: padding, and tiles without a block.
#pragma once

#include "device/dependent_launch.cuh"
#include "step3_remap/sm90/request_tile.cuh"
#include "step3_remap/sm90/split_selection_kernel.cuh"

namespace msa::split_selection::sm90 {

constexpr int kRequestThreads = 256;
constexpr int kRequestWarps = kRequestThreads / 32;

struct RequestParams {
  SplitParams split;
  RowsView out;  // [T, Hq, D] bfloat16
  LseView lse;
  int64_t group_size;
};

static __global__ void __launch_bounds__(kRequestThreads)
    msa_split_selection_requests_sm90_kernel(const __grid_constant__ RequestParams params) {
  __shared__ UnionState<kRequestThreads> state;
  start_next_kernel();
  const SplitParams& split = params.split;
  const PrefillPlan& plan = split.plan;
  const int thread = threadIdx.x, warp = thread / 32;
  const auto tiles = static_cast<uint32_t>(plan.sizes.tiles);
  const auto heads = static_cast<uint32_t>(split.ids.num_heads);
  const auto tile_tokens = static_cast<int32_t>(plan.sizes.tile_tokens);
  const int group = static_cast<int>(params.group_size);
  state.clear();
  wait_for_previous_kernel();
  const int32_t real_tokens = count_real_tokens(split.batch);

  if (blockIdx.x < heads * tiles) {  // without tiles one CTA remains, for padding
    const int32_t head = blockIdx.x / tiles;
    RequestTile tile = find_tile(split.batch, blockIdx.x % tiles, tile_tokens);
    if (tile.tokens > 0) {
      load_entries(split.ids, split.batch, split.num_pages, tile, head, state);
      __syncthreads();
      tile.blocks = list_union(tile, static_cast<int>(plan.sizes.group_tokens),
                               tile.tokens * static_cast<int32_t>(split.ids.topk),
                               visible_blocks(split.batch, tile.pos + tile.tokens - 1), state,
                               plan.tile_list + blockIdx.x * plan.tile_capacity);
    }
    if (thread == 0) plan.request_tiles[blockIdx.x] = tile;
    if (tile.blocks == 0) {
#pragma unroll 1
      for (int32_t token = warp; token < tile.tokens; token += kRequestWarps) {
        write_nothing(params.out, params.lse, group, head, tile.first_token + token);
      }
    }
  }

  const uint32_t padding = static_cast<uint32_t>(plan.num_tokens) - real_tokens;
#pragma unroll 1
  for (uint32_t unit = blockIdx.x * kRequestWarps + warp; unit < heads * padding;
       unit += gridDim.x * kRequestWarps) {
    write_nothing(params.out, params.lse, group, unit % heads,
                  real_tokens + static_cast<int32_t>(unit / heads));
  }
}

}  // namespace msa::split_selection::sm90
