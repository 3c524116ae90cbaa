#include "bindings/launch_functions.h"
#include "checks/op_checks.h"
#include "host/launch.h"
#include "step3_remap/kv_block_schedule_params.h"

namespace msa {

std::tuple<Tensor, Tensor, Tensor, Tensor> launch_kv_block_schedule(const Tensor& ids,
                                                                    const Tensor& cu_seqlens_q,
                                                                    const Tensor& seq_lens,
                                                                    int64_t max_blocks,
                                                                    int64_t max_queries_per_item) {
  const TensorInfo ids_info = info("ids", ids), lens = info("seq_lens", seq_lens);
  const TensorInfo cu_seqlens = info("cu_seqlens_q", cu_seqlens_q);
  check_kv_block_schedule(ids_info, cu_seqlens, lens, max_blocks, max_queries_per_item);

  const int64_t num_rows = ids_info.size(0) * lens.size(0) * max_blocks;
  const int64_t num_pairs = ids_info.numel();
  const int64_t max_items = max_work_items(num_rows, num_pairs, max_queries_per_item);
  const Tensor row_ptr = empty_like_device(ids, {num_rows + 1}, ScalarType::Int);
  const Tensor pairs = empty_like_device(ids, {num_pairs}, ScalarType::Int);
  const Tensor work_items = empty_like_device(ids, {max_items, 3}, ScalarType::Int);
  const Tensor num_work_items = empty_like_device(ids, {1}, ScalarType::Int);

  KVBlockScheduleParams params{};
  params.ids = ids_view(ids_info);
  params.batch = batch_view(cu_seqlens, lens, TensorInfo{}, ids_info.size(1));
  params.batch.max_pages = max_blocks;
  params.max_queries_per_item = max_queries_per_item;
  params.row_ptr = static_cast<int32_t*>(row_ptr.data_ptr());
  params.pairs = static_cast<int32_t*>(pairs.data_ptr());
  params.work_items = static_cast<int32_t*>(work_items.data_ptr());
  params.num_work_items = static_cast<int32_t*>(num_work_items.data_ptr());
  params.max_work_items = max_items;
  const Tensor workspace =
      empty_like_device(ids, {kv_block_schedule_workspace_bytes(params)}, ScalarType::Byte);
  params.workspace = workspace.data_ptr();
  run_kv_block_schedule(params, ExecScope("kv_block_schedule", ids));
  return {row_ptr, pairs, work_items, num_work_items};
}

}  // namespace msa
