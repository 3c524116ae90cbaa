// Sizes, shared memory and tiles of the query-major prefill kernel.
#pragma once

#include "step4_attend/sm90/prefill_kv_block_kernel.cuh"
#include "step4_attend/sm90/prefill_merge_kernel.cuh"

namespace msa::sparse_prefill::sm90 {

constexpr int kTileConsumerRegisters = 160;
constexpr int kTileProducerRegisters = 32;
template <DType kCache>
constexpr int kTileQStages = kIsFp8<kCache> ? 1 : 2;
constexpr int kTileQBytes = kTileGroups * kQTileBytes;
static_assert(kTileGroups == kConsumers, "a group of the plan is a consumer's rows");
static_assert((kConsumers * kTileConsumerRegisters + kTileProducerRegisters) * 128 <= 65536,
              "setmaxnreg hands out what the CTA holds at launch");

template <DType kCache>
struct TileSharedStorage {
  static constexpr int kQStages = kTileQStages<kCache>;
  alignas(1024) uint8_t k[kKVStages][kPageBytes];
  alignas(1024) uint8_t v[kKVStages][kPageBytes];
  alignas(1024) uint8_t q[kQStages][kTileQBytes];
  uint32_t wild[kKVStages][kBlock / 32];  // rows of V with NaN or Inf, of masked blocks
  uint64_t k_full[kKVStages], k_empty[kKVStages];
  uint64_t v_full[kKVStages], v_empty[kKVStages];
  uint64_t q_full[kQStages], q_empty[kQStages];
};
// FP8: pages arrive beside the blocks that they become, and q has one stage, a part a consumer.
constexpr int kConverters = 3;
// What the consumers need to know of a block; it comes with K.
struct alignas(16) BlockInfo {
  int32_t first_valid;  // keys that the tile's first token may see, or more than there are
  uint32_t tokens;      // of TileBlock
  int32_t page;
  float scale_log2;
};
struct PageInfo {
  BlockInfo block;
  int32_t written;  // tokens of the request from the block's first on
};
constexpr int32_t kNoMorePages = -1;  // in place of `written`
template <>
struct TileSharedStorage<DType::kFloat8E4M3> {
  alignas(1024) uint8_t k[kKVStages][kPageBytes];
  alignas(1024) uint8_t v[kKVStages][kPageBytes];
  alignas(1024) uint8_t q[1][kTileQBytes];
  alignas(1024) uint8_t pages[kConverters][kFp8PageBytes];
  PageInfo infos[kConverters];      // of `pages`
  BlockInfo blocks[2 * kKVStages];  // of a block and, as its V is still read, of the one before
  uint32_t wild[kKVStages][kBlock / 32];
  uint64_t k_full[kKVStages], k_empty[kKVStages];
  uint64_t v_full[kKVStages], v_empty[kKVStages];
  uint64_t q_full[kConsumers], q_empty[kConsumers];
  uint64_t page_full[kConverters], page_empty[kConverters];
};
template <DType kCache>
constexpr int kTileSharedBytes = sizeof(TileSharedStorage<kCache>);
static_assert(kTileSharedBytes<DType::kBFloat16> <= 227 * 1024, "shared memory of one CTA");
static_assert(kTileSharedBytes<DType::kFloat8E4M3> <= 227 * 1024, "shared memory of one CTA");

struct Tile {
  int32_t blocks;
  int32_t head, first_token, tokens;
};

__device__ __forceinline__ Tile load_tile(const FinishParams& params, int32_t index) {
  const PrefillPlan& plan = params.plan;
  const auto tiles = static_cast<uint32_t>(plan.sizes.tiles);
  const auto tile_tokens = static_cast<int32_t>(plan.sizes.tile_tokens);
  Tile tile;
  tile.blocks = plan.tile_blocks[index];
  tile.head = index / tiles;
  if (plan.sizes.narrow) {
    const TilePlace place = plan.tile_place[index];
    tile.first_token = place.first_token;
    tile.tokens = place.tokens;
  } else {
    tile.first_token = index % tiles * tile_tokens;
    tile.tokens = min(tile_tokens, static_cast<int32_t>(plan.num_tokens) - tile.first_token);
  }
  return tile;
}

// Calls visit(tile index) for the tiles that this CTA attends to in this round. Of a narrow call
// the last tiles of all heads come first: they see most blocks, and what is dealt last should be
// small.
template <typename Visit>
__device__ __forceinline__ void for_query_tiles(const FinishParams& params, const Visit& visit) {
  const auto tiles = static_cast<uint32_t>(params.plan.sizes.tiles);
  const auto heads = static_cast<uint32_t>(params.num_kv_heads);
  const auto tile_of = [&](uint32_t unit) {
    return params.plan.sizes.narrow ? unit % heads * tiles + (tiles - 1 - unit / heads) : unit;
  };
  for_units(
      static_cast<int32_t>(heads * tiles),
      [&](uint32_t unit) {
        const uint32_t tile = tile_of(unit);
        return in_round(params, tile) && params.plan.tile_blocks[tile] != 0;
      },
      [&](uint32_t unit) { visit(static_cast<int32_t>(tile_of(unit))); });
}

}  // namespace msa::sparse_prefill::sm90
