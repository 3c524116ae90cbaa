// Host side of scoring: which kernel serves a call. Few query rows a request are a stream of the
// index cache, many are tiles that share its pages; lengths are read on the device, so the choice
// rests on the shapes and the caller's hint alone, and either kernel is right for any batch.
#include <algorithm>

#include "configs/built_configs.h"
#include "device/architecture.h"
#include "device/persistent_grid.cuh"
#include "step1_score/index_score_params.h"
#include "step1_score/sm80/score_fill_kernel.cuh"
#include "step1_score/sm80/score_tile_kernel.cuh"

namespace msa {
namespace index_score::sm80 {
namespace {

constexpr int64_t kStreamRows = 64;     // the most query rows of a stream's tile
constexpr int32_t kHopperTileCost = 2;  // loading the queries, in pages of 2048 clocks
static_assert(kHopperTileCost <= kMaxTileCost);

template <DType dtype, int kRows>
void launch_stream(const ScoreWork& work, const ExecContext& context) {
  constexpr auto kernel = msa_index_score_stream_sm80_kernel<dtype, kRows>;
  const int64_t resident =
      resident_ctas<kernel>(context.op, context.device, kStreamWarps * 32, kStreamSharedBytes);
  launch_portable<kernel>(
      context, "the launch of msa_index_score_stream_sm80_kernel",
      static_cast<unsigned>(std::min(resident, useful_ctas(work, kStreamWarps))), kStreamWarps * 32,
      kStreamSharedBytes, work);
}

template <DType dtype>
void launch_tiles(const ScoreWork& work, const ExecContext& context) {
  constexpr auto kernel = msa_index_score_tile_sm80_kernel<dtype>;
  constexpr int kSharedBytes = tile_shared_bytes<dtype>();
  const int64_t resident =
      resident_ctas<kernel>(context.op, context.device, kTileThreads, kSharedBytes);
  launch_portable<kernel>(context, "the launch of msa_index_score_tile_sm80_kernel",
                          static_cast<unsigned>(std::min(resident, useful_ctas(work, 1))),
                          kTileThreads, kSharedBytes, work);
}

// Calls launch(work) for windows of the query tokens whose units can be counted.
template <typename Launch>
void for_each_window(ScoreWork work, const Launch& launch) {
  const int64_t requests = work.batch.num_requests, token_end = work.cut.token_end;
  // At least 1: calls in which it is not are refused (units_can_be_counted).
  const int64_t tiles = kMostUnits / (int64_t{work.cut.max_blocks} + work.cut.tile_cost) - requests;
  while (work.cut.token_begin < token_end) {
    work.cut.token_end = std::min(token_end, work.cut.token_begin + (tiles << work.cut.log_tile));
    launch(work);
    work.cut.token_begin = work.cut.token_end;
  }
}

template <DType dtype>
void launch(ScoreWork work, int64_t tokens, const ExecContext& context) {
  const bool on_hopper = runs_sm90(context, dtype, dtype);
  const int64_t rows = tokens * work.num_heads;
  if (rows <= kStreamRows) {
    const int64_t tile_rows = rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : 64;
    work.set_heads(work.num_heads);
    work.cut.log_tile = log_tile_tokens(tile_rows, work.num_heads);
    return for_each_window(work, [&](const ScoreWork& window) {
      if (on_hopper) return sm90::run_stream(window, tile_rows, context);
      if (tile_rows == 8) return launch_stream<dtype, 8>(window, context);
      if (tile_rows == 16) return launch_stream<dtype, 16>(window, context);
      if (tile_rows == 32) return launch_stream<dtype, 32>(window, context);
      launch_stream<dtype, 64>(window, context);
    });
  }
  // Hopper's kernel has no mask, and a tensor map no strides of 0.
  const PagedView& cache = work.index_k_cache;
  const bool hopper = on_hopper && work.cut.own == 0 && cache.num_pages > 0 &&
                      cache.page_stride > 0 && cache.token_stride > 0;
  work.cut.tile_cost = hopper ? kHopperTileCost : 0;
  const int32_t end = work.first_head + work.num_heads;
  for (; work.first_head < end; work.first_head += kTileRows) {
    work.set_heads(std::min(end - work.first_head, kTileRows));
    work.cut.log_tile = log_tile_tokens(kTileRows, work.num_heads);
    for_each_window(work, [&](const ScoreWork& window) {
      if (hopper) return sm90::run_tiles(window, context);
      launch_tiles<dtype>(window, context);
    });
  }
}

}  // namespace
}  // namespace index_score::sm80

bool index_score::run_scores(const ScoreWork& work, int64_t max_seqlen_q,
                             const ExecContext& context) {
  const int64_t requests = work.batch.num_requests, all_tokens = work.batch.num_tokens;
  if (requests == 0 || work.cut.max_blocks == 0) return false;
  // Tokens of a request: the mean at least, and the longest's where the caller says it.
  const int64_t mean = (all_tokens + requests - 1) / requests;
  const int64_t tokens = std::max(mean, std::min(max_seqlen_q, all_tokens));
  if (work.index_q.dtype == DType::kFloat8E4M3) {
    index_score::sm80::launch<DType::kFloat8E4M3>(work, tokens, context);
  } else {
    index_score::sm80::launch<DType::kBFloat16>(work, tokens, context);
  }
  return true;
}

void run_index_score(const IndexScoreParams& params, const ExecContext& context) {
  require_built(context.op, params.index_q.dtype, params.index_k_cache.dtype);

  const index_score::sm80::FillParams fill{params.scores, params.batch};
  launch_portable<index_score::sm80::msa_index_score_fill_sm80_kernel>(
      context, "the launch of msa_index_score_fill_sm80_kernel",
      static_cast<unsigned>(params.batch.num_tokens), index_score::sm80::kFillThreads, 0, fill);
  index_score::ScoreWork work{};
  work.index_q = params.index_q;
  work.index_k_cache = params.index_k_cache;
  work.batch = params.batch;
  work.scores = params.scores;
  work.cut = {0, params.batch.num_tokens, index_score::capped_blocks(params.batch), 0, 1, 0};
  work.num_heads = static_cast<int32_t>(params.scores.num_heads);
  index_score::run_scores(work, params.max_seqlen_q, context);
}

}  // namespace msa
