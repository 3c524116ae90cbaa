// Host side of the pair kernel: how many warps a CTA has.
#include "step4_attend/sm90/decode_pair_kernel.cuh"

namespace msa {
namespace {

namespace sm90 = decode::sm90;

int64_t pair_units(const DecodeParams& params) {
  return (params.attend.batch.num_tokens + 1) / sm90::kPairTokens * params.attend.num_kv_heads;
}

template <typename Element, int kWarps>
void launch(const DecodeParams& params, const ExecContext& context) {
  launch_portable<sm90::msa_decode_pair_sm90_kernel<Element, kWarps>>(
      context, "launching msa_decode_pair_sm90_kernel",
      dim3(static_cast<unsigned>(pair_units(params))), kWarps * 32,
      sizeof(sm90::PairStorage<kWarps>), params);
}

}  // namespace

void run_decode_pairs(const DecodeParams& params, const ExecContext& context) {
  constexpr int64_t kSms = 132;  // up to so many CTAs have one each: more warps for each of them
  if (params.attend.k_cache.dtype == DType::kFloat8E4M3) {
    return launch<__nv_fp8_e4m3, 4>(params, context);
  }
  if (pair_units(params) <= kSms) return launch<__nv_bfloat16, 8>(params, context);
  return launch<__nv_bfloat16, 4>(params, context);
}

}  // namespace msa
