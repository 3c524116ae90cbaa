// Step 3 of prefill, split_selection: which blocks a tile of tokens attends to query-major, which
// entries are left for the KV-block-major kernel (prefill_plan.h says by which rule), and the
// leftovers in the order of their blocks.
//
// Launches  split, scan (of the remap), scatter
// Grid      split: a CTA a (KV head, chunk of tiles); scatter: kScatterParts CTAs a chunk.
// Shared    positions   of the chunk's tokens
//           tables      a hash table a tile, block -> mask of the tile's tokens that selected it,
//                       then of those that share it; at most two thirds full
//           entries     block and place of each entry of the chunk
//           histogram   leftovers of the chunk in each row of its requests, where these are few
//                       enough; it takes the contention off the counters in memory
// Steps     of split:
//           1 positions
//           2 entries into the tables
//           3 shared blocks of each place
//           4 query-major or not, and the tile's list, ascending
//           5 leftovers into the histogram: each entry's rank in its row
//           6 slots: a prefix sum over the chunk's tokens, one allotment a chunk
//           7 the histogram into the counters: the chunk's base in each row
// An entry's place among the pairs is row begin + chunk base + rank: scatter needs no atomics. What
// is computed does not depend on the order of split's: lists are ranked by block, and a slot is
// only a place in the workspace. A duplicate entry always is a leftover: as a part of its own it
// counts twice, as the contract says. The loops are not unrolled: the code runs once, and fetching
// it is most of its time.
#pragma once

#include <cuda_runtime.h>

#include "device/common.cuh"
#include "device/dependent_launch.cuh"
#include "device/positions.cuh"
#include "step3_remap/prefill_plan.h"
#include "step3_remap/sm80/token_chunk.cuh"

namespace msa::split_selection::sm90 {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int32_t kEmpty = -1;
constexpr int kMaxChunkTokens = kMaxChunkTiles * kMaxTileTokens;
constexpr int kMaxShared = 4 * kMaxTopk;  // 3 groups, each sharing at most 4/3 of K blocks
constexpr int kScatterThreads = 512;
constexpr int kScatterParts = 4;  // an entry's look-ups are a chain, so few a thread
constexpr uint16_t kDuplicate = 0x8000;
static_assert(kMaxChunkTokens <= kThreads, "a thread sums one token");

struct SplitParams {
  IdsView ids;
  BatchView batch;
  int64_t num_pages;
  PrefillPlan plan;
  bool large_first = false;
};

struct Chunk : TokenChunk {
  int64_t index;  // of all chunks
  int32_t head, first_tile, tiles;
};

// By all threads of the CTA.
__device__ __forceinline__ Chunk load_chunk(const SplitParams& params, uint32_t index,
                                            TokenPosition* positions) {
  const PrefillSizes& sizes = params.plan.sizes;
  const auto chunks = static_cast<uint32_t>(sizes.chunks);
  const auto chunk_tiles = static_cast<int32_t>(sizes.chunk_tiles);
  const auto tile_tokens = static_cast<int32_t>(sizes.tile_tokens);
  Chunk chunk;
  chunk.index = index;
  chunk.head = index / chunks;
  chunk.first_tile = index % chunks * chunk_tiles;
  chunk.tiles = min(chunk_tiles, static_cast<int32_t>(sizes.tiles) - chunk.first_tile);
  chunk.first_token = chunk.first_tile * tile_tokens;
  chunk.tokens = min(chunk.tiles * tile_tokens,
                     static_cast<int32_t>(params.plan.num_tokens) - chunk.first_token);
  locate_tokens(params.batch, params.plan.chunk_rows, chunk, positions);
  return chunk;
}

// Of a chunk's first request, among those of its round.
__device__ __forceinline__ int64_t first_row_of(const SplitParams& params, const Chunk& chunk,
                                                int64_t round) {
  return round * params.plan.num_rows +
         (chunk.head * params.batch.num_requests + chunk.first_request) * params.batch.max_pages;
}

struct Place {
  int32_t block;    // kEmpty: free
  uint32_t tokens;  // of the tile
};

struct TileState {
  bool may_share;
  int32_t entries, shared_entries, shared_blocks;
  TileBlock list[kMaxShared];
};

struct SharedState {
  TokenPosition positions[kMaxChunkTokens];
  uint32_t leftover_mask[kMaxChunkTokens];
  TileState tiles[kMaxChunkTiles];
  int32_t warp_slots[kWarps];
  int64_t round;
  int32_t first_slot;
  // Place tables[tiles][places], int32_t entry_block[entries], uint32_t histogram[rows],
  // uint16_t entry_place[entries] follow
};

// Bytes of a chunk of `tiles` tiles; entries and places are a tile's.
inline __host__ __device__ int64_t split_shared_bytes(int64_t tiles, int64_t places,
                                                      int64_t entries, int64_t rows) {
  return int64_t{sizeof(SharedState)} + tiles * places * int64_t{sizeof(Place)} +
         tiles * entries * 6 + rows * 4 + 16;
}

// The place of a block in its tile's table.
__device__ __forceinline__ uint32_t find_place(Place* table, uint32_t mask, int32_t block) {
  uint32_t place = static_cast<uint32_t>(block) * 2654435761u >> 16 & mask;
  while (true) {
    const int32_t found = atomicCAS(&table[place].block, kEmpty, block);
    if (found == kEmpty || found == block) return place;
    place = (place + 1) & mask;
  }
}

static __global__ void __launch_bounds__(kThreads)
    msa_split_selection_sm90_kernel(const __grid_constant__ SplitParams params,
                                    uint32_t* const row_counters) {
  extern __shared__ __align__(16) uint8_t shared_memory[];
  start_next_kernel();
  SharedState& state = *reinterpret_cast<SharedState*>(shared_memory);
  const PrefillPlan& plan = params.plan;
  const PrefillSizes& sizes = plan.sizes;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const auto topk = static_cast<uint32_t>(params.ids.topk);
  const auto tile_tokens = static_cast<uint32_t>(sizes.tile_tokens);
  const auto places = static_cast<uint32_t>(sizes.tile_places);
  // Step 1.
  const Chunk chunk = load_chunk(params, blockIdx.x, state.positions);
  const uint32_t entries = chunk.tokens * topk;
  auto* const tables = reinterpret_cast<Place*>(shared_memory + sizeof(SharedState));
  auto* const entry_block = reinterpret_cast<int32_t*>(tables + sizes.chunk_tiles * places);
  auto* const histogram =
      reinterpret_cast<uint32_t*>(entry_block + sizes.chunk_tiles * tile_tokens * topk);
  auto* const entry_place = reinterpret_cast<uint16_t*>(histogram + chunk.rows);

  if (thread < kMaxChunkTokens) state.leftover_mask[thread] = 0;
#pragma unroll 1
  for (uint32_t i = thread; i < chunk.tiles * places; i += kThreads) tables[i] = {kEmpty, 0};
#pragma unroll 1
  for (int i = thread; i < chunk.rows; i += kThreads) histogram[i] = 0;
  if (thread < chunk.tiles) {
    TileState& tile = state.tiles[thread];
    tile.entries = tile.shared_entries = tile.shared_blocks = 0;
    const int first = thread * tile_tokens;
    int last = min(first + static_cast<int>(tile_tokens), chunk.tokens) - 1;
    while (last > first && state.positions[last].request < 0) --last;
    tile.may_share = sizes.query_major && state.positions[first].request >= 0 &&
                     state.positions[first].request == state.positions[last].request;
  }
  __syncthreads();

  // Step 2.
#pragma unroll 1
  for (uint32_t entry = thread; entry < entries; entry += kThreads) {
    const uint32_t token = entry / topk, tile = token / tile_tokens;
    const int32_t block =
        selected_block(params.ids, params.batch, params.num_pages, state.positions[token],
                       chunk.head, chunk.first_token + token, static_cast<int32_t>(entry % topk));
    entry_block[entry] = block;
    if (block < 0 || !state.tiles[tile].may_share) continue;
    atomicAdd(&state.tiles[tile].entries, 1);
    Place* table = tables + tile * places;
    const uint32_t place = find_place(table, places - 1, block);
    const uint32_t bit = 1u << token % tile_tokens;
    const bool duplicate = atomicOr(&table[place].tokens, bit) & bit;
    entry_place[entry] = static_cast<uint16_t>(place | (duplicate ? kDuplicate : 0));
  }
  __syncthreads();

  // Step 3.
  const auto group_tokens = static_cast<int>(sizes.group_tokens);
  const uint32_t group_mask = (1u << group_tokens % 32) - 1;
#pragma unroll 1
  for (uint32_t i = thread; i < chunk.tiles * places; i += kThreads) {
    const uint32_t selected = tables[i].tokens;
    if (selected == 0) continue;
    uint32_t shared = 0;
    for (int group = 0; group < kTileGroups; ++group) {
      const uint32_t members = selected & group_mask << group * group_tokens;
      if (4 * __popc(members) >= 3 * group_tokens) shared |= members;
    }
    tables[i].tokens = shared;
    if (shared == 0) continue;
    TileState& tile = state.tiles[i / places];
    atomicAdd(&tile.shared_entries, __popc(shared));
    tile.list[atomicAdd(&tile.shared_blocks, 1)] = {
        tables[i].block, marked_if_partly(shared, static_cast<int>(tile_tokens), group_tokens)};
  }
  __syncthreads();

  // Step 4.
  if (warp < chunk.tiles) {
    TileState& tile = state.tiles[warp];
    const int64_t index = chunk.head * sizes.tiles + chunk.first_tile + warp;
    const bool query_major = tile.shared_entries > 0 && 2 * tile.shared_entries >= tile.entries;
    const int count = query_major ? tile.shared_blocks : 0;
    TileBlock* list = plan.tile_list + index * plan.tile_capacity;
#pragma unroll 1
    for (int i = lane; i < count; i += 32) {
      const TileBlock mine = tile.list[i];
      int rank = 0;
#pragma unroll 4
      for (int j = 0; j < count; ++j) rank += tile.list[j].block < mine.block;
      list[rank] = mine;
    }
    __syncwarp();
    if (lane == 0) plan.tile_blocks[index] = tile.shared_blocks = count;
  }
  __syncthreads();

  // Step 5.
  const int64_t first_unit = chunk.head * plan.num_tokens + chunk.first_token;
#pragma unroll 1
  for (uint32_t entry = thread; entry < entries; entry += kThreads) {
    const int32_t block = entry_block[entry];
    if (block < 0) continue;
    const uint32_t token = entry / topk, tile = token / tile_tokens;
    if (state.tiles[tile].shared_blocks > 0) {
      const uint32_t place = entry_place[entry];
      const uint32_t tokens = tables[tile * places + (place & (kDuplicate - 1))].tokens;
      if (!(place & kDuplicate) && tokens >> token % tile_tokens & 1) continue;
    }
    atomicOr(&state.leftover_mask[token], 1u << entry % topk);
    if (chunk.rows > 0) {
      plan.entry_rank[first_unit * topk + entry] = atomicAdd(
          histogram + chunk.row_of(params.batch, state.positions[token].request, block), 1);
    }
  }
  __syncthreads();

  // Step 6.
  const int count = thread < chunk.tokens ? __popc(state.leftover_mask[thread]) : 0;
  const int inclusive = sum_up_to_lane(count);
  if (lane == 31) state.warp_slots[warp] = inclusive;
  __syncthreads();
  if (thread == 0) {
    int total = 0;
#pragma unroll 1
    for (int w = 0; w < kWarps; ++w) {
      const int slots = state.warp_slots[w];
      state.warp_slots[w] = total;
      total += slots;
    }
    const int base = atomicAdd(plan.next_slot, total);
    state.round = static_cast<uint32_t>(base) / static_cast<uint32_t>(sizes.round_slots);
    state.first_slot = base - static_cast<int32_t>(state.round * sizes.round_slots);
  }
  __syncthreads();
  if (thread < chunk.tokens) {
    plan.first_slot[first_unit + thread] =
        state.first_slot + state.warp_slots[warp] + inclusive - count;
    plan.leftovers[first_unit + thread] = count;
    plan.leftover_mask[first_unit + thread] = state.leftover_mask[thread];
  }
  if (thread < chunk.tiles) {
    plan.tile_round[chunk.head * sizes.tiles + chunk.first_tile + thread] =
        static_cast<int32_t>(state.round);
  }

  // Step 7.
  uint32_t* const counters = row_counters + first_row_of(params, chunk, state.round);
#pragma unroll 1
  for (int row = thread; row < chunk.rows; row += kThreads) {
    if (histogram[row] == 0) continue;
    plan.chunk_base[chunk.index * plan.chunk_rows + row] =
        atomicAdd(counters + row, histogram[row]);
  }
  if (chunk.rows == 0) {  // straight into the counters
#pragma unroll 1
    for (uint32_t entry = thread; entry < entries; entry += kThreads) {
      const uint32_t token = entry / topk;
      if (!(state.leftover_mask[token] >> entry % topk & 1)) continue;
      plan.entry_rank[first_unit * topk + entry] = atomicAdd(
          counters + chunk.row_of(params.batch, state.positions[token].request, entry_block[entry]),
          1);
    }
  }
}

// Every leftover to its row.
static __global__ void __launch_bounds__(kScatterThreads)
    msa_split_selection_scatter_sm90_kernel(const __grid_constant__ SplitParams params,
                                            const uint32_t* const row_begins) {
  __shared__ TokenPosition positions[kMaxChunkTokens];
  start_next_kernel();
  const PrefillPlan& plan = params.plan;
  const auto topk = static_cast<uint32_t>(params.ids.topk);
  const Chunk chunk = load_chunk(params, blockIdx.x / kScatterParts, positions);
  wait_for_previous_kernel();
  const int64_t first_unit = chunk.head * plan.num_tokens + chunk.first_token;
  const int32_t round = plan.tile_round[chunk.head * plan.sizes.tiles + chunk.first_tile];
  const uint32_t* const begins = row_begins + first_row_of(params, chunk, round);
  const uint32_t* const bases = plan.chunk_base + chunk.index * plan.chunk_rows;
#pragma unroll 2
  for (uint32_t entry = blockIdx.x % kScatterParts * kScatterThreads + threadIdx.x;
       entry < chunk.tokens * topk; entry += kScatterParts * kScatterThreads) {
    const uint32_t token = entry / topk, k = entry % topk;
    const uint32_t mask = plan.leftover_mask[first_unit + token];
    if (!(mask >> k & 1)) continue;
    const auto block =
        static_cast<int32_t>(load_id(params.ids, chunk.head, chunk.first_token + token, k));
    const int64_t row = chunk.row_of(params.batch, positions[token].request, block);
    const uint32_t place = begins[row] + (chunk.rows > 0 ? bases[row] : 0) +
                           plan.entry_rank[first_unit * topk + entry];
    plan.pairs[place] = {chunk.first_token + static_cast<int32_t>(token),
                         plan.first_slot[first_unit + token] + __popc(mask & ((1u << k) - 1))};
  }
}

}  // namespace msa::split_selection::sm90
