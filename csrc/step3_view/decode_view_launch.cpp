#include "bindings/launch_functions.h"
#include "checks/op_checks.h"
#include "host/launch.h"
#include "step3_view/decode_view_params.h"

namespace msa {

namespace {

// page_table, kv_lens: written when given, allocated otherwise.
TwoTensors view(const Tensor& ids, const Tensor& block_table, const Tensor& cu_seqlens_q,
                const Tensor& seq_lens, int64_t num_pages, int64_t page_step, int64_t head_step,
                const OptionalTensor& page_table, const OptionalTensor& kv_lens) {
  const TensorInfo ids_info = info("ids", ids);
  const BatchArgs batch{info("block_table", block_table), info("cu_seqlens_q", cu_seqlens_q),
                        info("seq_lens", seq_lens)};
  check_decode_view(ids_info, batch, num_pages, page_step, head_step,
                    info("page_table", page_table), info("kv_lens", kv_lens));

  const int64_t num_rows = ids_info.size(0) * ids_info.size(1);
  const Tensor table = page_table
                           ? *page_table
                           : empty_like_device(ids, {num_rows, ids_info.size(2)}, ScalarType::Int);
  const Tensor lens = kv_lens ? *kv_lens : empty_like_device(ids, {num_rows}, ScalarType::Int);
  if (num_rows == 0) return {table, lens};
  const TensorInfo table_info = info("page_table", table), lens_info = info("kv_lens", lens);
  DecodeViewParams params{};
  params.ids = ids_view(ids_info);
  params.batch =
      batch_view(batch.cu_seqlens_q, batch.seq_lens, batch.block_table, ids_info.size(1));
  params.num_pages = num_pages;
  params.page_step = page_step;
  params.head_step = head_step;
  params.page_table = static_cast<int32_t*>(table_info.data);
  params.table_row_stride = table_info.stride(0);
  params.table_entry_stride = table_info.stride(1);
  params.kv_lens = static_cast<int32_t*>(lens_info.data);
  params.kv_lens_stride = lens_info.stride(0);
  run_decode_view(params, ExecScope("decode_view", ids));
  return {table, lens};
}

}  // namespace

TwoTensors launch_decode_view(const Tensor& ids, const Tensor& block_table,
                              const Tensor& cu_seqlens_q, const Tensor& seq_lens, int64_t num_pages,
                              int64_t page_step, int64_t head_step) {
  return view(ids, block_table, cu_seqlens_q, seq_lens, num_pages, page_step, head_step,
              std::nullopt, std::nullopt);
}

void launch_decode_view_out(const Tensor& ids, const Tensor& block_table,
                            const Tensor& cu_seqlens_q, const Tensor& seq_lens, int64_t num_pages,
                            int64_t page_step, int64_t head_step, const Tensor& page_table,
                            const Tensor& kv_lens) {
  view(ids, block_table, cu_seqlens_q, seq_lens, num_pages, page_step, head_step, page_table,
       kv_lens);
}

}  // namespace msa
