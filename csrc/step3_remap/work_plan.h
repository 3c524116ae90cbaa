// How a row of pairs is cut into work items: as few as the limit allows, as even as possible.
#pragma once

#include <cstdint>

namespace msa {

// Items of a row of num_pairs pairs. 32 bits: 64-bit divisions cost a GPU a hundred instructions.
constexpr uint32_t row_items(uint32_t num_pairs, uint32_t max_queries_per_item) {
  return num_pairs / max_queries_per_item + (num_pairs % max_queries_per_item != 0);
}

// Where item `item` of `num_items` begins among the row's pairs; it ends where the next one begins.
// The first items take the remainder: 65 pairs in 2 items are 33 and 32.
constexpr uint32_t item_begin(uint32_t num_pairs, uint32_t num_items, uint32_t item) {
  const uint32_t share = num_pairs / num_items, rest = num_pairs % num_items;
  return item * share + (item < rest ? item : rest);
}

}  // namespace msa
