// Host side of sparse_prefill, sparse_decode and paged_decode: they differ in where the blocks of a
// token come from (its ids, or every page of its row) and in the kernels that serve them.
#include <cmath>

#include "bindings/launch_functions.h"
#include "checks/op_checks.h"
#include "host/launch.h"
#include "step4_attend/attend_params.h"

namespace msa {
namespace {

struct Outputs {
  Tensor out, lse;
  TensorInfo lse_info;  // not defined: no LSE asked for
};

Outputs allocate(const Tensor& q, bool return_lse) {
  Outputs outputs;
  outputs.out = empty_like_device(q, {q.size(0), q.size(1), q.size(2)});
  outputs.lse = return_lse ? empty_like_device(q, {q.size(0), q.size(1)}, ScalarType::Float)
                           : empty_like_device(q, {0}, ScalarType::Float);
  if (return_lse) outputs.lse_info = info("lse", outputs.lse);
  return outputs;
}

// The caller's own tensors; .out overloads return nothing, so a missing LSE needs no tensor.
Outputs given(const Tensor& out, const OptionalTensor& lse) {
  return {out, lse.value_or(out), info("lse", lse)};
}

struct AttendArgs {
  TensorInfo q, k_cache, v_cache, k_scale, v_scale;
  BatchArgs batch;
  std::optional<double> scale;
};

void fill(AttendParams& params, const AttendArgs& args, const TensorInfo& out,
          const TensorInfo& lse) {
  params.q = rows_view(args.q);
  params.k_cache = paged_view(args.k_cache);
  params.v_cache = paged_view(args.v_cache);
  params.batch = batch_view(args.batch.cu_seqlens_q, args.batch.seq_lens, args.batch.block_table,
                            args.q.size(0));
  params.out = rows_view(out);
  params.lse = lse_view(lse);
  params.k_scale = scale_view(args.k_scale);
  params.v_scale = scale_view(args.v_scale);
  params.scale = static_cast<float>(args.scale.value_or(1.0 / std::sqrt(double{kHeadDim})));
  params.num_kv_heads = args.k_cache.size(1);
  params.group_size = args.q.size(1) / args.k_cache.size(1);
}

using RunSparse = void (*)(const SparseAttendParams&, const ExecContext&);
using WorkspaceBytes = int64_t (*)(const SparseAttendParams&, const ExecContext&);

TwoTensors attend_sparse(const char* op, RunSparse run, WorkspaceBytes workspace_bytes,
                         const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                         const Tensor& ids, const Tensor& block_table, const Tensor& cu_seqlens_q,
                         const Tensor& seq_lens, std::optional<double> scale,
                         const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                         bool return_lse, bool batch_invariant, OptionalInt max_seqlen_k,
                         const OptionalTensor& out, const OptionalTensor& lse) {
  const AttendArgs args{info("q", q),
                        info("k_cache", k_cache),
                        info("v_cache", v_cache),
                        info("k_scale", k_scale),
                        info("v_scale", v_scale),
                        {info("block_table", block_table), info("cu_seqlens_q", cu_seqlens_q),
                         info("seq_lens", seq_lens)},
                        scale};
  const TensorInfo ids_info = info("ids", ids);
  check_sparse_attend(op, args.q, args.k_cache, args.v_cache, ids_info, args.batch, args.k_scale,
                      args.v_scale, info("out", out), info("lse", lse));

  const Outputs outputs = out ? given(*out, lse) : allocate(q, return_lse);
  if (args.q.numel() == 0) return {outputs.out, outputs.lse};
  SparseAttendParams params{};
  fill(params, args, info("out", outputs.out), outputs.lse_info);
  params.ids = ids_view(ids_info);
  params.batch_invariant = batch_invariant;
  params.max_seqlen_k = max_seqlen_k.value_or(0);
  const ExecScope scope(op, q);
  const Tensor workspace = empty_like_device(q, {workspace_bytes(params, scope)}, ScalarType::Byte);
  params.workspace = workspace.data_ptr();
  run(params, scope);
  return {outputs.out, outputs.lse};
}

TwoTensors attend_paged(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                        const Tensor& page_table, const Tensor& kv_lens,
                        const OptionalTensor& cu_seqlens_q, std::optional<double> scale,
                        const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                        bool return_lse, const OptionalTensor& out, const OptionalTensor& lse) {
  const AttendArgs args{info("q", q),
                        info("k_cache", k_cache),
                        info("v_cache", v_cache),
                        info("k_scale", k_scale),
                        info("v_scale", v_scale),
                        {info("page_table", page_table), info("cu_seqlens_q", cu_seqlens_q),
                         info("kv_lens", kv_lens)},
                        scale};
  check_paged_decode(args.q, args.k_cache, args.v_cache, args.batch, args.k_scale, args.v_scale,
                     info("out", out), info("lse", lse));

  const Outputs outputs = out ? given(*out, lse) : allocate(q, return_lse);
  if (args.q.numel() == 0) return {outputs.out, outputs.lse};
  AttendParams params{};
  fill(params, args, info("out", outputs.out), outputs.lse_info);
  const ExecScope scope("paged_decode", q);
  const Tensor workspace =
      empty_like_device(q, {paged_decode_workspace_bytes(params, scope)}, ScalarType::Byte);
  params.workspace = workspace.data_ptr();
  run_paged_decode(params, scope);
  return {outputs.out, outputs.lse};
}

}  // namespace

TwoTensors launch_sparse_prefill(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                 const Tensor& ids, const Tensor& block_table,
                                 const Tensor& cu_seqlens_q, const Tensor& seq_lens,
                                 std::optional<double> scale, const OptionalTensor& k_scale,
                                 const OptionalTensor& v_scale, bool return_lse, OptionalInt,
                                 OptionalInt max_seqlen_k, bool batch_invariant) {
  return attend_sparse("sparse_prefill", run_sparse_prefill, sparse_prefill_workspace_bytes, q,
                       k_cache, v_cache, ids, block_table, cu_seqlens_q, seq_lens, scale, k_scale,
                       v_scale, return_lse, batch_invariant, max_seqlen_k, std::nullopt,
                       std::nullopt);
}

void launch_sparse_prefill_out(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                               const Tensor& ids, const Tensor& block_table,
                               const Tensor& cu_seqlens_q, const Tensor& seq_lens,
                               std::optional<double> scale, const OptionalTensor& k_scale,
                               const OptionalTensor& v_scale, OptionalInt, OptionalInt max_seqlen_k,
                               bool batch_invariant, const Tensor& out, const OptionalTensor& lse) {
  attend_sparse("sparse_prefill", run_sparse_prefill, sparse_prefill_workspace_bytes, q, k_cache,
                v_cache, ids, block_table, cu_seqlens_q, seq_lens, scale, k_scale, v_scale, false,
                batch_invariant, max_seqlen_k, out, lse);
}

TwoTensors launch_sparse_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                const Tensor& ids, const Tensor& block_table,
                                const Tensor& cu_seqlens_q, const Tensor& seq_lens,
                                std::optional<double> scale, const OptionalTensor& k_scale,
                                const OptionalTensor& v_scale, bool return_lse, OptionalInt,
                                OptionalInt) {
  return attend_sparse("sparse_decode", run_sparse_decode, sparse_decode_workspace_bytes, q,
                       k_cache, v_cache, ids, block_table, cu_seqlens_q, seq_lens, scale, k_scale,
                       v_scale, return_lse, false, std::nullopt, std::nullopt, std::nullopt);
}

void launch_sparse_decode_out(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                              const Tensor& ids, const Tensor& block_table,
                              const Tensor& cu_seqlens_q, const Tensor& seq_lens,
                              std::optional<double> scale, const OptionalTensor& k_scale,
                              const OptionalTensor& v_scale, OptionalInt, OptionalInt,
                              const Tensor& out, const OptionalTensor& lse) {
  attend_sparse("sparse_decode", run_sparse_decode, sparse_decode_workspace_bytes, q, k_cache,
                v_cache, ids, block_table, cu_seqlens_q, seq_lens, scale, k_scale, v_scale, false,
                false, std::nullopt, out, lse);
}

TwoTensors launch_paged_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                               const Tensor& page_table, const Tensor& kv_lens,
                               const OptionalTensor& cu_seqlens_q, std::optional<double> scale,
                               const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                               bool return_lse, OptionalInt, OptionalInt) {
  return attend_paged(q, k_cache, v_cache, page_table, kv_lens, cu_seqlens_q, scale, k_scale,
                      v_scale, return_lse, std::nullopt, std::nullopt);
}

void launch_paged_decode_out(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                             const Tensor& page_table, const Tensor& kv_lens,
                             const OptionalTensor& cu_seqlens_q, std::optional<double> scale,
                             const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                             OptionalInt, OptionalInt, const Tensor& out,
                             const OptionalTensor& lse) {
  attend_paged(q, k_cache, v_cache, page_table, kv_lens, cu_seqlens_q, scale, k_scale, v_scale,
               false, out, lse);
}

}  // namespace msa
