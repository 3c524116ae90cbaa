#include <algorithm>

#include "configs/built_configs.h"
#include "device/cuda_errors.h"
#include "step3_remap/sm80/kv_block_schedule_kernel.cuh"

namespace msa {

namespace sm80 = kv_block_schedule::sm80;

namespace {

// Counters, which are cleared, then ranks; cut from the workspace.
struct Scratch {
  sm80::Workspace counters;
  int64_t counter_bytes;
  sm80::Ranks ranks;
  int64_t num_rows, bytes;
};

Scratch cut_scratch(const KVBlockScheduleParams& params) {
  Scratch scratch;
  const int64_t head_rows = params.batch.num_requests * params.batch.max_pages;
  const int64_t chunks = (params.batch.num_tokens + sm80::kChunkTokens - 1) / sm80::kChunkTokens;
  const int64_t entries = params.ids.num_heads * params.batch.num_tokens * params.ids.topk;
  scratch.num_rows = params.ids.num_heads * head_rows;
  scratch.counters = sm80::split_workspace(params.workspace, scratch.num_rows);
  scratch.counter_bytes = sm80::counter_bytes(scratch.num_rows);
  scratch.ranks.entry_rank = scratch.counters.ticket + 1;
  scratch.ranks.chunk_base = scratch.ranks.entry_rank + entries;
  scratch.ranks.chunk_rows = std::min(head_rows, int64_t{kHistogramRows});
  scratch.ranks.chunks = static_cast<int32_t>(chunks);
  scratch.bytes =
      scratch.counter_bytes + (entries + params.ids.num_heads * chunks * scratch.ranks.chunk_rows) *
                                  int64_t{sizeof(uint32_t)};
  return scratch;
}

}  // namespace

int64_t kv_block_schedule_workspace_bytes(const KVBlockScheduleParams& params) {
  return cut_scratch(params).bytes;
}

void run_kv_block_schedule(const KVBlockScheduleParams& params, const ExecContext& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const Scratch scratch = cut_scratch(params);
  const auto grid = static_cast<unsigned>(params.ids.num_heads * scratch.ranks.chunks);
  const auto shared_bytes = static_cast<size_t>(scratch.ranks.chunk_rows) * sizeof(uint32_t);
  check_cuda(context.op, cudaMemsetAsync(params.workspace, 0, scratch.counter_bytes, stream),
             "clearing the counters");
  if (grid > 0) {
    sm80::msa_kv_block_schedule_count_sm80_kernel<<<grid, sm80::kThreads, shared_bytes, stream>>>(
        params, scratch.counters, scratch.ranks);
  }
  sm80::msa_kv_block_schedule_scan_sm80_kernel<sm80::RowItems>
      <<<static_cast<unsigned>(sm80::scan_ctas(scratch.num_rows)), sm80::kScanThreads, 0, stream>>>(
          {scratch.num_rows,
           static_cast<uint32_t>(params.max_queries_per_item),
           params.row_ptr,
           {params.work_items},
           params.num_work_items,
           0,
           nullptr},
          scratch.counters);
  if (grid > 0) {
    sm80::msa_kv_block_schedule_scatter_sm80_kernel<<<grid, sm80::kThreads, 0, stream>>>(
        params, scratch.counters, scratch.ranks);
  }
  sm80::msa_kv_block_schedule_fill_sm80_kernel<<<256, sm80::kThreads, 0, stream>>>(
      params, scratch.num_rows, params.ids.num_heads * params.batch.num_tokens * params.ids.topk);
  check_cuda(context.op, cudaGetLastError(), "a launch of msa_kv_block_schedule");
}

}  // namespace msa
