// Host side of sparse_decode and paged_decode: how a call is cut, and which kernels serve it.
#include <algorithm>

#include "configs/built_configs.h"
#include "device/architecture.h"
#include "step4_attend/sm80/decode_kernel.cuh"

namespace msa {
namespace {

namespace sm80 = decode::sm80;

enum class Way { kPortable, kCluster, kPairs };

// Which kernels serve the call, by its shapes and the device.
Way way_of(const DecodeParams& params, const ExecContext& context, bool sparse) {
  const BatchView& batch = params.attend.batch;
  if (compute_capability(context) != 90) return Way::kPortable;
  // Tokens of a request share most blocks; in pairs, if there are enough of them for the machine.
  const bool many_tokens = batch.num_tokens >= 2 * std::max<int64_t>(1, batch.num_requests);
  const int64_t pairs = (batch.num_tokens + 1) / 2 * params.attend.num_kv_heads;
  if (sparse && many_tokens && pairs >= kSmallCtas) return Way::kPairs;
  const bool is_small =
      params.splits <= kMaxClusterSplits && params.num_units * params.splits <= kSmallCtas;
  return is_small ? Way::kCluster : Way::kPortable;
}

int64_t workspace_bytes(const DecodeParams& params, const ExecContext& context, bool sparse) {
  if (params.splits == 1 || way_of(params, context, sparse) != Way::kPortable) return 0;
  constexpr int64_t kRowBytes = kHeadDim * sizeof(float) + sizeof(float2);
  return params.num_units * params.splits * params.attend.group_size * kRowBytes;
}

template <typename Element, bool kSparse>
void launch(const DecodeParams& params, const ExecContext& context) {
  launch_portable<sm80::msa_decode_sm80_kernel<Element, kSparse>>(
      context, "launching msa_decode_sm80_kernel", params.num_units * params.splits, sm80::kThreads,
      sizeof(sm80::SharedStorage<sm80::kWarps>), params);
  if (params.splits == 1) return;
  launch_portable<sm80::msa_decode_merge_sm80_kernel>(
      context, "launching msa_decode_merge_sm80_kernel",
      params.num_units * params.attend.group_size, sm80::kThreads, 0, params);
}

template <bool kSparse>
void run(const DecodeParams& params, const ExecContext& context) {
  const DType q = params.attend.q.dtype, cache = params.attend.k_cache.dtype;
  const bool fp8 = cache == DType::kFloat8E4M3;
  if (q != DType::kBFloat16 || !(fp8 || cache == DType::kBFloat16)) {
    throw_not_built(context.op, q, cache);
  }
  const Way way = way_of(params, context, kSparse);
  if (way == Way::kCluster) return run_decode_cluster(params, context, kSparse);
  if (way == Way::kPairs) return run_decode_pairs(params, context);
  if (fp8) return launch<__nv_fp8_e4m3, kSparse>(params, context);
  return launch<__nv_bfloat16, kSparse>(params, context);
}

DecodeParams sparse_params(const SparseAttendParams& params) {
  return plan_decode(params, params.ids, params.ids.topk);
}
DecodeParams paged_params(const AttendParams& params) {
  return plan_decode(params, IdsView{}, params.batch.max_pages);
}

}  // namespace

int64_t sparse_decode_workspace_bytes(const SparseAttendParams& params,
                                      const ExecContext& context) {
  return workspace_bytes(sparse_params(params), context, true);
}
int64_t paged_decode_workspace_bytes(const AttendParams& params, const ExecContext& context) {
  return workspace_bytes(paged_params(params), context, false);
}
void run_sparse_decode(const SparseAttendParams& params, const ExecContext& context) {
  run<true>(sparse_params(params), context);
}
void run_paged_decode(const AttendParams& params, const ExecContext& context) {
  run<false>(paged_params(params), context);
}

}  // namespace msa
