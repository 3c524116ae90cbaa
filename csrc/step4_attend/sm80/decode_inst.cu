// Host side of sparse_decode and paged_decode: how a call is cut, and which kernels serve it.
#include <algorithm>
#include <cstdlib>

#include "configs/built_configs.h"
#include "device/architecture.h"
#include "step4_attend/sm80/decode_kernel.cuh"

namespace msa {
namespace {

namespace sm80 = decode::sm80;

enum class Way { kPortable, kCluster, kStream, kPairs, kQuads, kTiles };

// A call, cut; by its shapes and the device alone.
struct Plan {
  DecodeParams params;
  Way way;
};

// Whether two tokens a CTA beat one. Tokens of a request share most blocks, but a CTA of two takes
// 1.7 (real selections) to 2 times as long, and half as many may fill the machine worse.
bool takes_pairs(const DecodeParams& params) {
  constexpr int64_t kManyTokens = 4;  // of a request; with fewer, pairs too often span two
  constexpr int64_t kEnough = 128;    // pairs: an SM each
  constexpr int64_t kResident = 264;  // CTAs, two on each of a Hopper's 132 SMs
  const auto rounds = [](int64_t ctas) { return (ctas + kResident - 1) / kResident; };
  const AttendParams& attend = params.attend;
  const int64_t pairs = (attend.batch.num_tokens + 1) / 2 * attend.num_kv_heads;
  if (params.tokens_each < kManyTokens || pairs < kEnough) return false;
  return pairs <= kResident / 2 || 7 * rounds(pairs) < 4 * rounds(params.num_units);
}

Plan plan_call(const AttendParams& attend, const IdsView& ids, int64_t blocks, bool sparse,
               const ExecContext& context) {
  DecodeParams params = plan_decode(attend, ids, blocks);
  if (!runs_sm90(context, attend.q.dtype, attend.k_cache.dtype)) return {params, Way::kPortable};
  const bool is_fp8 = attend.k_cache.dtype == DType::kFloat8E4M3, fits = fits_tensor_maps(attend);
  const char* quad = std::getenv("MSA_QUAD");
  const int mode = quad ? std::atoi(quad) : 1;
  if (sparse && !is_fp8 && params.tokens_each >= 4 && mode > 0 && params.ids.topk <= 32) {
    DecodeParams cut = params;
    cut.splits = decode_quad_splits(params, context);
    cut_drafts(cut);
    if (cut.splits > 0 && (mode == 2 || cut.tile_tokens == 0)) return {cut, Way::kQuads};
  }
  if (sparse && !is_fp8 && fits) {
    cut_drafts(params);
    if (params.tile_tokens > 0) return {params, Way::kTiles};
  }
  if (sparse && takes_pairs(params)) return {params, Way::kPairs};
  const ClusterCut cut = decode_cluster_cut(params, blocks, context);
  if (cut.splits == 0) {
    const bool streams = is_fp8 && params.splits == 1 && fits;
    return {params, streams ? Way::kStream : Way::kPortable};
  }
  params.splits = cut.splits;
  params.two_an_sm = cut.two_an_sm;
  return {params, Way::kCluster};
}

int64_t workspace_bytes(const Plan& plan) {
  const DecodeParams& params = plan.params;
  if (params.splits == 1 || plan.way != Way::kPortable) return 0;
  constexpr int64_t kRowBytes = kHeadDim * sizeof(float) + sizeof(float2);
  return params.num_units * params.splits * params.attend.group_size * kRowBytes;
}

template <typename Element, bool kSparse>
void launch(const DecodeParams& params, const ExecContext& context) {
  launch_portable<sm80::msa_decode_sm80_kernel<Element, kSparse>>(
      context, "launching msa_decode_sm80_kernel",
      dim3(static_cast<unsigned>(params.num_units * params.splits)), sm80::kThreads,
      sizeof(sm80::SharedStorage<sm80::kWarps>), params);
  if (params.splits == 1) return;
  launch_portable<sm80::msa_decode_merge_sm80_kernel>(
      context, "launching msa_decode_merge_sm80_kernel",
      dim3(static_cast<unsigned>(params.num_units * params.attend.group_size)), sm80::kThreads, 0,
      params);
}

template <bool kSparse>
void run(const Plan& plan, const ExecContext& context) {
  const DType q = plan.params.attend.q.dtype, cache = plan.params.attend.k_cache.dtype;
  const bool fp8 = cache == DType::kFloat8E4M3;
  require_built(context.op, q, cache);
  if (plan.way == Way::kCluster) return run_decode_cluster(plan.params, context, kSparse);
  if (plan.way == Way::kStream) return run_decode_stream(plan.params, context, kSparse);
  if (plan.way == Way::kPairs) return run_decode_pairs(plan.params, context);
  if (plan.way == Way::kQuads) return run_decode_quads(plan.params, context);
  if (plan.way == Way::kTiles) return run_decode_tiles(plan.params, context);
  if (fp8) return launch<__nv_fp8_e4m3, kSparse>(plan.params, context);
  return launch<__nv_bfloat16, kSparse>(plan.params, context);
}

Plan plan_sparse(const SparseAttendParams& params, const ExecContext& context) {
  return plan_call(params, params.ids, params.ids.topk, true, context);
}
Plan plan_paged(const AttendParams& params, const ExecContext& context) {
  return plan_call(params, IdsView{}, params.batch.max_pages, false, context);
}

}  // namespace

int64_t sparse_decode_workspace_bytes(const SparseAttendParams& params,
                                      const ExecContext& context) {
  return workspace_bytes(plan_sparse(params, context));
}
int64_t paged_decode_workspace_bytes(const AttendParams& params, const ExecContext& context) {
  return workspace_bytes(plan_paged(params, context));
}
void run_sparse_decode(const SparseAttendParams& params, const ExecContext& context) {
  run<true>(plan_sparse(params, context), context);
}
void run_paged_decode(const AttendParams& params, const ExecContext& context) {
  run<false>(plan_paged(params, context), context);
}

}  // namespace msa
