// Which tokens belong to which request, where they stand, and what they see.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/views.h"

namespace msa {

// Consecutive tokens [begin, end) of one request; token t stands at t + pos_offset.
struct TokenTile {
  int64_t request;  // -1: padding, nothing of it may be read
  int64_t begin, end;
  int64_t pos_offset;

  bool padding() const { return request < 0; }
  int64_t size() const { return end - begin; }
  int64_t position(int64_t token) const { return token + pos_offset; }
};

inline void append_tiles(std::vector<TokenTile>& tiles, const TokenTile& whole,
                         int64_t max_tokens) {
  for (int64_t begin = whole.begin; begin < whole.end; begin += max_tokens) {
    const int64_t end = std::min(begin + max_tokens, whole.end);
    tiles.push_back({whole.request, begin, end, whole.pos_offset});
  }
}

// Covers every token in [0, T) once, in tiles of at most max_tokens, padding included. Offsets in
// cu_seqlens_q that run backwards or past T are bounded, so that no token lies in two tiles.
inline std::vector<TokenTile> token_tiles(const BatchView& batch, int64_t max_tokens) {
  std::vector<TokenTile> tiles;
  int64_t covered = 0;
  for (int64_t request = 0; request < batch.num_requests; ++request) {
    const int64_t first = batch.cu_seqlens_q[request * batch.cu_seqlens_stride];
    const int64_t last = batch.cu_seqlens_q[(request + 1) * batch.cu_seqlens_stride];
    const int64_t begin = std::min(std::max(first, covered), batch.num_tokens);
    const int64_t end = std::min(std::max(last, begin), batch.num_tokens);
    append_tiles(tiles, {-1, covered, begin, 0}, max_tokens);
    const int64_t length = batch.seq_lens[request * batch.seq_lens_stride];
    append_tiles(tiles, {request, begin, end, length - last}, max_tokens);
    covered = end;
  }
  append_tiles(tiles, {-1, covered, batch.num_tokens, 0}, max_tokens);
  return tiles;
}

// Tokens of a tile: up to max_rows rows of rows_per_token each, fewer where the tokens would
// otherwise make too few tiles to share between threads. Never changes a result.
inline int64_t tile_tokens(int64_t max_rows, int64_t rows_per_token, int64_t num_tokens,
                           int64_t units_per_tile) {
  constexpr int64_t kEnoughUnits = 16, kFewRows = 16;
  int64_t tokens = std::max<int64_t>(1, max_rows / rows_per_token);
  while (tokens > 1 && tokens * rows_per_token > kFewRows &&
         (num_tokens + tokens - 1) / tokens * units_per_tile < kEnoughUnits) {
    tokens /= 2;
  }
  return tokens;
}

inline int64_t visible_blocks(int64_t position, int64_t max_blocks) {
  return position < 0 ? 0 : std::min(position / kBlock + 1, max_blocks);
}

// Tokens of a visible block that the token at `position` sees.
inline int64_t visible_tokens(int64_t position, int64_t block) {
  return std::min<int64_t>(kBlock, position - block * kBlock + 1);
}

// The page of a block below the request's length, or -1 where the table names none of the cache.
inline int64_t page_of(const BatchView& batch, int64_t request, int64_t block, int64_t num_pages) {
  const int64_t page =
      batch.block_table[request * batch.table_row_stride + block * batch.table_col_stride];
  return page >= 0 && page < num_pages ? page : -1;
}

}  // namespace msa
