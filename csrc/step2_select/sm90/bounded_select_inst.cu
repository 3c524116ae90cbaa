// Host side of selections by bounds: factors once, then window by window bounds, candidates, their
// exact scores, ids.
#include <algorithm>

#include "device/persistent_grid.cuh"
#include "step1_score/sm90/score_bounds_kernel.cuh"
#include "step1_score/sm90/score_factors_kernel.cuh"
#include "step2_select/sm90/bounded_select_run.h"
#include "step2_select/sm90/candidates_kernel.cuh"
#include "step2_select/sm90/rescore_kernel.cuh"
#include "step2_select/sm90/settle_kernel.cuh"

namespace msa::select_blocks::sm90 {
namespace {

namespace score = index_score::sm90;

constexpr int64_t kLeastScores = int64_t{2} << 20;  // from here on it pays, measured
constexpr int64_t kLeastBlocks = 256;
constexpr int64_t kMostTopk = 20;  // bounds of lanes' best say little of a row's 31st
constexpr int64_t kMostTableEntries = int64_t{1} << 17;
// Loading the queries, in pages of 1024 clocks. More than kMaxTileCost: with no more table entries
// and blocks than here, units are far fewer than can be counted.
constexpr int32_t kTileCost = 4;

// Parts of the workspace, one after the other.
struct Workspace {
  uint8_t* begin;
  int64_t bytes = 0;

  template <typename T>
  T* take(int64_t count) {
    T* const part = reinterpret_cast<T*>(begin + bytes);
    bytes += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return part;
  }
};

struct Parts {
  BoundedRows rows;
  float4 *row_factors, *block_factors;
  int2* token_words;
  int32_t* counters;  // num_items, then list_counts
  int64_t num_counters;
};

Parts lay_out(const SelectBlocksParams& params, int64_t window_tokens, int64_t row_blocks,
              Workspace& workspace) {
  const int64_t heads = params.ids.num_heads, num_rows = window_tokens * heads;
  const int64_t entries = params.batch.num_requests * params.batch.max_pages;
  Parts parts{};
  BoundedRows& rows = parts.rows;
  rows.row_blocks = row_blocks;
  rows.bounds = workspace.take<uint16_t>(num_rows * row_blocks);
  rows.wide_scores = workspace.take<uint32_t>(num_rows * row_blocks);
  rows.lists = workspace.take<int32_t>(num_rows * row_blocks);
  rows.items = workspace.take<RescoreItem>(num_rows * row_blocks / kItemRows + entries);
  rows.entries = workspace.take<uint16_t>(num_rows * kRowEntries);
  rows.exact = workspace.take<uint32_t>(num_rows * kRowEntries);
  rows.row_words = workspace.take<int32_t>(num_rows);
  parts.row_factors = workspace.take<float4>(params.batch.num_tokens * heads);
  parts.block_factors = workspace.take<float4>(entries);
  parts.token_words = workspace.take<int2>(params.batch.num_tokens);
  parts.num_counters = (entries + 1) * kCounterStride;
  parts.counters = workspace.take<int32_t>(parts.num_counters);
  rows.row_factors = parts.row_factors;
  rows.block_factors = parts.block_factors;
  rows.token_words = parts.token_words;
  rows.num_items = parts.counters;
  rows.list_counts = parts.counters + kCounterStride;
  return parts;
}

unsigned row_ctas(const BoundedRows& rows) {
  return static_cast<unsigned>((rows.num_tokens * rows.num_heads + kRowsPerCta - 1) / kRowsPerCta);
}

template <int kValues>
void launch_candidates(const BoundedRows& rows, const ExecContext& context) {
  launch_dependent(context.op, "the launch of msa_find_candidates_sm90_kernel",
                   msa_find_candidates_sm90_kernel<kValues>, row_ctas(rows), kRowsPerCta * 32, 0,
                   static_cast<cudaStream_t>(context.stream), rows);
}

}  // namespace

bool bounds_pay(const SelectBlocksParams& params, int64_t used_blocks) {
  const BatchView& batch = params.batch;
  const PagedView& cache = params.index_k_cache;
  const int64_t rows = batch.num_tokens * params.ids.num_heads, requests = batch.num_requests;
  return params.index_q.dtype == DType::kFloat8E4M3 && params.rule.local_blocks > 0 &&
         params.rule.topk <= kMostTopk && params.ids.num_heads <= 64 && requests > 0 &&
         rows > 128 * requests && used_blocks >= kLeastBlocks &&
         rows * used_blocks >= kLeastScores && batch.max_pages <= kMostBlocks &&
         requests * batch.max_pages <= kMostTableEntries && rows < int64_t{1} << 31 &&
         params.index_q.token_stride < int64_t{1} << 32 &&
         params.index_q.head_stride < int64_t{1} << 32 && cache.num_pages > 0 &&
         cache.page_stride > 0 && cache.token_stride > 0;
}

int64_t bounded_workspace_bytes(const SelectBlocksParams& params, int64_t window_tokens,
                                int64_t row_blocks) {
  Workspace workspace{nullptr};
  lay_out(params, window_tokens, row_blocks, workspace);
  return workspace.bytes;
}

void run_bounded(const SelectBlocksParams& params, int64_t window_tokens, int64_t row_blocks,
                 const ExecContext& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const int64_t heads = params.ids.num_heads, num_tokens = params.batch.num_tokens;
  const int64_t entries = params.batch.num_requests * params.batch.max_pages;
  Workspace workspace{static_cast<uint8_t*>(params.workspace)};
  const Parts parts = lay_out(params, window_tokens, row_blocks, workspace);

  score::FactorParams factors{};
  factors.index_q = params.index_q;
  factors.index_k_cache = params.index_k_cache;
  factors.batch = params.batch;
  factors.num_heads = static_cast<int32_t>(heads);
  factors.row_factors = parts.row_factors;
  factors.block_factors = parts.block_factors;
  factors.token_words = parts.token_words;
  factors.counters = parts.counters;
  factors.num_counters = parts.num_counters;
  launch_dependent(context.op, "the launch of msa_score_factors_sm90_kernel",
                   score::msa_score_factors_sm90_kernel, entries + (num_tokens * heads + 127) / 128,
                   score::kFactorThreads, 0, stream, factors);

  const PagedView& cache = params.index_k_cache;
  const auto page_bytes = static_cast<uint64_t>(cache.page_stride);
  const CUtensorMap map = msa::sm90::make_tensor_map<5>(
      context.op, cache.data, {64, kBlock, 1, 1, static_cast<uint64_t>(cache.num_pages)},
      {static_cast<uint64_t>(cache.token_stride), 128, page_bytes, page_bytes},
      {64, kBlock, 1, 1, 1});
  constexpr auto bounds_kernel = score::msa_score_bounds_sm90_kernel;
  constexpr auto rescore_kernel = msa_rescore_candidates_sm90_kernel;
  constexpr int kBoundBytes = sizeof(score::BoundSharedStorage);
  constexpr int kRescoreBytes = sizeof(RescoreSharedStorage);

  score::BoundWork bounds{};
  bounds.row_factors = parts.row_factors;
  bounds.block_factors = parts.block_factors;
  index_score::ScoreWork& work = bounds.scores;
  work.index_q = params.index_q;
  work.index_k_cache = params.index_k_cache;
  work.batch = params.batch;
  bounds.bounds = parts.rows.bounds;
  bounds.row_blocks = row_blocks;
  work.set_heads(static_cast<int32_t>(heads));
  work.cut.max_blocks = index_score::capped_blocks(params.batch);
  work.cut.log_tile = index_score::log_tile_tokens(score::kTileRows, heads);
  work.cut.tile_cost = kTileCost;

  BoundedRows rows = parts.rows;
  rows.index_q = params.index_q;
  rows.index_k_cache = params.index_k_cache;
  rows.batch = params.batch;
  rows.rule = params.rule;
  rows.ids = params.ids;
  rows.num_heads = static_cast<int32_t>(heads);
  rows.inverse_heads = static_cast<uint32_t>(((int64_t{1} << 31) + heads - 1) / heads);
  for (int64_t begin = 0; begin < num_tokens; begin += window_tokens) {
    const int64_t end = std::min(begin + window_tokens, num_tokens);
    work.first_token = work.cut.token_begin = begin;
    work.cut.token_end = end;
    rows.first_token = begin;
    rows.num_tokens = end - begin;
    const int64_t resident =
        resident_ctas<bounds_kernel>(context.op, context.device, score::kBoundThreads, kBoundBytes);
    launch_dependent(context.op, "the launch of msa_score_bounds_sm90_kernel", bounds_kernel,
                     std::min(resident, index_score::useful_ctas(work, 1)), score::kBoundThreads,
                     kBoundBytes, stream, bounds, map);
    if (params.batch.max_pages <= 512) {
      launch_candidates<16>(rows, context);
    } else if (params.batch.max_pages <= 1024) {
      launch_candidates<32>(rows, context);
    } else {
      launch_candidates<0>(rows, context);
    }
    launch_dependent(
        context.op, "the launch of msa_rescore_candidates_sm90_kernel", rescore_kernel,
        resident_ctas<rescore_kernel>(context.op, context.device, kRescoreThreads, kRescoreBytes),
        kRescoreThreads, kRescoreBytes, stream, rows);
    launch_dependent(context.op, "the launch of msa_settle_rows_sm90_kernel",
                     msa_settle_rows_sm90_kernel, row_ctas(rows), kRowsPerCta * 32, 0, stream,
                     rows);
  }
}

}  // namespace msa::select_blocks::sm90
