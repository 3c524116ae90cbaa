// Host side of sparse_prefill on Hopper: split the selection, order the leftovers by block, then, a
// round at a time so that the workspace stays bounded, attend to the leftovers KV-block-major,
// finish the query-major tiles, merge the others. Which tile takes which way is decided on the
// device; a kernel without work exits at once. Tiles of requests are two launches: their plan and
// the query-major kernel.
#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "configs/built_configs.h"
#include "device/architecture.h"
#include "device/cuda_errors.h"
#include "device/dependent_launch.cuh"
#include "device/persistent_grid.cuh"
#include "step3_remap/sm80/block_item.cuh"
#include "step3_remap/sm80/kv_block_schedule_scan_kernel.cuh"
#include "step3_remap/sm90/split_requests_kernel.cuh"
#include "step3_remap/sm90/split_selection_kernel.cuh"
#include "step3_remap/sm90/split_short_kernel.cuh"
#include "step4_attend/attend_params.h"
#include "step4_attend/sm90/prefill_kv_block_kernel.cuh"
#include "step4_attend/sm90/prefill_merge_kernel.cuh"
#include "step4_attend/sm90/prefill_query_block_kernel.cuh"
#include "step4_attend/sm90/tensor_maps.h"

namespace msa {
namespace {

namespace prefill = sparse_prefill::sm90;
namespace remap = kv_block_schedule::sm80;
namespace split = split_selection::sm90;

constexpr int64_t kPartialBytesBudget = int64_t{1} << 30;
// Partial results of which L2 keeps most, of those Hopper GPUs that have 50 MB and more.
constexpr int64_t kKeptPartialBytes = int64_t{64} << 20;
constexpr int kSplitSharedLimit = 160 * 1024;  // what a chunk of any shape needs at most

// The plan of a call and the partial results of a round, cut from its workspace.
struct Workspace {
  PrefillPlan plan;
  prefill::Partials partials;
  remap::Workspace counters;
  int64_t counters_begin, counters_end;  // bytes that must be cleared
  int64_t bytes;
};

int64_t slot_bytes(const SparseAttendParams& params) {
  return params.group_size * (kHeadDim * 2 + int64_t{sizeof(float2)});
}

PrefillSizes sizes_of(const SparseAttendParams& params) {
  return prefill_sizes(params.batch.num_tokens, params.num_kv_heads, params.group_size,
                       params.ids.topk, params.batch.num_requests, params.batch.max_pages,
                       params.max_seqlen_k, slot_bytes(params), kPartialBytesBudget,
                       params.batch_invariant);
}

Workspace cut_workspace(const SparseAttendParams& params) {
  Workspace work{};
  PrefillPlan& plan = work.plan;
  const int64_t topk = params.ids.topk, heads = params.num_kv_heads;
  const PrefillSizes& sizes = plan.sizes = sizes_of(params);
  const int64_t head_rows = params.batch.num_requests * params.batch.max_pages;
  plan.num_tokens = params.batch.num_tokens;
  plan.tile_capacity = sizes.by_request ? sizes.tile_tokens * topk : 4 * topk;
  plan.num_rows = heads * head_rows;
  plan.chunk_rows = std::min(head_rows, int64_t{kHistogramRows});
  const int64_t all_slots = heads * plan.num_tokens * topk;

  uint8_t* const base = static_cast<uint8_t*>(params.workspace);
  int64_t offset = 0;
  const auto take = [&](auto*& array, int64_t count) {
    using Element = std::remove_pointer_t<std::remove_reference_t<decltype(array)>>;
    array = reinterpret_cast<Element*>(base + offset);
    offset += (count * int64_t{sizeof(Element)} + 255) / 256 * 256;
  };
  if (sizes.by_request) {
    take(plan.request_tiles, heads * sizes.tiles);
    take(plan.tile_list, heads * sizes.tiles * plan.tile_capacity);
    work.bytes = offset;
    return work;
  }
  take(work.partials.out, sizes.slots * params.group_size * kHeadDim);
  take(work.partials.state, sizes.slots * params.group_size);
  take(plan.leftovers, heads * plan.num_tokens);
  take(plan.pairs, all_slots);
  take(plan.work_items, sizes.max_items);
  work.counters_begin = offset;
  take(plan.round_items, sizes.rounds + 1);  // cleared, for calls without any row
  take(plan.item_tickets, sizes.rounds);
  work.counters_end = offset;
  if (!sizes.short_call) {
    uint8_t* counters;
    take(counters, remap::counter_bytes(plan.num_rows * sizes.rounds));
    work.counters = remap::split_workspace(counters, plan.num_rows * sizes.rounds);
    take(plan.next_slot, 1);
    work.counters_end = offset;
    take(plan.tile_blocks, heads * sizes.tiles);
    take(plan.tile_round, heads * sizes.tiles);
    take(plan.tile_list, heads * sizes.tiles * plan.tile_capacity);
    take(plan.first_slot, heads * plan.num_tokens);
    take(plan.leftover_mask, heads * plan.num_tokens);
    take(plan.entry_rank, all_slots);
    take(plan.chunk_base, heads * sizes.chunks * plan.chunk_rows);
  } else {
    take(plan.ended_heads, heads);
    take(plan.merge_tickets, 1);
  }
  work.bytes = offset;
  return work;
}

split::SplitParams split_params(const SparseAttendParams& params, const PrefillPlan& plan) {
  return {params.ids, params.batch, params.k_cache.num_pages, plan, std::getenv("MSA_LF") != nullptr};
}

void plan_short_call(const SparseAttendParams& params, const PrefillPlan& plan,
                     const ExecContext& context) {
  constexpr auto kernel = split::msa_split_selection_short_sm90_kernel;
  // The launch takes what this call needs of it.
  raise_shared_memory_limit<kernel>(context.op, context.device,
                                    split::short_shared_bytes(kShortEntries, 8, kShortRows));
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(params.num_kv_heads);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(params.num_kv_heads));
  config.blockDim = dim3(split::kShortThreads);
  config.dynamicSmemBytes = static_cast<size_t>(split::short_shared_bytes(
      plan.num_tokens * params.ids.topk, params.ids.dtype == DType::kInt64 ? 8 : 4,
      params.batch.num_requests * params.batch.max_pages));
  config.stream = static_cast<cudaStream_t>(context.stream);
  config.attrs = &cluster;
  config.numAttrs = 1;
  check_cuda(context.op, cudaLaunchKernelEx(&config, kernel, split_params(params, plan)),
             "launching the plan of a short call");
}

void plan_requests(const SparseAttendParams& params, const PrefillPlan& plan,
                   const ExecContext& context) {
  launch_dependent(
      context.op, "launching the plan of tiles of requests",
      split::msa_split_selection_requests_sm90_kernel,
      std::max(int64_t{1}, params.num_kv_heads * plan.sizes.tiles), split::kRequestThreads, 0,
      static_cast<cudaStream_t>(context.stream),
      split::RequestParams{split_params(params, plan), params.out, params.lse, params.group_size});
}

void plan_call(const SparseAttendParams& params, const Workspace& work,
               const ExecContext& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const PrefillPlan& plan = work.plan;
  uint8_t* const counters = static_cast<uint8_t*>(params.workspace) + work.counters_begin;
  check_cuda(context.op,
             cudaMemsetAsync(counters, 0, work.counters_end - work.counters_begin, stream),
             "clearing the counters");
  const auto shared_bytes = static_cast<int>(
      split::split_shared_bytes(plan.sizes.chunk_tiles, plan.sizes.tile_places,
                                plan.sizes.tile_tokens * params.ids.topk, plan.chunk_rows));
  raise_shared_memory_limit<split::msa_split_selection_sm90_kernel>(context.op, context.device,
                                                                    kSplitSharedLimit);
  launch_in_stream(context.op, "launching the split of the selection", false,
                   split::msa_split_selection_sm90_kernel,
                   dim3(static_cast<unsigned>(params.num_kv_heads * plan.sizes.chunks)),
                   split::kThreads, shared_bytes, stream, split_params(params, plan),
                   work.counters.counters);
  const int64_t rows = plan.num_rows * plan.sizes.rounds;
  launch_dependent(
      context.op, "launching the scan of the remap",
      remap::msa_kv_block_schedule_scan_sm80_kernel<BlockItems>, remap::scan_ctas(rows),
      remap::kScanThreads, 0, stream,
      remap::ScanParams<BlockItems>{rows,
                                    static_cast<uint32_t>(plan.sizes.max_queries_per_item),
                                    nullptr,
                                    {params.batch, plan.work_items},
                                    nullptr,
                                    static_cast<uint32_t>(plan.num_rows),
                                    plan.round_items},
      work.counters);
  launch_dependent(context.op, "launching the scatter of the remap",
                   split::msa_split_selection_scatter_sm90_kernel,
                   params.num_kv_heads * plan.sizes.chunks * split::kScatterParts,
                   split::kScatterThreads, 0, stream, split_params(params, plan),
                   work.counters.counters);
}

int env(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoi(value) : otherwise;
}

template <DType kCache>
void run(const SparseAttendParams& params, const ExecContext& context) {
  constexpr auto kv_block_kernel = prefill::msa_sparse_prefill_kv_block_sm90_kernel<kCache>;
  constexpr auto query_block_kernel = prefill::msa_sparse_prefill_query_block_sm90_kernel<kCache>;
  constexpr auto merge_kernel = prefill::msa_sparse_prefill_merge_sm90_kernel<kCache>;
  constexpr int kSharedBytes = prefill::kSharedBytes<kCache>;
  constexpr int kTileSharedBytes = prefill::kTileSharedBytes<kCache>;
  const auto stream = static_cast<cudaStream_t>(context.stream);
  Workspace work = cut_workspace(params);
  PrefillPlan& plan = work.plan;
  const CUtensorMap q_map = make_q_map(params, context);
  const CUtensorMap k_map = make_kv_map(params.k_cache, params, context);
  const CUtensorMap v_map = make_kv_map(params.v_cache, params, context);
  const float scale_log2 = params.scale * 1.44269504088896340736f;
  const auto log_group = static_cast<int32_t>(std::lround(std::log2(params.group_size)));
  const int kv_ctas =
      resident_ctas<kv_block_kernel>(context.op, context.device, prefill::kThreads, kSharedBytes);
  const int tile_ctas = resident_ctas<query_block_kernel>(context.op, context.device,
                                                          prefill::kThreads, kTileSharedBytes);
  const int merge_ctas =
      resident_ctas<merge_kernel>(context.op, context.device, prefill::kMergeWarps * 32, 0);

  if (plan.sizes.by_request) {
    plan_requests(params, plan, context);
  } else if (plan.sizes.short_call) {
    plan_short_call(params, plan, context);
  } else {
    plan_call(params, work, context);
  }

  const bool merges_beside = plan.sizes.short_call && params.num_kv_heads > 1 && env("MSA_ME", 1);
  for (int32_t round = 0; round < plan.sizes.rounds; ++round) {
    if (!plan.sizes.by_request) {
      const prefill::KVBlockParams attend{
          params.v_cache,
          work.partials,
          plan.pairs,
          plan.work_items,
          plan.round_items + round,
          plan.item_tickets + round,
          plan.next_slot,
          static_cast<int32_t>(kKeptPartialBytes / slot_bytes(params)),
          static_cast<int32_t>(plan.sizes.max_items),
          round,
          scale_log2,
          log_group,
          params.k_scale,
          merges_beside ? plan.ended_heads : nullptr,
          static_cast<int32_t>(params.num_kv_heads),
          merges_beside ? std::min(env("MSA_M", kv_ctas / 8), kv_ctas / 8 * 3) : 0};
      launch_dependent(context.op, "launching the KV-block-major kernel", kv_block_kernel, kv_ctas,
                       prefill::kThreads, kSharedBytes, stream, attend, q_map, k_map, v_map);
    }
    const prefill::FinishParams finish{
        {params.batch, params.v_cache, params.out, params.lse, scale_log2, params.num_kv_heads,
         log_group, params.v_scale},
        work.partials,
        plan,
        round,
        params.k_scale,
        plan.sizes.short_call ? static_cast<int32_t>(params.ids.topk) : 0,
        merges_beside ? kv_ctas : 0};
    if (plan.sizes.query_major) {
      launch_dependent(context.op, "launching the query-major kernel", query_block_kernel,
                       tile_ctas, prefill::kThreads, kTileSharedBytes, stream, finish, q_map, k_map,
                       v_map);
    }
    if (!plan.sizes.by_request) {
      launch_dependent(context.op, "launching the merge", merge_kernel, merge_ctas,
                       prefill::kMergeWarps * 32, 0, stream, finish);
    }
  }
}

}  // namespace

int64_t sparse_prefill_sm90_workspace_bytes(const SparseAttendParams& params) {
  return cut_workspace(params).bytes;
}

void run_sparse_prefill_sm90(const SparseAttendParams& params, const ExecContext& context) {
  if (params.k_cache.dtype == DType::kFloat8E4M3) {
    run<DType::kFloat8E4M3>(params, context);
  } else {
    run<DType::kBFloat16>(params, context);
  }
}

}  // namespace msa
