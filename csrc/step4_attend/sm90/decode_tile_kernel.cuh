// Step 4, sparse_decode on Hopper, draft tokens: a tile of tokens of one request and KV head walks
// the union of their blocks, each block brought to shared memory once for all of them, and
// multiplied by wgmma for each group of them that selected it.
//
//   of each token, over its own blocks: the running softmax of query_tile.cuh
//
// clang-format off
// Grid      a CTA a unit (tile, KV head), one an SM. A tile is some of a request's tokens, in one
//           group or two: 64 / G tokens each at most, and few enough for `list`. The grid has room
//           for any lengths: its last CTAs may find no tile.
// Steps     1 which tokens, the union of their blocks (request_tile.cuh), by all threads
//           2 the walk, by roles
// Roles     role                         warps
//           a consumer a group           0-7, or 0-3   the group's tokens
//           K, V, q producer, cleaner    the next 4
//           168 registers each or more: nobody needs to give any away.
// Shared    k     3 stages                            98,304
//           v     3 stages                            98,304
//           q     1 stage, a part a consumer          32,768, or 16,384
//           list  blocks of the union, with the tokens 2,048, or 1,024
//           union what step 1 needs, in the place of k
// Barriers  those of query_tile.cuh, for one tile; __syncthreads around the parts of step 1.
// Timeline  launch | requests, ids, pages: three loads that wait for each other | union | K, V of
//           three blocks are asked for | the walk, bound by memory: 19 bytes a clock of an SM are
//           3,450 clocks a block; a consumer takes 3,100 to 4,000 for one of its own
// Bits      a token's own blocks in ascending order: the same beside any others, in any tile.
// Also writes the result of tokens that attend to nothing, and of padding.
// Limits    those of query_tile.cuh; bfloat16 caches.
// clang-format on
#pragma once

#include "device/dependent_launch.cuh"
#include "step3_remap/sm90/request_tile.cuh"
#include "step4_attend/decode_plan.h"
#include "step4_attend/sm90/query_tile.cuh"

namespace msa::decode::sm90 {

namespace tiles = sparse_prefill::sm90;
namespace requests = split_selection::sm90;

struct DraftParams : tiles::TileParams {
  IdsView ids;
  int64_t num_pages;
  int32_t tile_tokens;
};

template <int kGroupCount>
struct DraftStorage {
  static constexpr int kGroups = kGroupCount;
  static constexpr int kThreads = (kGroups + 1) * 128, kWarps = kThreads / 32;
  static constexpr int kEntries = kGroups * kGroupEntries;
  using Tile = tiles::TileStorage<3, 1, kGroups>;
  using Union = requests::UnionState<kThreads>;
  Tile tile;
  TileBlock list[kEntries];

  __device__ __forceinline__ Union& in_place_of_k() { return *reinterpret_cast<Union*>(tile.k); }
};
static_assert(sizeof(DraftStorage<kMaxDraftGroups>) <= 227 * 1024, "shared memory of one CTA");
static_assert(sizeof(DraftStorage<kMaxDraftGroups>::Union) <= 3 * tiles::kPageBytes,
              "no copy is under way");

// Step 2, for a tile with blocks.
template <int kGroups>
__device__ __forceinline__ void walk_tile(const DraftParams& params, const CUtensorMap* q_map,
                                          const CUtensorMap* k_map, const CUtensorMap* v_map,
                                          DraftStorage<kGroups>& shared, const tiles::Tile& tile,
                                          const tiles::TilePosition& position, int group_tokens) {
  using Storage = typename DraftStorage<kGroups>::Tile;
  Storage& storage = shared.tile;
  // A warp's index through a shuffle, so that the compiler knows it is the same in all its lanes.
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0);
  tiles::RingPosition<Storage::kKVStages> kv;
  tiles::RingPosition<Storage::kQStages> q;
  if (warp < kGroups * 4) {
    tiles::attend_tile(params, storage, tile, position, shared.list, warp / 4, group_tokens, kv, q,
                       [](const auto&...) {});
  } else if (warp == kGroups * 4) {
    tiles::produce_blocks(params.batch, k_map, tile, position, shared.list, storage.k,
                          storage.k_full, storage.k_empty, nullptr, kv);
  } else if (warp == kGroups * 4 + 1) {
    tiles::produce_blocks(params.batch, v_map, tile, position, shared.list, storage.v,
                          storage.v_full, storage.v_empty, storage.written, kv);
  } else if (warp == kGroups * 4 + 2) {
    tiles::produce_tile_q(q_map, storage, tile, params.log_group, group_tokens, q);
  } else {
    for (int32_t i = 0; i < tile.blocks; ++i) tiles::clean_next_block(storage, kv);
  }
}

template <int kGroups>
__global__ void __launch_bounds__(DraftStorage<kGroups>::kThreads, 1)
    msa_decode_tile_sm90_kernel(const __grid_constant__ DraftParams params,
                                const __grid_constant__ CUtensorMap q_map,
                                const __grid_constant__ CUtensorMap k_map,
                                const __grid_constant__ CUtensorMap v_map) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  using Storage = DraftStorage<kGroups>;
  auto& shared = *reinterpret_cast<Storage*>(shared_memory);
  const BatchView& batch = params.batch;
  const int warp = threadIdx.x / 32, group = 1 << params.log_group;
  typename Storage::Union& state = shared.in_place_of_k();
  state.clear();
  if (threadIdx.x == Storage::kThreads - 32) {  // its warp has no entry to load
    static_assert(Storage::kEntries <= Storage::kThreads - 32, "a thread has one entry");
    shared.tile.init_barriers();
    tiles::prefetch_tensor_map(&q_map);
    tiles::prefetch_tensor_map(&k_map);
    tiles::prefetch_tensor_map(&v_map);
  }
  wait_for_previous_kernel();

  const auto heads = static_cast<uint32_t>(params.num_kv_heads);
  const auto head = static_cast<int32_t>(blockIdx.x % heads);
  const RequestTile place = requests::find_tile(batch, blockIdx.x / heads, params.tile_tokens);
  if (place.tokens > 0) {
    const int group_tokens = (place.tokens + kGroups - 1) / kGroups;
    requests::load_entries(params.ids, batch, params.num_pages, place, head, state);
    __syncthreads();
    const int32_t blocks = requests::list_union(
        place, group_tokens, place.tokens * static_cast<int32_t>(params.ids.topk),
        visible_blocks(batch, place.pos + place.tokens - 1), state, shared.list);
    tiles::fence_async_proxy();
    __syncthreads();
    if (blocks > 0) {
      walk_tile(params, &q_map, &k_map, &v_map, shared,
                {blocks, head, place.first_token, place.tokens},
                {place.request, place.pos, place.seq_len}, group_tokens);
    } else {
      for (int32_t token = warp; token < place.tokens; token += Storage::kWarps) {
        requests::write_nothing(params.out, params.lse, group, head, place.first_token + token);
      }
    }
  }
  start_next_kernel();

  const int32_t real_tokens = requests::count_real_tokens(batch);
  const uint32_t padding = static_cast<uint32_t>(batch.num_tokens) - real_tokens;
#pragma unroll 1
  for (uint32_t unit = blockIdx.x * Storage::kWarps + warp; unit < heads * padding;
       unit += gridDim.x * Storage::kWarps) {
    requests::write_nothing(params.out, params.lse, group, unit % heads,
                            real_tokens + static_cast<int32_t>(unit / heads));
  }
}

}  // namespace msa::decode::sm90
