// Host side of sparse_prefill on Hopper: split the selection, order the leftovers by block, then, a
// round at a time so that the workspace stays bounded, attend to the leftovers KV-block-major,
// finish the query-major tiles, merge the others. Which tile takes which way is decided on the
// device; a kernel without work exits at once.
#include <algorithm>
#include <cmath>

#include "configs/built_configs.h"
#include "device/architecture.h"
#include "device/cuda_errors.h"
#include "device/dependent_launch.cuh"
#include "device/persistent_grid.cuh"
#include "step3_remap/sm80/kv_block_schedule_kernel.cuh"
#include "step3_remap/sm80/split_selection_kernel.cuh"
#include "step4_attend/attend_params.h"
#include "step4_attend/sm90/prefill_kv_block_kernel.cuh"
#include "step4_attend/sm90/prefill_merge_kernel.cuh"
#include "step4_attend/sm90/prefill_query_block_kernel.cuh"

namespace msa {
namespace {

namespace prefill = sparse_prefill::sm90;
namespace remap = kv_block_schedule::sm80;
namespace split = split_selection::sm80;

constexpr int64_t kPartialBytesBudget = int64_t{1} << 30;

// The plan of a call and the partial results of a round, cut from its workspace.
struct Workspace {
  PrefillPlan plan;
  prefill::Partials partials;
  remap::Workspace counters;
  int64_t counters_begin, counters_end;  // bytes that must be cleared
  int64_t bytes;
};

Workspace cut_workspace(const SparseAttendParams& params) {
  Workspace work{};
  PrefillPlan& plan = work.plan;
  const int64_t topk = params.ids.topk, heads = params.num_kv_heads;
  plan.num_tokens = params.batch.num_tokens;
  plan.tile_capacity = 4 * topk;
  plan.num_rows = heads * params.batch.num_requests * params.batch.max_pages;
  const PrefillSizes sizes = prefill_sizes(
      plan.num_tokens, heads, params.group_size, topk, plan.num_rows,
      params.group_size * (kHeadDim * 2 + int64_t{sizeof(float2)}), kPartialBytesBudget);
  plan.tile_tokens = sizes.tile_tokens;
  plan.group_tokens = sizes.group_tokens;
  plan.tiles = sizes.tiles;
  plan.rounds = sizes.rounds;
  plan.round_slots = sizes.round_slots;
  plan.max_queries_per_item = sizes.max_queries_per_item;
  plan.max_items = sizes.max_items;
  const int64_t all_slots = heads * plan.num_tokens * topk;

  uint8_t* const base = static_cast<uint8_t*>(params.workspace);
  int64_t offset = 0;
  const auto take = [&](auto*& array, int64_t count) {
    using Element = std::remove_pointer_t<std::remove_reference_t<decltype(array)>>;
    array = reinterpret_cast<Element*>(base + offset);
    offset += (count * int64_t{sizeof(Element)} + 255) / 256 * 256;
  };
  take(work.partials.out, sizes.slots * params.group_size * kHeadDim);
  take(work.partials.state, sizes.slots * params.group_size);
  take(plan.tile_blocks, heads * plan.tiles);
  take(plan.tile_round, heads * plan.tiles);
  take(plan.tile_list, heads * plan.tiles * plan.tile_capacity);
  take(plan.leftovers, heads * plan.num_tokens);
  take(plan.first_slot, heads * plan.num_tokens);
  take(plan.leftover_mask, heads * plan.num_tokens);
  take(plan.pairs, all_slots);
  take(plan.work_items, plan.max_items * 3);
  work.counters_begin = offset;
  take(plan.round_items, plan.rounds + 1);  // cleared, for calls without any row
  uint8_t* counters;
  take(counters, kv_block_schedule_workspace_bytes(plan.num_rows * plan.rounds));
  take(plan.next_slot, 1);
  work.counters_end = offset;
  work.counters = remap::split_workspace(counters, plan.num_rows * plan.rounds);
  work.bytes = offset;
  return work;
}

CUtensorMap make_q_map(const SparseAttendParams& params, const ExecContext& context) {
  const uint64_t heads = params.num_kv_heads * params.group_size;
  const uint64_t tokens = params.batch.num_tokens;
  const uint64_t head_bytes = params.q.head_stride * 2, token_bytes = params.q.token_stride * 2;
  const uint32_t group = static_cast<uint32_t>(params.group_size);
  if (group >= 8) {
    return msa::sm90::make_tensor_map<5>(context.op, params.q.data, {64, 8, 2, heads / 8, tokens},
                                         {head_bytes, 128, 8 * head_bytes, token_bytes},
                                         {64, 8, 2, group / 8, 1});
  }
  return msa::sm90::make_tensor_map<5>(context.op, params.q.data, {64, heads, 2, 1, tokens},
                                       {head_bytes, 128, 16, token_bytes}, {64, group, 1, 1, 1});
}

CUtensorMap make_kv_map(const PagedView& cache, const SparseAttendParams& params,
                        const ExecContext& context) {
  return msa::sm90::make_tensor_map<5>(
      context.op, cache.data,
      {64, kBlock, 2, static_cast<uint64_t>(params.num_kv_heads),
       static_cast<uint64_t>(cache.num_pages)},
      {static_cast<uint64_t>(cache.token_stride) * 2, 128,
       static_cast<uint64_t>(cache.head_stride) * 2, static_cast<uint64_t>(cache.page_stride) * 2},
      {64, kBlock, 2, 1, 1});
}

}  // namespace

int64_t sparse_prefill_workspace_bytes(const SparseAttendParams& params, const ExecContext&) {
  return cut_workspace(params).bytes;
}

void run_sparse_prefill(const SparseAttendParams& params, const ExecContext& context) {
  if (params.q.dtype != DType::kBFloat16 || params.k_cache.dtype != DType::kBFloat16) {
    throw_not_built(context.op, params.q.dtype, params.k_cache.dtype);
  }
  require_sm90(context);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  Workspace work = cut_workspace(params);
  PrefillPlan& plan = work.plan;
  const CUtensorMap q_map = make_q_map(params, context);
  const CUtensorMap k_map = make_kv_map(params.k_cache, params, context);
  const CUtensorMap v_map = make_kv_map(params.v_cache, params, context);
  const float scale_log2 = params.scale * 1.44269504088896340736f;
  const auto log_group = static_cast<int32_t>(std::lround(std::log2(params.group_size)));
  const int kv_ctas = resident_ctas<prefill::msa_sparse_prefill_kv_block_sm90_kernel>(
      context.op, context.device, prefill::kThreads, prefill::kSharedBytes);
  const int tile_ctas = resident_ctas<prefill::msa_sparse_prefill_query_block_sm90_kernel>(
      context.op, context.device, prefill::kThreads, prefill::kTileSharedBytes);
  const int merge_ctas = resident_ctas<prefill::msa_sparse_prefill_merge_sm90_kernel>(
      context.op, context.device, prefill::kMergeWarps * 32, 0);

  uint8_t* const counters = static_cast<uint8_t*>(params.workspace) + work.counters_begin;
  check_cuda(context.op,
             cudaMemsetAsync(counters, 0, work.counters_end - work.counters_begin, stream),
             "clearing the counters");
  const split::SplitParams split_params{params.ids, params.batch, params.k_cache.num_pages, plan,
                                        params.group_size >= 8};
  const int64_t tile_entries = plan.tile_tokens * params.ids.topk;
  const auto split_kernel = tile_entries <= 256   ? split::msa_split_selection_sm80_kernel<256, 2>
                            : tile_entries <= 512 ? split::msa_split_selection_sm80_kernel<512, 4>
                                                  : split::msa_split_selection_sm80_kernel<1024, 6>;
  split_kernel<<<static_cast<unsigned>(params.num_kv_heads * plan.tiles), split::kThreads, 0,
                 stream>>>(split_params, work.counters.counters);
  check_cuda(context.op, cudaGetLastError(), "launching the split of the selection");
  const int64_t rows = plan.num_rows * plan.rounds;
  launch_dependent(context.op, "launching the scan of the remap",
                   remap::msa_kv_block_schedule_scan_sm80_kernel, remap::scan_ctas(rows),
                   remap::kScanThreads, 0, stream,
                   remap::ScanParams{rows, plan.max_queries_per_item, nullptr, plan.work_items,
                                     nullptr, plan.num_rows, plan.round_items},
                   work.counters);
  const int64_t entries =
      params.num_kv_heads * params.ids.topk * ((plan.num_tokens + 31) / 32 * 32);
  launch_dependent(context.op, "launching the scatter of the remap",
                   split::msa_split_selection_scatter_sm80_kernel,
                   (entries + split::kThreads - 1) / split::kThreads, split::kThreads, 0, stream,
                   split_params, work.counters.counters);

  for (int32_t round = 0; round < plan.rounds; ++round) {
    const prefill::KVBlockParams attend{params.batch, params.v_cache,  work.partials,
                                        plan.pairs,   plan.work_items, plan.round_items + round,
                                        scale_log2,   log_group};
    launch_dependent(context.op, "launching the KV-block-major kernel",
                     prefill::msa_sparse_prefill_kv_block_sm90_kernel, kv_ctas, prefill::kThreads,
                     prefill::kSharedBytes, stream, attend, q_map, k_map, v_map);
    const prefill::FinishParams finish{
        params.batch, params.v_cache, work.partials,       plan,      params.out,
        params.lse,   scale_log2,     params.num_kv_heads, log_group, round};
    if (params.group_size >= 8) {
      launch_dependent(context.op, "launching the query-major kernel",
                       prefill::msa_sparse_prefill_query_block_sm90_kernel, tile_ctas,
                       prefill::kThreads, prefill::kTileSharedBytes, stream, finish, q_map, k_map,
                       v_map);
    }
    launch_dependent(context.op, "launching the merge",
                     prefill::msa_sparse_prefill_merge_sm90_kernel, merge_ctas,
                     prefill::kMergeWarps * 32, 0, stream, finish);
  }
}

}  // namespace msa
