// Step 3 of prefill: how the tokens of a call are attended. The plan is made on the device from the
// selection; nothing on the host depends on it.
//
// A tile is tile_tokens consecutive tokens of one KV head, in three groups of 64 / G. A block that
// at least three quarters of a group selected is *shared*: the group attends to it query-major, in
// one running softmax. Where shared blocks make up at least half of a tile's entries the tile is
// query-major, and the rest of its entries are leftovers; otherwise all of its entries are.
// Leftovers go KV-block-major and become partial results, in consecutive slots a (head, token).
//
// Slots are bounded: chunks of tiles fill them in rounds, each of which attends, finishes its
// tiles, and leaves the slots to the next. The host launches as many rounds as the worst selection
// needs; coherent ones fit the first.
//
// Where no request has more blocks than a token selects, going by the table's width or the caller's
// hint, tiles are of requests (`by_request`): they do not cross requests, and every one is
// query-major with whatever blocks its tokens selected, which is right for any length. Nothing is
// left over, and a token's bits do not depend on who shares its tile. So are the tiles that
// sparse_decode makes of draft tokens, without a plan in memory (decode_tile_kernel.cuh).
//
// Calls of few tokens (`short_call`) have no query-major tiles, too few to keep a GPU busy, and one
// round: their plan is one small launch.
#pragma once

#include <algorithm>

#include "common/views.h"
#include "step3_remap/kv_block_schedule_params.h"

namespace msa {

constexpr int kTileGroups = 3;
constexpr int kGroupRows = 64;      // rows of a group: 64 / G tokens of G query heads
constexpr int kMaxTileTokens = 24;  // of a tile; where G is under 8, tiles are not query-major
constexpr int kMaxChunkTiles = 16;  // tiles that one CTA splits and counts
constexpr int kMaxChunkEntries = 3072;
constexpr int kShortEntries = 8192;  // of a head, T * K
constexpr int kShortTokens = 1024;
constexpr int kShortRows = 12288;  // of a head, B * max_pages
constexpr int kShortRequests = 1024;
constexpr int kShortHeads = 8;  // CTAs of a portable cluster
// Query-major tiles of all heads from which they pay: fewer leave most of a large GPU idle, each
// walking its blocks alone. docs/kernels/sparse_prefill.md
constexpr int64_t kMinQueryTiles = 88;
constexpr int64_t kChunksWanted = 264;                // two a multiprocessor of a large GPU
constexpr int64_t kMaxRoundRows = 0xffffffff - 1024;  // rows of all rounds, which the scan numbers

// What a call needs, from its shapes alone.
struct PrefillSizes {
  bool by_request;                           // see above
  bool query_major;                          // may tiles be query-major
  bool short_call;                           // see above
  int64_t tile_tokens, group_tokens, tiles;  // tiles of a head
  int64_t tile_places;                       // of a tile's hash table, a power of two
  int64_t chunk_tiles, chunks;               // chunks of a head
  int64_t slots;                             // of a round, in memory
  int64_t round_slots;  // a chunk whose first slot is past them begins the next round
  int64_t rounds;       // enough for any selection
  int64_t max_queries_per_item, max_items;
};

// max_seqlen_k: tokens, the caller's hint, 0 where there is none; it costs speed where it is wrong.
// `budget_bytes` bounds the partial results of a round (one chunk's at least, and more where a
// table is so wide that fewer rounds can be numbered), `slot_bytes` is the size of one;
// batch_invariant: nothing may depend on which tokens are neighbours.
inline PrefillSizes prefill_sizes(int64_t num_tokens, int64_t num_kv_heads, int64_t group_size,
                                  int64_t topk, int64_t num_requests, int64_t max_pages,
                                  int64_t max_seqlen_k, int64_t slot_bytes, int64_t budget_bytes,
                                  bool batch_invariant) {
  constexpr int64_t kItemsInFlight = 132 * 4;  // work items that keep a large GPU busy
  constexpr int64_t kMaxQueriesPerItem = 96, kMinQueriesPerItem = 16;
  const int64_t num_rows = num_kv_heads * num_requests * max_pages;
  PrefillSizes sizes{};
  sizes.group_tokens = kGroupRows / group_size;
  sizes.tile_tokens = group_size >= 8 ? kTileGroups * sizes.group_tokens : kMaxTileTokens;
  sizes.tiles = (num_tokens + sizes.tile_tokens - 1) / sizes.tile_tokens;
  const bool nothing_to_select =
      max_pages <= topk || (max_seqlen_k > 0 && max_seqlen_k <= topk * kBlock);
  sizes.by_request = group_size >= 8 && !batch_invariant && nothing_to_select;
  sizes.query_major = sizes.by_request || (group_size >= 8 && !batch_invariant &&
                                           sizes.tiles * num_kv_heads >= kMinQueryTiles);
  if (sizes.by_request) {
    sizes.tiles = num_tokens / sizes.tile_tokens + std::min(num_requests, num_tokens);
    sizes.rounds = 1;
    return sizes;
  }
  const int64_t tile_entries = sizes.tile_tokens * topk;
  sizes.tile_places = 16;
  while (2 * sizes.tile_places < 3 * tile_entries) sizes.tile_places *= 2;
  sizes.chunk_tiles = std::clamp(
      sizes.tiles * num_kv_heads / kChunksWanted, int64_t{1},
      std::min(int64_t{kMaxChunkTiles}, std::max(int64_t{1}, kMaxChunkEntries / tile_entries)));
  sizes.chunks = (sizes.tiles + sizes.chunk_tiles - 1) / sizes.chunk_tiles;

  const int64_t chunk_slots = sizes.chunk_tiles * tile_entries;
  const int64_t all_slots = num_kv_heads * num_tokens * topk;
  const int64_t budget_slots = std::max(budget_bytes / slot_bytes, 4 * chunk_slots);
  if (all_slots <= budget_slots) {
    sizes.slots = all_slots;
    sizes.round_slots = all_slots + 1;  // never reached
    sizes.rounds = 1;
  } else {  // rounds of one size: a small last one would cost its launches for little
    sizes.rounds = (all_slots - 1) / (budget_slots - chunk_slots) + 1;
    sizes.rounds =
        std::clamp(kMaxRoundRows / std::max(num_rows, int64_t{1}), int64_t{1}, sizes.rounds);
    sizes.round_slots = (all_slots - 1) / sizes.rounds + 1;
    sizes.slots = sizes.round_slots + chunk_slots;  // a round's last chunk may reach past
  }
  sizes.short_call = !sizes.query_major && sizes.rounds == 1 && num_tokens <= kShortTokens &&
                     num_tokens * topk <= kShortEntries && num_kv_heads <= kShortHeads &&
                     num_requests <= kShortRequests && num_rows / num_kv_heads <= kShortRows;
  sizes.max_queries_per_item =
      std::clamp(all_slots / kItemsInFlight, kMinQueriesPerItem, kMaxQueriesPerItem);
  sizes.max_items = max_work_items(num_rows * sizes.rounds, all_slots, sizes.max_queries_per_item);
  return sizes;
}

struct alignas(8) TileBlock {
  int32_t block;
  uint32_t tokens;  // bit i: token i of the tile attends to it query-major; and kPartlyShared
};

// Of TileBlock::tokens: in some group that shares the block, not all tokens do. Their weights are 0
// in the group's product, and 0 * NaN is NaN: V must be clean of it.
constexpr uint32_t kPartlyShared = 1u << 31;
static_assert(kMaxTileTokens < 31, "a bit each beside the mark");

// `tokens`, with the mark where it is due; the tile has `tile_tokens` tokens.
constexpr uint32_t marked_if_partly(uint32_t tokens, int tile_tokens, int group_tokens) {
  const uint32_t all = (1u << tile_tokens) - 1;
  for (int group = 0; group < kTileGroups; ++group) {
    const uint32_t mask = ((1u << group_tokens) - 1) << group * group_tokens;
    const uint32_t members = tokens & mask;
    if (members != 0 && members != (all & mask)) return tokens | kPartlyShared;
  }
  return tokens;
}

// A tile of a request.
struct alignas(32) RequestTile {
  int32_t blocks;  // of its list; 0: there is nothing to attend to, or no such tile
  int32_t first_token, tokens;
  int32_t request, pos;  // of the first token
  int32_t seq_len;       // of the request
};

struct Pair {
  int32_t token;
  int32_t slot;
};

// A block and KV head, and the pairs that a CTA attends to it: all that copying and masking need,
// so that nothing is looked up between an item and its copies. Two 16-byte loads.
struct alignas(16) WorkItem {
  int32_t page, head, begin, end;  // pairs [begin, end)
  int32_t first_valid;  // keys of the block that token 0 of the call would see: token t sees t more
  int32_t written;      // tokens of the request from the block's first on
  int32_t masked;       // some of the request's new tokens do not see all of the block
  int32_t by_head;        // short calls: no item of an earlier head comes after it
};

struct PrefillPlan {
  PrefillSizes sizes;
  int64_t num_tokens;     // T
  int64_t tile_capacity;  // blocks of a tile's list
  int64_t num_rows;       // of a round: Hkv * B * max_pages; row as in the remap
  int64_t chunk_rows;     // places of a chunk in chunk_base

  int32_t* tile_blocks;        // [Hkv * tiles]: shared blocks, 0 where the tile is not query-major
  int32_t* tile_round;         // [Hkv * tiles]
  TileBlock* tile_list;        // [Hkv * tiles][tile_capacity], ascending by block
  RequestTile* request_tiles;  // [Hkv * tiles]: by_request only, which needs this and tile_list
  uint32_t* leftovers;         // [Hkv * T]: how many
  int32_t* first_slot;         // [Hkv * T], within the round; not of a short call: K each
  uint32_t* leftover_mask;     // [Hkv * T]: bit k
  uint32_t* entry_rank;        // [Hkv * T * K]: of a leftover among its chunk's in the same row
  uint32_t* chunk_base;        // [Hkv * chunks][chunk_rows]: the row's pairs of other chunks before
  int32_t* next_slot;          // [1], cleared with the counters
  Pair* pairs;                 // [Hkv * T * K], by round and row
  WorkItem* work_items;        // [max_items]
  int32_t* round_items;        // [rounds + 1]: first work item of each round
  int32_t* item_tickets;       // [rounds]: items that CTAs have drawn beyond their first
  uint32_t* ended_heads;       // [Hkv], short calls: CTAs that have attended to all of a head
  int32_t* merge_tickets;      // [1], short calls: units of the merge that CTAs have drawn
};

}  // namespace msa
