// Step 3 of prefill: how the tokens of a call are attended. The plan is made on the device from the
// selection; nothing on the host depends on it.
//
// A tile is tile_tokens consecutive tokens of one KV head, in three groups of 64 / G. A block that
// at least three quarters of a group selected is *shared*: the group attends to it query-major, in
// one running softmax. Where shared blocks make up at least half of a tile's entries the tile is
// query-major, and the rest of its entries are leftovers; otherwise all of its entries are.
// Leftovers go KV-block-major and become partial results, in consecutive slots a (head, token).
//
// Slots are bounded: tiles fill them in rounds, each of which attends, finishes its tiles, and
// leaves the slots to the next. The host launches as many rounds as the worst selection needs;
// coherent ones fit the first.
#pragma once

#include <algorithm>

#include "common/views.h"
#include "step3_remap/kv_block_schedule_params.h"

namespace msa {

constexpr int kTileGroups = 3;
constexpr int kGroupRows = 64;      // rows of a group: 64 / G tokens of G query heads
constexpr int kMaxTileTokens = 24;  // of a tile; where G is under 8, tiles are not query-major

// What a call needs, from its shapes alone.
struct PrefillSizes {
  int64_t tile_tokens, group_tokens, tiles;  // tiles of a head
  int64_t slots;                             // of a round, in memory
  int64_t round_slots;  // a tile whose first slot is past them begins the next round
  int64_t rounds;       // enough for any selection
  int64_t max_queries_per_item, max_items;
};

// `budget_bytes` bounds the partial results of a round (one tile's at least), `slot_bytes` is the
// size of one.
inline PrefillSizes prefill_sizes(int64_t num_tokens, int64_t num_kv_heads, int64_t group_size,
                                  int64_t topk, int64_t num_rows, int64_t slot_bytes,
                                  int64_t budget_bytes) {
  constexpr int64_t kItemsInFlight = 132 * 4;  // work items that keep a large GPU busy
  constexpr int64_t kMaxQueriesPerItem = 96, kMinQueriesPerItem = 16;
  PrefillSizes sizes{};
  sizes.group_tokens = kGroupRows / group_size;
  sizes.tile_tokens = group_size >= 8 ? kTileGroups * sizes.group_tokens : kMaxTileTokens;
  sizes.tiles = (num_tokens + sizes.tile_tokens - 1) / sizes.tile_tokens;
  const int64_t tile_slots = sizes.tile_tokens * topk;
  const int64_t all_slots = num_kv_heads * num_tokens * topk;
  sizes.slots = std::max(budget_bytes / slot_bytes, 4 * tile_slots);
  if (all_slots <= sizes.slots) {
    sizes.slots = all_slots;
    sizes.round_slots = all_slots + 1;  // never reached
    sizes.rounds = 1;
  } else {
    sizes.round_slots = sizes.slots - tile_slots;  // a round's last tile may reach past them
    sizes.rounds = (all_slots + sizes.round_slots - 1) / sizes.round_slots;
  }
  sizes.max_queries_per_item =
      std::clamp(all_slots / kItemsInFlight, kMinQueriesPerItem, kMaxQueriesPerItem);
  sizes.max_items = max_work_items(num_rows * sizes.rounds, all_slots, sizes.max_queries_per_item);
  return sizes;
}

struct TileBlock {
  int32_t block;
  uint32_t tokens;  // bit i: token i of the tile attends to it query-major
};

struct Pair {
  int32_t token;
  int32_t slot;
};

struct PrefillPlan {
  int64_t num_tokens;                        // T
  int64_t tile_tokens, group_tokens, tiles;  // of PrefillSizes, as what follows
  int64_t tile_capacity;                     // blocks of a tile's list
  int64_t rounds, round_slots;
  int64_t num_rows;  // of a round: Hkv * B * max_pages; row as in the remap
  int64_t max_queries_per_item, max_items;

  int32_t* tile_blocks;     // [Hkv * tiles]: shared blocks, 0 where the tile is not query-major
  int32_t* tile_round;      // [Hkv * tiles]
  TileBlock* tile_list;     // [Hkv * tiles][tile_capacity], ascending by block
  uint32_t* leftovers;      // [Hkv * T]: how many
  int32_t* first_slot;      // [Hkv * T], within the round
  uint32_t* leftover_mask;  // [Hkv * T]: bit k
  int32_t* next_slot;       // [1], cleared with the counters
  Pair* pairs;              // [Hkv * T * K], by round and row
  int32_t* work_items;      // [max_items, 3]: row, begin, end
  int32_t* round_items;     // [rounds + 1]: first work item of each round
};

}  // namespace msa
