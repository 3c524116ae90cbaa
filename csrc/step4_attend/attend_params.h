// Step 4, attend: what the attention operators have in common.
#pragma once

#include "common/views.h"
#include "host/exec_context.h"

namespace msa {

struct AttendParams {
  RowsView q;         // [T, Hq, D]
  PagedView k_cache;  // [pages, Hkv, 128, D]
  PagedView v_cache;
  BatchView batch;
  RowsView out;       // [T, Hq, D], q's dtype
  LseView lse;        // [T, Hq], natural logarithm; data may be null
  ScaleView k_scale;  // FP8 caches only (1 otherwise)
  ScaleView v_scale;
  float scale;           // of q . k, before the softmax
  int64_t num_kv_heads;  // Hkv
  int64_t group_size;    // G = Hq / Hkv
  void* workspace;       // <op>_workspace_bytes(), any contents
};

struct SparseAttendParams : AttendParams {
  IdsView ids;  // [Hkv, T, K]
  // sparse_prefill: a token's bits must not depend on the tokens beside it.
  bool batch_invariant;
  int64_t max_seqlen_k;  // hint, 0 where none was given
};

// Whether the caches and q can have tensor maps, which have no strides of 0, as expanded tensors
// do, and no empty axes.
inline bool fits_tensor_maps(const AttendParams& params) {
  const auto zero = [](int64_t size, int64_t stride) { return size > 1 && stride == 0; };
  for (const PagedView* cache : {&params.k_cache, &params.v_cache}) {
    if (cache->num_pages == 0 || zero(cache->num_pages, cache->page_stride) ||
        zero(params.num_kv_heads, cache->head_stride) || cache->token_stride == 0) {
      return false;
    }
  }
  return !zero(params.batch.num_tokens, params.q.token_stride) &&
         !zero(params.num_kv_heads * params.group_size, params.q.head_stride);
}

// Scratch memory of a call on the context's device; bounded, see docs/kernels.
int64_t sparse_prefill_workspace_bytes(const SparseAttendParams& params,
                                       const ExecContext& context);
int64_t sparse_decode_workspace_bytes(const SparseAttendParams& params, const ExecContext& context);
int64_t paged_decode_workspace_bytes(const AttendParams& params, const ExecContext& context);

void run_sparse_prefill(const SparseAttendParams& params, const ExecContext& context);
// Hopper's kernels, where runs_sm90() and fits_tensor_maps() say so.
int64_t sparse_prefill_sm90_workspace_bytes(const SparseAttendParams& params);
void run_sparse_prefill_sm90(const SparseAttendParams& params, const ExecContext& context);
void run_sparse_decode(const SparseAttendParams& params, const ExecContext& context);
// Every page of batch.block_table counts; without cu_seqlens_q row t is token t and its whole
// length.
void run_paged_decode(const AttendParams& params, const ExecContext& context);

}  // namespace msa
