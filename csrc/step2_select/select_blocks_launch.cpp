#include "bindings/launch_functions.h"
#include "checks/op_checks.h"
#include "host/launch.h"
#include "step2_select/select_blocks_params.h"

namespace msa {
namespace {

// ids: written when given, allocated otherwise.
Tensor select(const Tensor& index_q, const Tensor& index_k_cache, const Tensor& block_table,
              const Tensor& cu_seqlens_q, const Tensor& seq_lens, const SelectRule& rule,
              OptionalInt max_seqlen_q, OptionalInt max_seqlen_k, const OptionalTensor& ids) {
  const TensorInfo q = info("index_q", index_q), cache = info("index_k_cache", index_k_cache);
  const BatchArgs batch{info("block_table", block_table), info("cu_seqlens_q", cu_seqlens_q),
                        info("seq_lens", seq_lens)};
  check_select_blocks(q, cache, batch, rule.topk, rule.init_blocks, rule.local_blocks,
                      info("ids", ids));

  const Tensor result =
      ids ? *ids : empty_like_device(index_q, {q.size(1), q.size(0), rule.topk}, ScalarType::Int);
  if (result.numel() == 0) return result;
  SelectBlocksParams params{};
  params.index_q = rows_view(q);
  params.index_k_cache = paged_view(cache);
  params.batch = batch_view(batch.cu_seqlens_q, batch.seq_lens, batch.block_table, q.size(0));
  params.rule = rule;
  params.ids = ids_view(info("ids", result));
  params.max_seqlen_q = max_seqlen_q.value_or(0);
  params.max_seqlen_k = max_seqlen_k.value_or(0);
  const Tensor workspace =
      empty_like_device(index_q, {select_blocks_workspace_bytes(params)}, ScalarType::Byte);
  params.workspace = workspace.data_ptr();
  run_select_blocks(params, ExecScope("select_blocks", index_q));
  return result;
}

}  // namespace

Tensor launch_select_blocks(const Tensor& index_q, const Tensor& index_k_cache,
                            const Tensor& block_table, const Tensor& cu_seqlens_q,
                            const Tensor& seq_lens, int64_t topk, int64_t init_blocks,
                            int64_t local_blocks, OptionalInt max_seqlen_q,
                            OptionalInt max_seqlen_k) {
  return select(index_q, index_k_cache, block_table, cu_seqlens_q, seq_lens,
                {topk, init_blocks, local_blocks}, max_seqlen_q, max_seqlen_k, std::nullopt);
}

void launch_select_blocks_out(const Tensor& index_q, const Tensor& index_k_cache,
                              const Tensor& block_table, const Tensor& cu_seqlens_q,
                              const Tensor& seq_lens, int64_t topk, int64_t init_blocks,
                              int64_t local_blocks, OptionalInt max_seqlen_q,
                              OptionalInt max_seqlen_k, const Tensor& ids) {
  select(index_q, index_k_cache, block_table, cu_seqlens_q, seq_lens,
         {topk, init_blocks, local_blocks}, max_seqlen_q, max_seqlen_k, ids);
}

}  // namespace msa
