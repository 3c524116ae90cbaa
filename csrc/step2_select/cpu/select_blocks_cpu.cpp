// ids = topk_blocks(index_score(...)) without the scores in memory: blocks are scored in ascending
// order and offered at once to the running selection of each row.
//
// Blocks that no rule can drop (forced ones; all of them while min(K, visible) = visible) are not
// scored. The scores themselves are those of index_score, bit for bit (block_scorer.h).
//
// Threads: a unit is (tile of tokens of one request, group of heads). Scratch is 170 KiB a thread,
// whatever the context.
// Limits: the blocks of one token are not shared out between threads.
#include "cpu/work_queue.h"
#include "step1_score/cpu/block_scorer.h"
#include "step2_select/cpu/topk_row.h"
#include "step2_select/select_blocks_params.h"

namespace msa {
namespace {

struct SelectScratch {
  ScoreScratch score;
  TopkRow rows[kScoreRows];  // row (t - tile.begin) * num_heads + head
};

TopkRow& row_of(SelectScratch& scratch, const ScoreRows& rows, int64_t token, int64_t head) {
  return scratch.rows[(token - rows.tile.begin) * rows.num_heads + head - rows.first_head];
}

// Candidates begin at one block for all tokens that have any, and end later for later tokens: those
// who want a block are the tokens from some token of the tile to its end.
void select_candidates(const SelectBlocksParams& params, const ScoreRows& rows,
                       SelectScratch& scratch) {
  const TokenTile& tile = rows.tile;
  const TopkRow& last = row_of(scratch, rows, tile.end - 1, rows.first_head);
  int64_t first_token = tile.begin;
  for (int64_t block = last.candidates_begin(); block < last.candidates_end(); ++block) {
    while (row_of(scratch, rows, first_token, rows.first_head).candidates_end() <= block) {
      ++first_token;
    }
    score_block(rows, first_token, block, params.batch, params.index_k_cache, scratch.score,
                [&](int64_t token, int64_t head, float score) {
                  row_of(scratch, rows, token, head).offer(score, block);
                });
  }
}

void select_unit(const SelectBlocksParams& params, const ScoreRows& rows, SelectScratch& scratch) {
  const TokenTile& tile = rows.tile;
  for (int64_t token = tile.begin; token < tile.end; ++token) {
    const int64_t visible =
        tile.padding() ? 0 : visible_blocks(tile.position(token), params.batch.max_pages);
    for (int64_t head = 0; head < rows.num_heads; ++head) {
      row_of(scratch, rows, token, rows.first_head + head).start(params.rule, visible);
    }
  }
  // The last token sees most: where it has no candidates, none has.
  if (row_of(scratch, rows, tile.end - 1, rows.first_head).candidates_end() > 0) {
    load_queries(params.index_q, rows, scratch.score);
    select_candidates(params, rows, scratch);
  }
  for (int64_t token = tile.begin; token < tile.end; ++token) {
    for (int64_t head = rows.first_head; head < rows.first_head + rows.num_heads; ++head) {
      row_of(scratch, rows, token, head).write(params.ids, head, token);
    }
  }
}

}  // namespace

int64_t select_blocks_workspace_bytes(const SelectBlocksParams&) { return 0; }

void run_select_blocks(const SelectBlocksParams& params, const ExecContext& context) {
  const ScoreGrid grid(params.batch, params.ids.num_heads);
  for_each_unit<SelectScratch>(
      context.op, grid.num_units(),
      [&](int64_t unit, SelectScratch& scratch) { select_unit(params, grid.unit(unit), scratch); });
}

}  // namespace msa
