// The query rows of one warp within a tile, and where their scores go.
#pragma once

#include "step1_score/score_run.h"
#include "step1_score/sm80/score_cursor.cuh"
#include "step1_score/sm80/score_page.cuh"

namespace msa::index_score::sm80 {

// An entry of the table, -1 where it names no page of the cache.
__device__ __forceinline__ int32_t page_or_none(const ScoreWork& work, int32_t page) {
  return page >= 0 && page < work.index_k_cache.num_pages ? page : -1;
}

// The page of a request's block.
__device__ __forceinline__ int32_t find_page(const ScoreWork& work, const ScoreCursor& cursor) {
  return page_or_none(work, page_of(work.batch, cursor.request, cursor.block));
}

template <DType dtype>
__device__ __forceinline__ const uint8_t* page_address(const ScoreWork& work, int32_t page) {
  return static_cast<const uint8_t*>(work.index_k_cache.data) +
         page * work.index_k_cache.page_stride * (IndexElement<dtype>::kRowBytes / kHeadDim);
}

// r / num_heads of a row of a tile, r < 256: the reciprocal's error is too small to show.
__device__ __forceinline__ uint32_t token_of_row(const ScoreWork& work, uint32_t row) {
  return row * work.inverse_heads >> 16;
}

// The first block of a token at `pos` that is not scored.
__device__ __forceinline__ int32_t end_of_token(const ScoreCut& cut, int32_t pos) {
  return pos / kBlock + cut.own;
}

// The first block that none of `count` rows of a tile wants, from `first_row` on; the tile's first
// token is at `first_pos`, and it has `rows` rows.
__device__ __forceinline__ int32_t end_of_rows(const ScoreWork& work, int32_t first_pos,
                                               int32_t rows, int32_t first_row, int32_t count) {
  const int32_t last_row = min(first_row + count, rows) - 1;
  if (last_row < first_row) return 0;
  return end_of_token(work.cut, first_pos + static_cast<int32_t>(token_of_row(work, last_row)));
}

// Rows [first_row, first_row + kRows) of a tile; row r is token r / heads, head r % heads.
template <DType dtype, int kRows>
struct WarpRows {
  using Maxima = RowMaxima<dtype, kRows>;
  static constexpr int kKept = Maxima::kKept;

  QueryRows<dtype, kRows> queries;
  float* targets[kKept];         // block 0 of the rows that this lane stores
  int32_t ends[kKept];           // it stores the blocks before these
  int32_t first_row, first_pos;  // of the warp, and of the tile
  int32_t masked_from;           // the first block that not all rows see fully
  int32_t end;                   // the first block that no row wants

  __device__ __forceinline__ void enter(const ScoreWork& work, const ScoreCursor& cursor,
                                        int32_t first_row_of_warp) {
    const ScoreCut& cut = work.cut;
    const int32_t tile_token = cursor.tile << cut.log_tile;
    const int64_t first_token = cursor.tokens.first_token + tile_token;
    first_row = first_row_of_warp;
    first_pos = cursor.tokens.first_pos + tile_token;
    const int32_t rows = cursor.tokens.tile_tokens(cut, cursor.tile) * work.num_heads;
    const auto row_address = [&](int n) -> const uint8_t* {
      const int32_t row = first_row + n;
      if (row >= rows) return nullptr;
      const int32_t token = token_of_row(work, row), head = row - token * work.num_heads;
      return static_cast<const uint8_t*>(work.index_q.data) +
             ((first_token + token) * work.index_q.token_stride +
              (work.first_head + head) * work.index_q.head_stride) *
                 (IndexElement<dtype>::kRowBytes / kHeadDim);
    };
    queries.load(row_address, work.inverse_heads >> 31);
    int kept[kKept];
    Maxima::kept_rows(kept);
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int32_t row = first_row + max(kept[i], 0);
      const int32_t token = token_of_row(work, row), head = row - token * work.num_heads;
      targets[i] = work.scores.data +
                   (first_token - work.first_token + token) * work.scores.token_stride +
                   (work.first_head + head) * work.scores.head_stride;
      ends[i] = kept[i] >= 0 && row < rows ? end_of_token(cut, first_pos + token) : 0;
    }
    masked_from =
        (first_pos + static_cast<int32_t>(token_of_row(work, first_row)) + 1) >> kLogBlock;
    end = end_of_rows(work, first_pos, rows, first_row, kRows);
  }

  // Without own blocks every score that is kept is of a block that its token sees fully.
  __device__ __forceinline__ bool masked(const ScoreWork& work, int32_t block) const {
    return work.cut.own && block >= masked_from;
  }

  __device__ __forceinline__ int32_t last_key(const ScoreWork& work, int32_t block, int n) const {
    return first_pos + static_cast<int32_t>(token_of_row(work, first_row + n)) - block * kBlock;
  }

  __device__ __forceinline__ void store(const ScoreWork& work, int32_t block,
                                        const Maxima& best) const {
    float kept[kKept];
    best.reduce(kept);
    store(work, block, kept);
  }

  __device__ __forceinline__ void store(const ScoreWork& work, int32_t block,
                                        const float (&kept)[kKept]) const {
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (block < ends[i]) targets[i][block * work.scores.block_stride] = kept[i];
    }
  }
};

}  // namespace msa::index_score::sm80
