#include "bindings/launch_functions.h"
#include "checks/op_checks.h"
#include "host/launch.h"
#include "step3_view/decode_view_params.h"

namespace msa {

TwoTensors launch_decode_view(const Tensor& ids, const Tensor& block_table,
                              const Tensor& cu_seqlens_q, const Tensor& seq_lens, int64_t num_pages,
                              int64_t page_step, int64_t head_step) {
  const TensorInfo ids_info = info("ids", ids);
  const BatchArgs batch{info("block_table", block_table), info("cu_seqlens_q", cu_seqlens_q),
                        info("seq_lens", seq_lens)};
  check_decode_view(ids_info, batch, num_pages, page_step, head_step);

  const int64_t num_rows = ids_info.size(0) * ids_info.size(1);
  const Tensor page_table = empty_like_device(ids, {num_rows, ids_info.size(2)}, ScalarType::Int);
  const Tensor kv_lens = empty_like_device(ids, {num_rows}, ScalarType::Int);
  if (num_rows == 0) return {page_table, kv_lens};
  DecodeViewParams params{};
  params.ids = ids_view(ids_info);
  params.batch =
      batch_view(batch.cu_seqlens_q, batch.seq_lens, batch.block_table, ids_info.size(1));
  params.num_pages = num_pages;
  params.page_step = page_step;
  params.head_step = head_step;
  params.page_table = static_cast<int32_t*>(page_table.data_ptr());
  params.kv_lens = static_cast<int32_t*>(kv_lens.data_ptr());
  run_decode_view(params, ExecScope("decode_view", ids));
  return {page_table, kv_lens};
}

}  // namespace msa
