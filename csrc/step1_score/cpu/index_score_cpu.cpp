// score[h, t, j] = max over tokens s of block j with s <= pos(t) of index_q[t, h] . index_k[s]
//
// For every page of index keys: transpose it once into float32 panels, then one outer-product
// kernel over all rows of the unit (simd_kernels.inc), whose logits never leave the cache.
//
// Threads: a unit is (tile of tokens of one request, group of heads, range of blocks). Which rows
// and blocks share a unit changes no bits.
// Limits: float32 sums over d, ascending.
#include "cpu/work_queue.h"
#include "step1_score/cpu/block_scorer.h"
#include "step1_score/index_score_params.h"

namespace msa {
namespace {

constexpr int64_t kBlocksPerUnit = 64;  // 1 to 4 MiB of keys

float& score_at(const ScoresView& scores, int64_t head, int64_t token, int64_t block) {
  return scores
      .data[head * scores.head_stride + token * scores.token_stride + block * scores.block_stride];
}

// The blocks [begin, end) of the unit's rows that their tokens do not see.
void fill_invisible(const IndexScoreParams& params, const ScoreRows& rows, int64_t begin,
                    int64_t end) {
  const TokenTile& tile = rows.tile;
  for (int64_t head = rows.first_head; head < rows.first_head + rows.num_heads; ++head) {
    for (int64_t token = tile.begin; token < tile.end; ++token) {
      const int64_t visible =
          tile.padding() ? 0 : visible_blocks(tile.position(token), params.scores.num_blocks);
      for (int64_t block = std::max(begin, visible); block < end; ++block) {
        score_at(params.scores, head, token, block) = -std::numeric_limits<float>::infinity();
      }
    }
  }
}

void score_unit(const IndexScoreParams& params, const ScoreRows& rows, int64_t begin, int64_t end,
                ScoreScratch& scratch) {
  fill_invisible(params, rows, begin, end);
  const TokenTile& tile = rows.tile;
  if (tile.padding()) return;
  const int64_t visible = visible_blocks(tile.position(tile.end - 1), params.scores.num_blocks);
  if (begin >= visible) return;
  load_queries(params.index_q, rows, scratch);
  for (int64_t block = begin; block < std::min(end, visible); ++block) {
    // Token t sees the block from position block * 128 on.
    const int64_t first_token = std::max(tile.begin, block * kBlock - tile.pos_offset);
    score_block(rows, first_token, block, params.batch, params.index_k_cache, scratch,
                [&](int64_t token, int64_t head, float score) {
                  score_at(params.scores, head, token, block) = score;
                });
  }
}

}  // namespace

void run_index_score(const IndexScoreParams& params, const ExecContext& context) {
  const ScoreGrid grid(params.batch, params.scores.num_heads);
  const int64_t num_blocks = params.scores.num_blocks;
  const int64_t ranges = (num_blocks + kBlocksPerUnit - 1) / kBlocksPerUnit;
  for_each_unit<ScoreScratch>(context.op, grid.num_units() * ranges,
                              [&](int64_t unit, ScoreScratch& scratch) {
                                const int64_t begin = unit % ranges * kBlocksPerUnit;
                                score_unit(params, grid.unit(unit / ranges), begin,
                                           std::min(begin + kBlocksPerUnit, num_blocks), scratch);
                              });
}

}  // namespace msa
