// How a row of pairs is cut into work items: as few as the limit allows, as even as possible.
#pragma once

#include <cstdint>

namespace msa {

// Items of a row of num_pairs pairs.
constexpr int64_t row_items(int64_t num_pairs, int64_t max_queries_per_item) {
  return (num_pairs + max_queries_per_item - 1) / max_queries_per_item;
}

// Where item `item` of `num_items` begins among the row's pairs; it ends where the next one begins.
// The first items take the remainder: 65 pairs in 2 items are 33 and 32.
constexpr int64_t item_begin(int64_t num_pairs, int64_t num_items, int64_t item) {
  const int64_t share = num_pairs / num_items, rest = num_pairs % num_items;
  return item * share + (item < rest ? item : rest);
}

}  // namespace msa
