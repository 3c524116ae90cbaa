// The scoring launch that index_score and select_blocks share on CUDA.
#pragma once

#include "common/views.h"
#include "host/exec_context.h"
#include "step1_score/score_plan.h"

namespace msa::index_score {

// Scores of the query tokens [cut.token_begin, cut.token_end). Of a token, those of the blocks
// before its own one are written, and with cut.own that of its own; no other.
struct ScoreWork {
  RowsView index_q;
  PagedView index_k_cache;
  BatchView batch;
  ScoresView scores;  // token t of the batch is token t - first_token here
  int64_t first_token;
  ScoreCut cut;            // log_tile is the kernel's own choice
  int32_t first_head;      // heads [first_head, first_head + num_heads) of index_q and scores
  int32_t num_heads;       // at most 256; by set_heads()
  uint32_t inverse_heads;  // ceil(2^16 / num_heads)

  // Row r of a tile, fewer than 256, is token r / num_heads.
  void set_heads(int32_t count) {
    num_heads = count;
    inverse_heads = (65536 + count - 1) / count;
  }
};

// max_seqlen_q: the caller's hint, 0 where there is none; it may choose the kernel, not the result.
// Every kernel of it waits for those before it, and only then lets the next one start, which may
// read the batch at once. False: there was nothing to launch.
bool run_scores(const ScoreWork& work, int64_t max_seqlen_q, const ExecContext& context);

inline int32_t capped_blocks(const BatchView& batch) {
  return static_cast<int32_t>(batch.max_pages < kMaxBlocks ? batch.max_pages : kMaxBlocks);
}

// log2 of the tokens of a tile of at most `rows` rows, `heads` of a token.
inline int32_t log_tile_tokens(int64_t rows, int64_t heads) {
  int32_t log_tile = 0;
  while (log_tile < 8 && (int64_t{2} << log_tile) * heads <= rows) ++log_tile;
  return log_tile;
}

// The most units that a launch can have.
inline int64_t most_units(const ScoreCut& cut, int64_t num_requests) {
  return (((cut.token_end - cut.token_begin) >> cut.log_tile) + num_requests) *
         (int64_t{cut.max_blocks} + cut.tile_cost);
}

// The most CTAs that can have work, where a CTA has `workers` pieces.
inline int64_t useful_ctas(const ScoreWork& work, int64_t workers) {
  return (most_units(work.cut, work.batch.num_requests) + workers - 1) / workers;
}

namespace sm90 {
// A launch of tiles of 8, 16, 32 or 64 rows, on Hopper.
void run_stream(const ScoreWork& work, int64_t rows, const ExecContext& context);
// A launch of tiles of 256 rows, on Hopper: without own blocks, a cache with a page.
void run_tiles(const ScoreWork& work, const ExecContext& context);
}  // namespace sm90

}  // namespace msa::index_score
