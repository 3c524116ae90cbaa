#include <algorithm>

#include "configs/built_configs.h"
#include "device/dependent_launch.cuh"
#include "device/persistent_grid.cuh"
#include "step3_remap/sm80/kv_block_schedule_kernel.cuh"

namespace msa {

namespace sm80 = kv_block_schedule::sm80;

namespace {

constexpr int64_t kChunksWanted = 128;  // on as many SMs
constexpr int64_t kMinChunkTokens = 32;
constexpr int64_t kMostClearCtas = 1024;
constexpr int kMostSharedBytes =
    int{sizeof(sm80::SharedChunk)} + sm80::kChunkEntries * 8 + kHistogramRows * 4;

// Counters, which are cleared, then ranks; cut from the workspace.
struct Scratch {
  sm80::Workspace counters;
  int64_t counter_words;
  sm80::Ranks ranks;
  int64_t num_rows, chunks, scatter_ctas, bytes;
};

Scratch cut_scratch(const KVBlockScheduleParams& params) {
  Scratch scratch;
  sm80::Ranks& ranks = scratch.ranks;
  const int64_t heads = params.ids.num_heads, topk = params.ids.topk;
  const int64_t num_tokens = params.batch.num_tokens;
  const int64_t head_rows = params.batch.num_requests * params.batch.max_pages;
  const int64_t entries = heads * num_tokens * topk;
  const int64_t chunk_tokens =
      std::clamp(heads * num_tokens / kChunksWanted, kMinChunkTokens,
                 std::min(int64_t{sm80::kChunkTokens}, sm80::kChunkEntries / topk));
  const int64_t chunks = std::max(int64_t{1}, (num_tokens + chunk_tokens - 1) / chunk_tokens);
  scratch.num_rows = heads * head_rows;
  scratch.counters = sm80::split_workspace(params.workspace, scratch.num_rows);
  scratch.counter_words = sm80::counter_bytes(scratch.num_rows) / int64_t{sizeof(uint32_t)};
  ranks.entry_rank = scratch.counters.ticket + 1;
  ranks.chunk_base = ranks.entry_rank + entries;
  ranks.chunk_rows = std::min(head_rows, int64_t{kHistogramRows});
  ranks.chunk_tokens = static_cast<int32_t>(chunk_tokens);
  ranks.id_bytes = params.ids.dtype == DType::kInt64 ? 8 : 4;
  ranks.ids_bytes = static_cast<int32_t>((chunk_tokens * topk * ranks.id_bytes + 15) / 16 * 16);
  const int64_t vector_ids = 16 / ranks.id_bytes;
  const bool vectors = params.ids.slot_stride == 1 && topk % vector_ids == 0 &&
                       params.ids.token_stride % vector_ids == 0 &&
                       params.ids.head_stride % vector_ids == 0 &&
                       reinterpret_cast<uintptr_t>(params.ids.data) % 16 == 0;
  ranks.copied_ids = static_cast<int32_t>(vectors ? vector_ids : 1);
  ranks.by_topk = division_by(static_cast<uint32_t>(topk));
  ranks.by_chunks = division_by(static_cast<uint32_t>(chunks));
  ranks.by_limit = division_by(static_cast<uint32_t>(params.max_queries_per_item));
  scratch.chunks = std::max(int64_t{1}, heads * chunks);
  scratch.scatter_ctas = scratch.chunks;
  ranks.cta_rows = 0;
  if (scratch.num_rows <= sm80::kSummedRows) {
    scratch.scatter_ctas =
        std::max(scratch.chunks, (scratch.num_rows + sm80::kCtaRows - 1) / sm80::kCtaRows);
    ranks.cta_rows =
        static_cast<int32_t>((scratch.num_rows + scratch.scatter_ctas - 1) / scratch.scatter_ctas);
  }
  scratch.bytes = (scratch.counter_words + entries + heads * chunks * ranks.chunk_rows) *
                  int64_t{sizeof(uint32_t)};
  return scratch;
}

}  // namespace

int64_t kv_block_schedule_workspace_bytes(const KVBlockScheduleParams& params) {
  return cut_scratch(params).bytes;
}

namespace {

template <bool kScanned>
void scatter(const KVBlockScheduleParams& params, const Scratch& scratch,
             const ExecContext& context) {
  constexpr auto kernel = sm80::msa_kv_block_schedule_scatter_sm80_kernel<kScanned>;
  allow_shared_memory<kernel>(context.op, context.device, kMostSharedBytes);
  launch_portable<kernel>(context, "launching msa_kv_block_schedule_scatter_sm80_kernel",
                          dim3(static_cast<unsigned>(scratch.scatter_ctas)), sm80::kThreads,
                          static_cast<int>(sm80::shared_bytes(scratch.ranks)), params,
                          scratch.counters, scratch.ranks);
}

}  // namespace

void run_kv_block_schedule(const KVBlockScheduleParams& params, const ExecContext& context) {
  const Scratch scratch = cut_scratch(params);
  launch_in_stream(
      context.op, "launching msa_kv_block_schedule_clear_sm80_kernel", false,
      sm80::msa_kv_block_schedule_clear_sm80_kernel,
      dim3(static_cast<unsigned>(
          std::min(kMostClearCtas, (scratch.counter_words + sm80::kThreads - 1) / sm80::kThreads))),
      sm80::kThreads, 0, static_cast<cudaStream_t>(context.stream),
      static_cast<uint32_t*>(params.workspace), scratch.counter_words);
  // Each launch takes what it needs of the shared memory. An SM has room for CTAs of both kernels,
  // so that scatter spreads over all SMs while count still runs; else its CTAs gather on those that
  // are free first.
  constexpr auto count = sm80::msa_kv_block_schedule_count_sm80_kernel;
  allow_shared_memory<count>(context.op, context.device, kMostSharedBytes);
  launch_portable<count>(context, "launching msa_kv_block_schedule_count_sm80_kernel",
                         dim3(static_cast<unsigned>(scratch.chunks)), sm80::kThreads,
                         static_cast<int>(sm80::shared_bytes(scratch.ranks)), params,
                         scratch.counters, scratch.ranks);
  if (scratch.num_rows <= sm80::kSummedRows) {
    scatter<false>(params, scratch, context);
    return;
  }
  launch_portable<sm80::msa_kv_block_schedule_scan_sm80_kernel<sm80::RowItems>>(
      context, "launching msa_kv_block_schedule_scan_sm80_kernel",
      dim3(static_cast<unsigned>(sm80::scan_ctas(scratch.num_rows))), sm80::kScanThreads, 0,
      sm80::ScanParams<sm80::RowItems>{scratch.num_rows,
                                       static_cast<uint32_t>(params.max_queries_per_item),
                                       params.row_ptr,
                                       {params.work_items},
                                       params.num_work_items,
                                       0,
                                       nullptr},
      scratch.counters);
  scatter<true>(params, scratch, context);
}

}  // namespace msa
