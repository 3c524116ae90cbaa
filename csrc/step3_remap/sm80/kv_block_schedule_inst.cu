#include "configs/built_configs.h"
#include "device/cuda_errors.h"
#include "step3_remap/sm80/kv_block_schedule_kernel.cuh"

namespace msa {

namespace sm80 = kv_block_schedule::sm80;

int64_t kv_block_schedule_workspace_bytes(int64_t num_rows) {
  const auto end = sm80::split_workspace(nullptr, num_rows).ticket + 1;
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(end));
}

void run_kv_block_schedule(const KVBlockScheduleParams& params, const ExecContext& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const int64_t num_rows =
      params.ids.num_heads * params.batch.num_requests * params.batch.max_pages;
  const int64_t window = (params.token_end - params.token_begin + 31) / 32 * 32;
  const int64_t units = params.ids.num_heads * params.ids.topk * window;
  const auto workspace = sm80::split_workspace(params.workspace, num_rows);
  const auto grid = static_cast<unsigned>((units + sm80::kThreads - 1) / sm80::kThreads);
  check_cuda(
      context.op,
      cudaMemsetAsync(params.workspace, 0, kv_block_schedule_workspace_bytes(num_rows), stream),
      "clearing the counters");
  if (grid > 0) {
    sm80::msa_kv_block_schedule_count_sm80_kernel<<<grid, sm80::kThreads, 0, stream>>>(params,
                                                                                       workspace);
  }
  sm80::msa_kv_block_schedule_scan_sm80_kernel<<<static_cast<unsigned>(sm80::scan_ctas(num_rows)),
                                                 sm80::kScanThreads, 0, stream>>>(
      {num_rows, static_cast<uint32_t>(params.max_queries_per_item), params.row_ptr, params.work_items,
       params.num_work_items, 0, nullptr},
      workspace);
  if (grid > 0) {
    sm80::msa_kv_block_schedule_scatter_sm80_kernel<<<grid, sm80::kThreads, 0, stream>>>(params,
                                                                                         workspace);
  }
  if (params.fill_tails) {
    sm80::msa_kv_block_schedule_fill_sm80_kernel<<<256, sm80::kThreads, 0, stream>>>(
        params, num_rows, params.ids.num_heads * params.batch.num_tokens * params.ids.topk);
  }
  check_cuda(context.op, cudaGetLastError(), "a launch of msa_kv_block_schedule");
}

}  // namespace msa
