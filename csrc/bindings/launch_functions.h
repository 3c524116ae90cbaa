// The host entry of every operator, one declaration each, in the order of op_schemas.cpp.
#pragma once

#include "host/torch_stable.h"

namespace msa {

using TwoTensors = std::tuple<Tensor, Tensor>;

void launch_write_cache(const Tensor& k, const Tensor& v, const OptionalTensor& index_k,
                        const Tensor& slot_mapping, const Tensor& k_cache, const Tensor& v_cache,
                        const OptionalTensor& index_k_cache, const OptionalTensor& k_scale,
                        const OptionalTensor& v_scale);

Tensor launch_index_score(const Tensor& index_q, const Tensor& index_k_cache,
                          const Tensor& block_table, const Tensor& cu_seqlens_q,
                          const Tensor& seq_lens, OptionalInt max_seqlen_q,
                          OptionalInt max_seqlen_k);
void launch_index_score_out(const Tensor& index_q, const Tensor& index_k_cache,
                            const Tensor& block_table, const Tensor& cu_seqlens_q,
                            const Tensor& seq_lens, OptionalInt max_seqlen_q,
                            OptionalInt max_seqlen_k, const Tensor& scores);

Tensor launch_topk_blocks(const Tensor& scores, const Tensor& visible_blocks, int64_t topk,
                          int64_t init_blocks, int64_t local_blocks);
void launch_topk_blocks_out(const Tensor& scores, const Tensor& visible_blocks, int64_t topk,
                            int64_t init_blocks, int64_t local_blocks, const Tensor& ids);

Tensor launch_select_blocks(const Tensor& index_q, const Tensor& index_k_cache,
                            const Tensor& block_table, const Tensor& cu_seqlens_q,
                            const Tensor& seq_lens, int64_t topk, int64_t init_blocks,
                            int64_t local_blocks, OptionalInt max_seqlen_q,
                            OptionalInt max_seqlen_k);
void launch_select_blocks_out(const Tensor& index_q, const Tensor& index_k_cache,
                              const Tensor& block_table, const Tensor& cu_seqlens_q,
                              const Tensor& seq_lens, int64_t topk, int64_t init_blocks,
                              int64_t local_blocks, OptionalInt max_seqlen_q,
                              OptionalInt max_seqlen_k, const Tensor& ids);

std::tuple<Tensor, Tensor, Tensor, Tensor> launch_kv_block_schedule(const Tensor& ids,
                                                                    const Tensor& cu_seqlens_q,
                                                                    const Tensor& seq_lens,
                                                                    int64_t max_blocks,
                                                                    int64_t max_queries_per_item);

TwoTensors launch_decode_view(const Tensor& ids, const Tensor& block_table,
                              const Tensor& cu_seqlens_q, const Tensor& seq_lens, int64_t num_pages,
                              int64_t page_step, int64_t head_step);
void launch_decode_view_out(const Tensor& ids, const Tensor& block_table,
                            const Tensor& cu_seqlens_q, const Tensor& seq_lens, int64_t num_pages,
                            int64_t page_step, int64_t head_step, const Tensor& page_table,
                            const Tensor& kv_lens);

TwoTensors launch_sparse_prefill(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                 const Tensor& ids, const Tensor& block_table,
                                 const Tensor& cu_seqlens_q, const Tensor& seq_lens,
                                 std::optional<double> scale, const OptionalTensor& k_scale,
                                 const OptionalTensor& v_scale, bool return_lse,
                                 OptionalInt max_seqlen_q, OptionalInt max_seqlen_k,
                                 bool batch_invariant);
void launch_sparse_prefill_out(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                               const Tensor& ids, const Tensor& block_table,
                               const Tensor& cu_seqlens_q, const Tensor& seq_lens,
                               std::optional<double> scale, const OptionalTensor& k_scale,
                               const OptionalTensor& v_scale, OptionalInt max_seqlen_q,
                               OptionalInt max_seqlen_k, bool batch_invariant, const Tensor& out,
                               const OptionalTensor& lse);
TwoTensors launch_sparse_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                const Tensor& ids, const Tensor& block_table,
                                const Tensor& cu_seqlens_q, const Tensor& seq_lens,
                                std::optional<double> scale, const OptionalTensor& k_scale,
                                const OptionalTensor& v_scale, bool return_lse,
                                OptionalInt max_seqlen_q, OptionalInt max_seqlen_k);
void launch_sparse_decode_out(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                              const Tensor& ids, const Tensor& block_table,
                              const Tensor& cu_seqlens_q, const Tensor& seq_lens,
                              std::optional<double> scale, const OptionalTensor& k_scale,
                              const OptionalTensor& v_scale, OptionalInt max_seqlen_q,
                              OptionalInt max_seqlen_k, const Tensor& out,
                              const OptionalTensor& lse);
TwoTensors launch_paged_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                               const Tensor& page_table, const Tensor& kv_lens,
                               const OptionalTensor& cu_seqlens_q, std::optional<double> scale,
                               const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                               bool return_lse, OptionalInt max_seqlen_q, OptionalInt max_seqlen_k);
void launch_paged_decode_out(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                             const Tensor& page_table, const Tensor& kv_lens,
                             const OptionalTensor& cu_seqlens_q, std::optional<double> scale,
                             const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                             OptionalInt max_seqlen_q, OptionalInt max_seqlen_k, const Tensor& out,
                             const OptionalTensor& lse);

TwoTensors launch_merge_lse(const Tensor& outs, const Tensor& lses);
void launch_merge_lse_out(const Tensor& outs, const Tensor& lses, const Tensor& out,
                          const Tensor& lse);
TwoTensors launch_merge_lse_parts(const std::vector<Tensor>& outs, const std::vector<Tensor>& lses);

Tensor launch_normalize_patches(const Tensor& patches, const std::vector<double>& mean,
                                const std::vector<double>& stddev, int64_t patch, int64_t temporal,
                                ScalarType dtype);
void launch_normalize_patches_out(const Tensor& patches, const std::vector<double>& mean,
                                  const std::vector<double>& stddev, int64_t patch,
                                  int64_t temporal, const Tensor& out);

}  // namespace msa
