// Scores of one block for consecutive tokens of one request: what index_score and select_blocks
// share, so that both see the same bits.
#pragma once

#include <algorithm>
#include <limits>

#include "cpu/element.h"
#include "cpu/simd.h"
#include "cpu/token_tiles.h"

namespace msa {

constexpr int kScoreRows = 128;  // (token, head) rows of a unit of work: 64 KiB of queries

// The rows of a unit of work: all tokens of a tile, heads [first_head, first_head + num_heads).
struct ScoreRows {
  TokenTile tile;
  int64_t first_head;
  int64_t num_heads;
};

// How [Hi, T] is cut into units: a tile of tokens x a group of heads.
struct ScoreGrid {
  std::vector<TokenTile> tiles;
  int64_t num_heads, heads_per_group, num_groups;

  ScoreGrid(const BatchView& batch, int64_t heads)
      : num_heads(heads),
        heads_per_group(std::min<int64_t>(heads, kScoreRows)),
        num_groups((heads + heads_per_group - 1) / heads_per_group) {
    tiles =
        token_tiles(batch, tile_tokens(kScoreRows, heads_per_group, batch.num_tokens, num_groups));
  }

  int64_t num_units() const { return static_cast<int64_t>(tiles.size()) * num_groups; }
  ScoreRows unit(int64_t index) const {
    const int64_t first = index % num_groups * heads_per_group;
    return {tiles[index / num_groups], first, std::min(heads_per_group, num_heads - first)};
  }
};

struct ScoreScratch {
  alignas(64) float queries[kScoreRows * kRowFloats];  // row (t - tile.begin) * num_heads + head
  alignas(64) float keys[kPageFloats];
  alignas(64) float logits[kRowBatch * kBlock];
};

inline void load_queries(const RowsView& index_q, const ScoreRows& rows, ScoreScratch& scratch) {
  for (int64_t token = rows.tile.begin; token < rows.tile.end; ++token) {
    simd().convert_rows(row_at(index_q, token, rows.first_head), index_q.dtype, index_q.head_stride,
                        static_cast<int>(rows.num_heads),
                        scratch.queries + (token - rows.tile.begin) * rows.num_heads * kRowFloats);
  }
}

// Calls emit(token, head, score) for the tokens [first_token, tile.end), all of which see `block`:
// the largest product of the query with a key of the block at or before the token's position, NaN
// where one is NaN; -inf where the table names no page of the cache.
template <typename Emit>
void score_block(const ScoreRows& rows, int64_t first_token, int64_t block, const BatchView& batch,
                 const PagedView& cache, ScoreScratch& scratch, const Emit& emit) {
  const TokenTile& tile = rows.tile;
  const int64_t page = page_of(batch, tile.request, block, cache.num_pages);
  if (page < 0) {
    for (int64_t token = first_token; token < tile.end; ++token) {
      for (int64_t head = 0; head < rows.num_heads; ++head) {
        emit(token, rows.first_head + head, -std::numeric_limits<float>::infinity());
      }
    }
    return;
  }
  const SimdKernels& kernels = simd();
  const int keys = static_cast<int>(visible_tokens(tile.position(tile.end - 1), block));
  kernels.pack_keys(page_at(cache, page, 0), cache.dtype, cache.token_stride, keys, scratch.keys);
  const int64_t first_row = (first_token - tile.begin) * rows.num_heads;
  const int64_t end_row = tile.size() * rows.num_heads;
  for (int64_t batch_row = first_row; batch_row < end_row; batch_row += kRowBatch) {
    const int count = static_cast<int>(std::min<int64_t>(kRowBatch, end_row - batch_row));
    const int padded = (count + kRowGroup - 1) / kRowGroup * kRowGroup;
    const float* queries[kRowBatch];
    for (int i = 0; i < padded; ++i) {
      queries[i] = scratch.queries + (batch_row + std::min(i, count - 1)) * kRowFloats;
    }
    kernels.dot_rows(queries, padded, scratch.keys, keys, scratch.logits);
    for (int i = 0; i < count; ++i) {
      const int64_t token = tile.begin + (batch_row + i) / rows.num_heads;
      const int64_t head = rows.first_head + (batch_row + i) % rows.num_heads;
      const int limit = static_cast<int>(visible_tokens(tile.position(token), block));
      emit(token, head, kernels.max_logit(scratch.logits + i * kBlock, limit));
    }
  }
}

}  // namespace msa
