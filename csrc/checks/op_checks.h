// One check per operator: the only place where inputs are judged, on every device alike.
// Values that live on the device (lengths, ids, table entries, slots) are not read here; kernels
// bound them instead, so that a call never synchronises and can be captured in a CUDA graph.
#pragma once

#include <vector>

#include "host/tensor_info.h"

namespace msa {

struct BatchArgs {
  TensorInfo block_table, cu_seqlens_q, seq_lens;
};

void check_write_cache(const TensorInfo& k, const TensorInfo& v, const TensorInfo& index_k,
                       const TensorInfo& slot_mapping, const TensorInfo& k_cache,
                       const TensorInfo& v_cache, const TensorInfo& index_k_cache,
                       const TensorInfo& k_scale, const TensorInfo& v_scale);

void check_index_score(const TensorInfo& index_q, const TensorInfo& index_k_cache,
                       const BatchArgs& batch, const TensorInfo& scores);

void check_topk_blocks(const TensorInfo& scores, const TensorInfo& visible_blocks, int64_t topk,
                       int64_t init_blocks, int64_t local_blocks, const TensorInfo& ids);

void check_select_blocks(const TensorInfo& index_q, const TensorInfo& index_k_cache,
                         const BatchArgs& batch, int64_t topk, int64_t init_blocks,
                         int64_t local_blocks, const TensorInfo& ids);

void check_kv_block_schedule(const TensorInfo& ids, const TensorInfo& cu_seqlens_q,
                             const TensorInfo& seq_lens, int64_t max_blocks,
                             int64_t max_queries_per_item);

// Also that every view page fits int32: the kernels compute them without a further look.
void check_decode_view(const TensorInfo& ids, const BatchArgs& batch, int64_t num_pages,
                       int64_t page_step, int64_t head_step, const TensorInfo& page_table,
                       const TensorInfo& kv_lens);

// sparse_prefill and sparse_decode: op names the caller.
void check_sparse_attend(const char* op, const TensorInfo& q, const TensorInfo& k_cache,
                         const TensorInfo& v_cache, const TensorInfo& ids, const BatchArgs& batch,
                         const TensorInfo& k_scale, const TensorInfo& v_scale,
                         const TensorInfo& out, const TensorInfo& lse);

// batch holds page_table, kv_lens and, where given, cu_seqlens_q.
void check_paged_decode(const TensorInfo& q, const TensorInfo& k_cache, const TensorInfo& v_cache,
                        const BatchArgs& batch, const TensorInfo& k_scale,
                        const TensorInfo& v_scale, const TensorInfo& out, const TensorInfo& lse);

void check_merge_lse(const TensorInfo& outs, const TensorInfo& lses, const TensorInfo& out,
                     const TensorInfo& lse);

// The two lists have `num_outs` and `num_lses` members.
void check_merge_lse_parts(const TensorInfo* outs, int64_t num_outs, const TensorInfo* lses,
                           int64_t num_lses);

// dtype_name: of `dtype`, the result's, for messages.
void check_normalize_patches(const TensorInfo& patches, const std::vector<double>& mean,
                             const std::vector<double>& stddev, int64_t patch, int64_t temporal,
                             DType dtype, const char* dtype_name, const TensorInfo& out);

}  // namespace msa
