// Step 3 of prefill, split_selection: which blocks a tile of tokens attends to query-major, and
// which entries are left for the KV-block-major kernel (prefill_plan.h says by which rule).
//
// Grid      a CTA a (KV head, tile).
// Shared    a hash table block -> mask of the tile's tokens that selected it, kPlaces places: more
// than
//           the tile has entries, and few, since clearing and scanning them is most of the work.
// Steps     1 positions of the tokens   2 entries into the table   3 shared blocks of each place
//           4 query-major or not   5 list of shared blocks, ascending   6 slots and row counts of
//           the leftovers
// What is computed does not depend on the order of the atomics: lists are ranked by block, and a
// slot is only a place in the workspace. A duplicate entry always is a leftover: as a part of its
// own it counts twice, as the contract says.
#pragma once

#include <cuda_runtime.h>

#include "device/dependent_launch.cuh"
#include "device/positions.cuh"
#include "step3_remap/prefill_plan.h"

namespace msa::split_selection::sm80 {

constexpr int kThreads = 128;
constexpr int32_t kEmpty = -1;

struct SplitParams {
  IdsView ids;
  BatchView batch;
  int64_t num_pages;
  PrefillPlan plan;
  bool query_major;  // may a tile be query-major at all (G 8 and 16)
};

template <int kPlaces>
struct SharedState {
  int32_t block[kPlaces];      // kEmpty: free
  uint32_t selected[kPlaces];  // tokens that selected it
  uint32_t shared[kPlaces];    // tokens that attend to it query-major
  int32_t rank_block[4 * kMaxTopk];
  uint32_t rank_tokens[4 * kMaxTopk];
  TokenPosition positions[kMaxTileTokens];
  uint32_t leftover_mask[kMaxTileTokens];
  int32_t token_slot[kMaxTileTokens];
  int32_t request;  // of all tokens, -1: they belong to several
  uint32_t num_shared, shared_entries, all_entries;
  int64_t round;
};

template <int kPlaces>
__device__ __forceinline__ int find_place(SharedState<kPlaces>& state, int32_t block) {
  uint32_t place = (static_cast<uint32_t>(block) * 2654435761u >> 16) % kPlaces;
  while (true) {
    const int32_t found = atomicCAS(&state.block[place], kEmpty, block);
    if (found == kEmpty || found == block) return static_cast<int>(place);
    place = (place + 1) % kPlaces;
  }
}

// kThreadEntries * kThreads: at least the entries of a tile, fewer than kPlaces.
template <int kPlaces, int kThreadEntries>
__global__ void __launch_bounds__(kThreads)
    msa_split_selection_sm80_kernel(const __grid_constant__ SplitParams params,
                                    uint32_t* const row_counters) {
  static_assert(kThreadEntries * kThreads <= kPlaces, "the table never fills");
  __shared__ SharedState<kPlaces> state;
  const PrefillPlan& plan = params.plan;
  const int thread = threadIdx.x;
  const int tile_tokens = static_cast<int>(plan.tile_tokens);
  const int topk = static_cast<int>(params.ids.topk);
  const int64_t head = blockIdx.x / plan.tiles;
  const int64_t first_token = blockIdx.x % plan.tiles * tile_tokens;
  const int tokens = static_cast<int>(min(int64_t{tile_tokens}, plan.num_tokens - first_token));

  for (int i = thread; i < kPlaces; i += kThreads) {
    state.block[i] = kEmpty;
    state.selected[i] = 0;
  }
  if (thread < kMaxTileTokens) {
    state.positions[thread] =
        thread < tokens ? find_position(params.batch, static_cast<int32_t>(first_token + thread))
                        : TokenPosition{-1, -1};
    state.leftover_mask[thread] = 0;
  }
  if (thread == 0) state.num_shared = state.shared_entries = state.all_entries = 0;
  __syncthreads();
  // The tokens are in order of their requests, padding last: comparing the ends is enough.
  if (thread == 0) {
    int last = tokens - 1;
    while (last > 0 && state.positions[last].request < 0) --last;
    state.request = state.positions[0].request == state.positions[last].request
                        ? state.positions[0].request
                        : -1;
  }
  __syncthreads();
  const bool may_share = params.query_major && state.request >= 0;

  // Entries: the place of each in the table (with the request, where tokens have several), or -1.
  int place[kThreadEntries];
  int32_t block[kThreadEntries];
  bool duplicate[kThreadEntries];
  uint32_t found = 0;
#pragma unroll
  for (int i = 0; i < kThreadEntries; ++i) {
    const int entry = thread + i * kThreads, token = entry / topk, slot = entry % topk;
    block[i] = -1;
    place[i] = -1;
    duplicate[i] = false;
    if (token < tokens) {
      block[i] = selected_block(params.ids, params.batch, params.num_pages, state.positions[token],
                                head, first_token + token, slot);
    }
    if (block[i] < 0) continue;
    ++found;
    if (may_share) {
      place[i] = find_place(state, block[i]);
      duplicate[i] = atomicOr(&state.selected[place[i]], 1u << token) >> token & 1;
    }
  }
  __syncthreads();

  uint32_t shared_here = 0;
  if (may_share) {
    const int group_tokens = static_cast<int>(plan.group_tokens);
    const uint32_t group_mask = (1u << group_tokens) - 1;
    for (int i = thread; i < kPlaces; i += kThreads) {
      uint32_t tokens_shared = 0;
#pragma unroll
      for (int group = 0; group < kTileGroups; ++group) {
        const uint32_t members = state.selected[i] & group_mask << group * group_tokens;
        if (4 * __popc(members) >= 3 * group_tokens) tokens_shared |= members;
      }
      state.shared[i] = tokens_shared;
      shared_here += __popc(tokens_shared);
    }
  }
  atomicAdd(&state.shared_entries, shared_here);
  atomicAdd(&state.all_entries, found);
  __syncthreads();
  const bool query_major =
      may_share && state.shared_entries > 0 && 2 * state.shared_entries >= state.all_entries;

  if (query_major) {
    for (int i = thread; i < kPlaces; i += kThreads) {
      if (state.shared[i] == 0) continue;
      const uint32_t next = atomicAdd(&state.num_shared, 1);
      state.rank_block[next] = state.block[i];
      state.rank_tokens[next] = state.shared[i];
    }
    __syncthreads();
    const int count = static_cast<int>(state.num_shared);
    TileBlock* list = plan.tile_list + blockIdx.x * plan.tile_capacity;
    for (int i = thread; i < count; i += kThreads) {
      int rank = 0;
      for (int j = 0; j < count; ++j) rank += state.rank_block[j] < state.rank_block[i];
      list[rank] = {state.rank_block[i], state.rank_tokens[i]};
    }
  }
  if (thread == 0) plan.tile_blocks[blockIdx.x] = query_major ? state.num_shared : 0;

  bool left[kThreadEntries];
#pragma unroll
  for (int i = 0; i < kThreadEntries; ++i) {
    const int entry = thread + i * kThreads, token = entry / topk, slot = entry % topk;
    left[i] =
        block[i] >= 0 && !(query_major && !duplicate[i] && (state.shared[place[i]] >> token & 1));
    if (left[i]) atomicOr(&state.leftover_mask[token], 1u << slot);
  }
  __syncthreads();
  if (thread < 32) {  // slots: a prefix sum over the tile's tokens, one allotment a tile
    const int count = thread < tokens ? __popc(state.leftover_mask[thread]) : 0;
    int inclusive = count;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, inclusive, distance);
      if (thread >= distance) inclusive += other;
    }
    int base = 0;
    if (thread == 31) base = atomicAdd(plan.next_slot, inclusive);
    base = __shfl_sync(0xffffffffu, base, 31);
    const int round = base / static_cast<int>(plan.round_slots);
    base -= round * static_cast<int>(plan.round_slots);
    if (thread < tokens) {
      const int64_t unit = head * plan.num_tokens + first_token + thread;
      plan.first_slot[unit] = base + inclusive - count;
      plan.leftovers[unit] = count;
      plan.leftover_mask[unit] = state.leftover_mask[thread];
    }
    if (thread == 0) plan.tile_round[blockIdx.x] = state.round = round;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreadEntries; ++i) {
    if (!left[i]) continue;
    const int token = (thread + i * kThreads) / topk;
    const int64_t row = state.round * plan.num_rows +
                        (head * params.batch.num_requests + state.positions[token].request) *
                            params.batch.max_pages +
                        block[i];
    atomicAdd(row_counters + row, 1);
  }
}

// Every leftover to its row: a lane an entry, 32 tokens of one (KV head, k) a warp.
__global__ void __launch_bounds__(kThreads)
    msa_split_selection_scatter_sm80_kernel(const __grid_constant__ SplitParams params,
                                            uint32_t* const row_cursors) {
  wait_for_previous_kernel();
  const PrefillPlan& plan = params.plan;
  const uint32_t num_tokens = static_cast<uint32_t>(plan.num_tokens);
  const uint32_t padded = (num_tokens + 31) / 32 * 32;
  const uint32_t topk = static_cast<uint32_t>(params.ids.topk);
  const uint32_t unit = blockIdx.x * kThreads + threadIdx.x;
  const uint32_t head_slot = unit / padded, token = unit % padded;
  const uint32_t head = head_slot / topk, slot = head_slot % topk;
  if (head >= params.ids.num_heads) return;  // whole warps
  int64_t row = -1;
  Pair pair{};
  if (token < num_tokens) {
    const int64_t place = static_cast<int64_t>(head) * num_tokens + token;
    const uint32_t mask = plan.leftover_mask[place];
    if (mask >> slot & 1) {
      pair.token = static_cast<int32_t>(token);
      pair.slot = plan.first_slot[place] + __popc(mask & ((1u << slot) - 1));
      const TokenPosition position = find_position(params.batch, pair.token);
      row = plan.tile_round[head * plan.tiles + token / plan.tile_tokens] * plan.num_rows +
            (head * params.batch.num_requests + position.request) * params.batch.max_pages +
            load_id(params.ids, head, token, slot);
    }
  }
  const unsigned peers = __match_any_sync(0xffffffffu, row);
  const int lane = threadIdx.x % 32, leader = __ffs(peers) - 1;
  uint32_t first = 0;
  if (lane == leader && row >= 0) first = atomicAdd(row_cursors + row, __popc(peers));
  first = __shfl_sync(0xffffffffu, first, leader);
  if (row >= 0) plan.pairs[first + __popc(peers & ((1u << lane) - 1))] = pair;
}

}  // namespace msa::split_selection::sm80
