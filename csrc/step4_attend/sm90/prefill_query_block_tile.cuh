// Sizes, shared memory and tiles of the query-major prefill kernel.
#pragma once

#include "step4_attend/sm90/query_tile.cuh"

namespace msa::sparse_prefill::sm90 {

constexpr int kTileConsumerRegisters = 160;
constexpr int kTileProducerRegisters = 32;
static_assert(kTileGroups == kConsumers, "a group of the plan is a consumer's rows");
static_assert((kConsumers * kTileConsumerRegisters + kTileProducerRegisters) * 128 <= 65536,
              "setmaxnreg hands out what the CTA holds at launch");

// FP8: pages arrive beside the blocks that they become, and q has one stage, a part a consumer.
constexpr int kConverters = 3;
struct PageInfo {
  BlockInfo block;
  int32_t written;  // tokens of the request from the block's first on
};
constexpr int32_t kNoMorePages = -1;  // in place of `written`
struct Fp8TileStorage {
  static constexpr DType kCache = DType::kFloat8E4M3;
  static constexpr int kKVStages = sm90::kKVStages, kQStages = 1;
  static constexpr int kQBytes = kConsumers * kQTileBytes;
  alignas(1024) uint8_t k[kKVStages][kPageBytes];
  alignas(1024) uint8_t v[kKVStages][kPageBytes];
  alignas(1024) uint8_t q[1][kQBytes];
  alignas(1024) uint8_t pages[kConverters][kFp8PageBytes];
  PageInfo infos[kConverters];      // of `pages`
  BlockInfo blocks[2 * kKVStages];  // of a block and, as its V is still read, of the one before
  alignas(16) uint32_t wild[kKVStages][kBlock / 32];
  uint64_t k_full[kKVStages], k_empty[kKVStages];
  uint64_t v_full[kKVStages], v_empty[kKVStages];
  uint64_t q_full[kConsumers], q_empty[kConsumers];
  uint64_t page_full[kConverters], page_empty[kConverters];

  // By one thread, before the CTA's first __syncthreads.
  __device__ __forceinline__ void init_barriers() {
    for (int stage = 0; stage < kKVStages; ++stage) {
      barrier_init(&k_full[stage], 1);
      barrier_init(&v_full[stage], 1);
      barrier_init(&k_empty[stage], kKVEmptyArrivals);
      barrier_init(&v_empty[stage], kKVEmptyArrivals);
    }
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      barrier_init(&q_full[consumer], 1);
      barrier_init(&q_empty[consumer], 4);
    }
    for (int converter = 0; converter < kConverters; ++converter) {
      barrier_init(&page_full[converter], 1);
      barrier_init(&page_empty[converter], 1);
    }
    fence_barrier_init();
  }
};

template <DType kCache>
using PrefillTileStorage =
    std::conditional_t<kIsFp8<kCache>, Fp8TileStorage, TileStorage<kKVStages, 2, kConsumers>>;
template <DType kCache>
constexpr int kTileSharedBytes = sizeof(PrefillTileStorage<kCache>);
static_assert(kTileSharedBytes<DType::kBFloat16> <= 227 * 1024, "shared memory of one CTA");
static_assert(kTileSharedBytes<DType::kFloat8E4M3> <= 227 * 1024, "shared memory of one CTA");

__device__ __forceinline__ Tile load_tile(const FinishParams& params, int32_t index) {
  const PrefillPlan& plan = params.plan;
  const auto tiles = static_cast<uint32_t>(plan.sizes.tiles);
  const auto tile_tokens = static_cast<int32_t>(plan.sizes.tile_tokens);
  const auto head = static_cast<int32_t>(index / tiles);
  if (plan.sizes.by_request) {
    const RequestTile& tile = plan.request_tiles[index];
    return {tile.blocks, head, tile.first_token, tile.tokens};
  }
  const int32_t first_token = index % tiles * tile_tokens;
  return {plan.tile_blocks[index], head, first_token,
          min(tile_tokens, static_cast<int32_t>(plan.num_tokens) - first_token)};
}

__device__ __forceinline__ TilePosition locate_tile(const FinishParams& params, int32_t index,
                                                    const Tile& tile) {
  if (params.plan.sizes.by_request) {
    const RequestTile& place = params.plan.request_tiles[index];
    return {place.request, place.pos, place.seq_len};
  }
  const TokenPosition first = find_position(params.batch, tile.first_token);
  return {first.request, first.pos, seq_len_of(params.batch, first.request)};
}

__device__ __forceinline__ const TileBlock* list_of(const FinishParams& params, int32_t index) {
  return params.plan.tile_list + index * params.plan.tile_capacity;
}

// Calls visit(tile index) for the tiles that this CTA attends to in this round. Of tiles of
// requests the last ones of all heads come first: in a prefill they see most blocks, and what is
// dealt last should be small.
template <typename Visit>
__device__ __forceinline__ void for_query_tiles(const FinishParams& params, const Visit& visit) {
  const PrefillPlan& plan = params.plan;
  const auto tiles = static_cast<uint32_t>(plan.sizes.tiles);
  const auto heads = static_cast<uint32_t>(params.num_kv_heads);
  const auto tile_of = [&](uint32_t unit) {
    return plan.sizes.by_request ? unit % heads * tiles + (tiles - 1 - unit / heads) : unit;
  };
  for_units(
      blockIdx.x,
      static_cast<int32_t>(heads * tiles),
      [&](uint32_t unit) {
        const uint32_t tile = tile_of(unit);
        if (plan.sizes.by_request) return plan.request_tiles[tile].blocks != 0;
        return in_round(params, tile) && plan.tile_blocks[tile] != 0;
      },
      [&](uint32_t unit) { visit(static_cast<int32_t>(tile_of(unit))); });
}

}  // namespace msa::sparse_prefill::sm90
