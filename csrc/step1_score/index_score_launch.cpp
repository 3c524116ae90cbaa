#include "bindings/launch_functions.h"
#include "checks/op_checks.h"
#include "host/launch.h"
#include "step1_score/index_score_params.h"

namespace msa {
namespace {

// scores: written when given, allocated otherwise.
Tensor score(const Tensor& index_q, const Tensor& index_k_cache, const Tensor& block_table,
             const Tensor& cu_seqlens_q, const Tensor& seq_lens, OptionalInt max_seqlen_q,
             const OptionalTensor& scores) {
  const TensorInfo q = info("index_q", index_q), cache = info("index_k_cache", index_k_cache);
  const BatchArgs batch{info("block_table", block_table), info("cu_seqlens_q", cu_seqlens_q),
                        info("seq_lens", seq_lens)};
  check_index_score(q, cache, batch, info("scores", scores));

  const Tensor result =
      scores ? *scores
             : empty_like_device(index_q, {q.size(1), q.size(0), batch.block_table.size(1)},
                                 ScalarType::Float);
  if (result.numel() == 0) return result;
  IndexScoreParams params{};
  params.index_q = rows_view(q);
  params.index_k_cache = paged_view(cache);
  params.batch = batch_view(batch.cu_seqlens_q, batch.seq_lens, batch.block_table, q.size(0));
  params.scores = scores_view(info("scores", result));
  params.max_seqlen_q = max_seqlen_q.value_or(0);
  run_index_score(params, ExecScope("index_score", index_q));
  return result;
}

}  // namespace

Tensor launch_index_score(const Tensor& index_q, const Tensor& index_k_cache,
                          const Tensor& block_table, const Tensor& cu_seqlens_q,
                          const Tensor& seq_lens, OptionalInt max_seqlen_q, OptionalInt) {
  return score(index_q, index_k_cache, block_table, cu_seqlens_q, seq_lens, max_seqlen_q,
               std::nullopt);
}

void launch_index_score_out(const Tensor& index_q, const Tensor& index_k_cache,
                            const Tensor& block_table, const Tensor& cu_seqlens_q,
                            const Tensor& seq_lens, OptionalInt max_seqlen_q, OptionalInt,
                            const Tensor& scores) {
  score(index_q, index_k_cache, block_table, cu_seqlens_q, seq_lens, max_seqlen_q, scores);
}

}  // namespace msa
