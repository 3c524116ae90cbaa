#include "step4_attend/sm90/decode_pair_kernel.cuh"

namespace msa {
namespace {

namespace sm90 = decode::sm90;

template <typename Element, int kWarps>
void launch(const DecodeParams& params, const ExecContext& context) {
  const int64_t pairs = (params.attend.batch.num_tokens + 1) / sm90::kPairTokens;
  launch_portable<sm90::msa_decode_pair_sm90_kernel<Element, kWarps>>(
      context, "launching msa_decode_pair_sm90_kernel",
      dim3(static_cast<unsigned>(pairs * params.attend.num_kv_heads)), kWarps * 32,
      sizeof(sm90::PairStorage<kWarps>), params);
}

// Up to so many CTAs have an SM each: more warps for each of them.
constexpr int64_t kCtasOfAnSm = 132;

template <typename Element>
void launch_for(const DecodeParams& params, const ExecContext& context) {
  const int64_t pairs = (params.attend.batch.num_tokens + 1) / sm90::kPairTokens;
  if (pairs * params.attend.num_kv_heads <= kCtasOfAnSm) return launch<Element, 8>(params, context);
  return launch<Element, 4>(params, context);
}

}  // namespace

void run_decode_pairs(const DecodeParams& params, const ExecContext& context) {
  if (params.attend.k_cache.dtype == DType::kFloat8E4M3) {
    return launch_for<__nv_fp8_e4m3>(params, context);
  }
  return launch_for<__nv_bfloat16>(params, context);
}

}  // namespace msa
