// Host side of select_blocks: the scores of a window of query tokens into the workspace, then their
// top-k, window by window, so that the workspace is bounded whatever the context.
#include <algorithm>

#include "configs/built_configs.h"
#include "device/architecture.h"
#include "device/positions.cuh"
#include "step1_score/score_run.h"
#include "step2_select/select_blocks_params.h"
#include "step2_select/sm80/topk_blocks_run.h"
#include "step2_select/sm90/bounded_select_run.h"

namespace msa {
namespace {

// Scores of a window that are written, in bytes. As much as an L2 cache holds: the top-k reads them
// from there.
constexpr int64_t kWindowBytes = int64_t{64} << 20;
// And the places for them, where the caller's hint says that most of a wide table is empty. With
// bounds a place has a list's beside it.
constexpr int64_t kPlacesBytes = int64_t{512} << 20;
constexpr int64_t kBoundPlacesBytes = kPlacesBytes / 2;
constexpr int64_t kTokenMultiple = 256;  // whole tiles of the score kernels

// Row-major scores of a window; `data` is the workspace.
struct Window {
  int64_t tokens, row_blocks;
  int64_t used_blocks;  // of a row, as far as the caller's hint says
  bool bounded;         // bounds first, exact scores where these leave it open
};

Window window_of(const SelectBlocksParams& params) {
  Window window{};
  window.row_blocks = (params.batch.max_pages + 31) / 32 * 32;
  const auto bytes = [&](int64_t blocks) {
    return std::max<int64_t>(params.ids.num_heads * blocks * int64_t{sizeof(float)}, 1);
  };
  window.used_blocks = params.batch.max_pages;
  if (params.max_seqlen_k > 0) {
    window.used_blocks = std::min(window.used_blocks, (params.max_seqlen_k - 1) / kBlock + 1);
  }
  window.bounded = select_blocks::sm90::bounds_pay(params, window.used_blocks);
  const int64_t places_bytes = window.bounded ? kBoundPlacesBytes : kPlacesBytes;
  window.tokens = std::max<int64_t>(
      std::min(kWindowBytes / bytes(window.used_blocks), places_bytes / bytes(window.row_blocks)),
      1);
  if (window.tokens > kTokenMultiple) window.tokens -= window.tokens % kTokenMultiple;
  window.tokens = std::min(window.tokens, params.batch.num_tokens);
  if (window.bounded) {
    constexpr int64_t kMostRows = int64_t{1} << select_blocks::sm90::kLogMostRows;
    window.tokens = std::min(window.tokens, kMostRows / params.ids.num_heads);
  }
  return window;
}

}  // namespace

int64_t select_blocks_workspace_bytes(const SelectBlocksParams& params) {
  const Window window = window_of(params);
  if (window.bounded) {
    return select_blocks::sm90::bounded_workspace_bytes(params, window.tokens, window.row_blocks);
  }
  return params.ids.num_heads * window.tokens * window.row_blocks * int64_t{sizeof(float)};
}

void run_select_blocks(const SelectBlocksParams& params, const ExecContext& context) {
  require_built(context.op, params.index_q.dtype, params.index_k_cache.dtype);

  const Window window = window_of(params);
  if (window.bounded && runs_sm90(context, params.index_q.dtype, params.index_k_cache.dtype)) {
    return select_blocks::sm90::run_bounded(params, window.tokens, window.row_blocks, context);
  }
  const int64_t heads = params.ids.num_heads, num_tokens = params.batch.num_tokens;
  const ScoresView scores{static_cast<float*>(params.workspace),
                          heads,
                          window.row_blocks,
                          window.row_blocks,
                          heads * window.row_blocks,
                          1};
  for (int64_t begin = 0; begin < num_tokens; begin += window.tokens) {
    const int64_t end = std::min(begin + window.tokens, num_tokens);
    index_score::ScoreWork work{};
    work.index_q = params.index_q;
    work.index_k_cache = params.index_k_cache;
    work.batch = params.batch;
    work.scores = scores;
    work.first_token = begin;
    // The own block needs no score where it is forced.
    work.cut = {begin,
                end,
                index_score::capped_blocks(params.batch),
                0,
                params.rule.local_blocks > 0 ? 0 : 1,
                0};
    work.num_heads = static_cast<int32_t>(heads);
    const bool scored = index_score::run_scores(work, params.max_seqlen_q, context);

    topk_blocks::sm80::TopkKernelParams topk{};
    topk.scores = scores;
    topk.batch = params.batch;
    topk.tokens_each = tokens_of_each(params.batch);
    topk.first_token = begin;
    topk.num_tokens = end - begin;
    topk.after_scores = scored;
    topk.rule = params.rule;
    topk.ids = params.ids;
    topk_blocks::sm80::run_topk(topk, window.used_blocks, context);
  }
}

}  // namespace msa
