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

#include "common/views.h"

namespace msa {

constexpr int kTileGroups = 3;

struct TileBlock {
  int32_t block;
  uint32_t tokens;  // bit i: token i of the tile attends to it query-major
};

struct Pair {
  int32_t token;
  int32_t slot;
};

struct PrefillPlan {
  int64_t num_tokens;                 // T
  int64_t tile_tokens, group_tokens;  // group_tokens = 64 / G
  int64_t tiles;                      // of a head
  int64_t tile_capacity;              // blocks of a tile's list
  int64_t rounds;
  int64_t round_slots;  // a tile whose first slot is past them begins the next round
  int64_t num_rows;     // of a round: Hkv * B * max_pages; row as in the remap
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
