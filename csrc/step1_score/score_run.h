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
  ScoreCut cut;        // log_tile is the kernel's own choice
  int32_t first_head;  // heads [first_head, first_head + num_heads) of index_q and scores
  int32_t num_heads;
};

// max_seqlen_q: the caller's hint, 0 where there is none; it may choose the kernel, not the result.
void run_scores(const ScoreWork& work, int64_t max_seqlen_q, const ExecContext& context);

// log2 of the tokens of a tile of at most `rows` rows, `heads` of a token.
inline int32_t log_tile_tokens(int64_t rows, int64_t heads) {
  int32_t log_tile = 0;
  while (log_tile < 8 && (int64_t{2} << log_tile) * heads <= rows) ++log_tile;
  return log_tile;
}

// The most CTAs that can have work, where a CTA has `workers` pieces.
inline int64_t useful_ctas(const ScoreWork& work, int64_t workers) {
  const int64_t tokens = work.cut.token_end - work.cut.token_begin;
  const int64_t tiles = (tokens >> work.cut.log_tile) + work.batch.num_requests;
  return (tiles * work.cut.max_blocks + workers - 1) / workers;
}

namespace sm90 {
// A call of few query rows a request, rows = 8, 16, 32 or 64, on Hopper.
void run_stream(const ScoreWork& work, int64_t rows, const ExecContext& context);
}  // namespace sm90

}  // namespace msa::index_score
