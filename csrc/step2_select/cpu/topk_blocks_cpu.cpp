// ids[h, t] = forced blocks and the highest scores of scores[h, t, 0 .. visible), min(K, visible)
// in all, ascending, then -1.
//
// One pass over a row against a sorted list of the best K so far: O(blocks) comparisons, and an
// insertion only where a score beats the worst of them (never among equal scores, since ids
// ascend).
//
// Threads: ranges of rows (h, t). A row depends on itself alone.
// Limits: K <= 32; scores at or past the visible count, and those of forced blocks, are not read.
#include "host/parallel.h"
#include "step2_select/cpu/topk_row.h"

namespace msa {
namespace {

constexpr int64_t kScoresPerTask = 16384;  // a few microseconds: below that, threads cost more

void select_row(const TopkBlocksParams& params, int64_t head, int64_t token) {
  const ScoresView& scores = params.scores;
  const int64_t listed = params.visible_blocks[token * params.visible_stride];
  TopkRow row;
  row.start(params.rule, std::min(std::max<int64_t>(listed, 0), scores.num_blocks));
  const float* score = scores.data + head * scores.head_stride + token * scores.token_stride;
  for (int64_t block = row.candidates_begin(); block < row.candidates_end(); ++block) {
    row.offer(score[block * scores.block_stride], block);
  }
  row.write(params.ids, head, token);
}

}  // namespace

void run_topk_blocks(const TopkBlocksParams& params, const ExecContext&) {
  const int64_t rows = params.ids.num_heads * params.num_tokens;
  const int64_t grain = 1 + kScoresPerTask / (params.scores.num_blocks + 1);
  parallel_for(rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      select_row(params, row / params.num_tokens, row % params.num_tokens);
    }
  });
}

}  // namespace msa
