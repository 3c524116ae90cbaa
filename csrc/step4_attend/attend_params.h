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
};

// Scratch memory of a call on the context's device; bounded, see docs/kernels.
int64_t sparse_prefill_workspace_bytes(const SparseAttendParams& params,
                                       const ExecContext& context);
int64_t sparse_decode_workspace_bytes(const SparseAttendParams& params, const ExecContext& context);
int64_t paged_decode_workspace_bytes(const AttendParams& params, const ExecContext& context);

void run_sparse_prefill(const SparseAttendParams& params, const ExecContext& context);
// Hopper's kernels, where runs_sm90() says so.
int64_t sparse_prefill_sm90_workspace_bytes(const SparseAttendParams& params);
void run_sparse_prefill_sm90(const SparseAttendParams& params, const ExecContext& context);
void run_sparse_decode(const SparseAttendParams& params, const ExecContext& context);
// Every page of batch.block_table counts; without cu_seqlens_q row t is token t and its whole
// length.
void run_paged_decode(const AttendParams& params, const ExecContext& context);

}  // namespace msa
