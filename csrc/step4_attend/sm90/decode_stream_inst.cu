// Host side of the stream kernel: tensor maps whose boxes are slices.
#include "step4_attend/sm90/decode_stream_kernel.cuh"
#include "step4_attend/sm90/tensor_maps.h"

namespace msa {
namespace {

namespace sm90 = decode::sm90;

template <bool kSparse>
void launch(const DecodeParams& params, const ExecContext& context) {
  constexpr auto kernel = sm90::msa_decode_stream_sm90_kernel<kSparse>;
  constexpr int kSharedBytes = sizeof(sm90::StreamStorage);
  constexpr int kTokens = sm90::Slice<sm90::Fp8>::kTokens;
  const AttendParams& attend = params.attend;
  raise_shared_memory_limit<kernel>(context.op, context.device, kSharedBytes);
  launch_dependent(context.op, "launching msa_decode_stream_sm90_kernel", kernel, params.num_units,
                   sm90::kStreamThreads, kSharedBytes, static_cast<cudaStream_t>(context.stream),
                   params, make_kv_map(attend.k_cache, attend, context, kTokens),
                   make_kv_map(attend.v_cache, attend, context, kTokens));
}

}  // namespace

void run_decode_stream(const DecodeParams& params, const ExecContext& context, bool sparse) {
  if (sparse) return launch<true>(params, context);
  return launch<false>(params, context);
}

}  // namespace msa
