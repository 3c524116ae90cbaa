// Tiles of requests (prefill_plan.h): which tokens a tile has, and the blocks that they selected,
// each once. Device functions of the plan of such a prefill and of sparse_decode's kernel.
//
// Shared    entries  block of each (token, k) of the tile, and the token's bit until it is listed
//           present  a window of 32 blocks a thread, a bit each
//           before   of each thread: blocks in the words before its own
//           list     of one pass: blocks, ascending, with the tokens that selected them
// A pass    1 blocks of the entries into `present`   2 a prefix sum over its words
//           3 an entry's place is its block's rank: its token's bit goes there
//           4 the list to where it is wanted
// A block that a token lists twice is listed twice, the second time for that token alone: entries
// that find their bit set wait for the next pass. Longer contexts than a window take a pass a
// window.
// What is made does not depend on the order of the atomics. Loads are three dependent ones: of the
// requests, of ids, of pages. The loops are not unrolled: the code runs once, and is fetched once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "device/common.cuh"
#include "device/positions.cuh"
#include "step3_remap/prefill_plan.h"

namespace msa::split_selection::sm90 {

constexpr int kMaxTileEntries = kMaxTileTokens * kMaxTopk;
constexpr int kRequestsPerLane = 2;

template <int kThreads>
struct UnionState {
  static constexpr int kWindowBlocks = kThreads * 32;
  TileBlock entries[kMaxTileEntries];
  TileBlock list[kMaxTileEntries];
  uint32_t present[kThreads];
  int32_t before[kThreads];
  int32_t warp_blocks[kThreads / 32];

  // By all threads, before a __syncthreads.
  __device__ __forceinline__ void clear() {
    present[threadIdx.x] = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < kMaxTileEntries; i += kThreads) list[i].tokens = 0;
  }
};

// Tokens of the batch that are of a request: whatever cu_seqlens_q says, no more than there are.
__device__ __forceinline__ int32_t count_real_tokens(const BatchView& batch) {
  return min(max(first_token_of(batch, batch.num_requests), 0),
             static_cast<int32_t>(batch.num_tokens));
}

// Tile `index` of a head; its blocks are left out. By a warp. Its tokens are rows of the batch,
// whatever cu_seqlens_q says.
__device__ __forceinline__ RequestTile find_tile(const BatchView& batch, int32_t index,
                                                 int32_t tile_tokens) {
  const int lane = threadIdx.x % 32;
  const auto num_requests = static_cast<int32_t>(batch.num_requests);
  const auto num_tokens = static_cast<int32_t>(batch.num_tokens);
  int32_t before = 0;  // tiles of earlier requests
#pragma unroll 1
  for (int32_t first = 0; first < num_requests; first += 32 * kRequestsPerLane) {
    const int32_t mine = first + lane * kRequestsPerLane;
    int32_t begin[kRequestsPerLane + 1], seq_len[kRequestsPerLane];
#pragma unroll
    for (int i = 0; i <= kRequestsPerLane; ++i) {
      begin[i] = first_token_of(batch, min(mine + i, num_requests));
      if (i < kRequestsPerLane) seq_len[i] = seq_len_of(batch, min(mine + i, num_requests - 1));
    }
    int32_t row[kRequestsPerLane], end_row[kRequestsPerLane], tiles[kRequestsPerLane], sum = 0;
#pragma unroll
    for (int i = 0; i < kRequestsPerLane; ++i) {
      row[i] = min(max(begin[i], 0), num_tokens);
      end_row[i] = max(min(begin[i + 1], num_tokens), row[i]);
      tiles[i] = static_cast<uint32_t>(end_row[i] - row[i] + tile_tokens - 1) /
                 static_cast<uint32_t>(tile_tokens);
      sum += tiles[i];
    }
    const int32_t inclusive = sum_up_to_lane(sum);
    const uint32_t past = __ballot_sync(kAllLanes, before + inclusive > index);
    if (past != 0) {
      RequestTile tile{};
      int32_t skipped = index - before - inclusive + sum;  // of the lane's tiles
#pragma unroll
      for (int i = 0; i < kRequestsPerLane; ++i) {
        if (skipped >= 0 && skipped < tiles[i]) {
          tile.request = mine + i;
          tile.first_token = row[i] + skipped * tile_tokens;
          tile.tokens = min(tile_tokens, end_row[i] - tile.first_token);
          tile.seq_len = seq_len[i];
          tile.pos = seq_len[i] - (begin[i + 1] - tile.first_token);
        }
        skipped -= tiles[i];
      }
      const int owner = __ffs(past) - 1;
      tile.request = __shfl_sync(kAllLanes, tile.request, owner);
      tile.first_token = __shfl_sync(kAllLanes, tile.first_token, owner);
      tile.tokens = __shfl_sync(kAllLanes, tile.tokens, owner);
      tile.seq_len = __shfl_sync(kAllLanes, tile.seq_len, owner);
      tile.pos = __shfl_sync(kAllLanes, tile.pos, owner);
      return tile;
    }
    before += __shfl_sync(kAllLanes, inclusive, 31);
  }
  return {};
}

// The entries of the tile that count, into shared memory: each thread its own, which it alone uses.
template <int kThreads>
__device__ __forceinline__ void load_entries(const IdsView& ids, const BatchView& batch,
                                             int64_t num_pages, const RequestTile& tile,
                                             int32_t head, UnionState<kThreads>& state) {
  const auto topk = static_cast<uint32_t>(ids.topk);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < tile.tokens * topk; i += kThreads) {
    const auto token = static_cast<int32_t>(i / topk), slot = static_cast<int32_t>(i % topk);
    const int32_t block = selected_block(ids, batch, num_pages, {tile.request, tile.pos + token},
                                         head, tile.first_token + token, slot);
    state.entries[i] = {block, block < 0 ? 0 : 1u << token};
  }
}

// Lists the blocks of the tile's `count` entries, all of them before `end_block`; returns how many.
// All threads, after a __syncthreads; the state is clear again afterwards.
template <int kThreads>
__device__ __forceinline__ int32_t list_union(const RequestTile& tile, int group_tokens,
                                              int32_t count, int32_t end_block,
                                              UnionState<kThreads>& state, TileBlock* list) {
  constexpr int kWindowBlocks = UnionState<kThreads>::kWindowBlocks;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  int32_t listed = 0, window = 0;
  // visit(entry, block within the window) for the thread's entries that are to be listed.
  const auto for_entries = [&](const auto& visit) {
#pragma unroll 1
    for (int32_t i = thread; i < count; i += kThreads) {
      const TileBlock entry = state.entries[i];
      const auto block = static_cast<uint32_t>(entry.block - window);
      if (entry.tokens != 0 && block < kWindowBlocks) visit(i, entry, block);
    }
  };
#pragma unroll 1
  while (window < end_block) {
    for_entries([&](int32_t, const TileBlock&, uint32_t block) {
      atomicOr(&state.present[block / 32], 1u << block % 32);
    });
    __syncthreads();
    const int32_t mine = __popc(state.present[thread]);
    const int32_t inclusive = sum_up_to_lane(mine);
    if (lane == 31) state.warp_blocks[warp] = inclusive;
    __syncthreads();
    int32_t before = inclusive - mine, total = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      const int32_t blocks = state.warp_blocks[w];
      if (w < warp) before += blocks;
      total += blocks;
    }
    state.before[thread] = before;
    __syncthreads();
    bool twice = false;
    for_entries([&](int32_t i, const TileBlock& entry, uint32_t block) {
      const uint32_t lower = state.present[block / 32] & ((1u << block % 32) - 1);
      TileBlock& place = state.list[state.before[block / 32] + __popc(lower)];
      place.block = entry.block;
      if (atomicOr(&place.tokens, entry.tokens) & entry.tokens) {
        twice = true;
      } else {
        state.entries[i].tokens = 0;
      }
    });
    if (!__syncthreads_or(twice)) window += kWindowBlocks;
    state.present[thread] = 0;
#pragma unroll 1
    for (int32_t i = thread; i < total; i += kThreads) {
      const TileBlock block = state.list[i];
      list[listed + i] = {block.block, marked_if_partly(block.tokens, tile.tokens, group_tokens)};
      state.list[i].tokens = 0;
    }
    listed += total;
    __syncthreads();
  }
  return listed;
}

// The result of a token of one KV head that attends to nothing, by a warp.
__device__ __forceinline__ void write_nothing(const RowsView& out, const LseView& lse, int group,
                                              int32_t head, int32_t token) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = lane; i < group * kHeadDim / 8; i += 32) {
    const int64_t q_head = head * group + i / (kHeadDim / 8);
    __nv_bfloat16* row =
        static_cast<__nv_bfloat16*>(out.data) + token * out.token_stride + q_head * out.head_stride;
    *reinterpret_cast<uint4*>(row + i % (kHeadDim / 8) * 8) = make_uint4(0, 0, 0, 0);
  }
  if (lane < group && lse.data != nullptr) {
    lse.data[token * lse.token_stride + (head * group + lane) * lse.head_stride] = -INFINITY;
  }
}

}  // namespace msa::split_selection::sm90
