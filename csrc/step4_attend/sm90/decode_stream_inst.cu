// Host side of the stream kernel: tensor maps whose boxes are slices.
#include "step4_attend/sm90/decode_stream_kernel.cuh"
#include "step4_attend/sm90/tensor_maps.h"

namespace msa {
namespace {

namespace sm90 = decode::sm90;

// Slices of each of a stream's warps that displace what they find in L2. A stream gives up its own
// lines first, which spares dirty ones, but a long one would read to its end in what little of L2
// the dirty ones leave: its first 100 MB push them out. docs/kernels/select_blocks.md
int32_t kept_stream_slices(int64_t num_warps, int64_t slices_of_warp) {
  constexpr int64_t kSliceBytes = 2 * sm90::kPartBytes, kLongStream = 200 << 20, kKept = 100 << 20;
  if (num_warps * slices_of_warp * kSliceBytes <= kLongStream) return 0;
  return static_cast<int32_t>(kKept / (num_warps * kSliceBytes));
}

template <typename Element, bool kSparse>
void launch(const DecodeParams& params, const ExecContext& context) {
  constexpr auto kernel = sm90::msa_decode_stream_sm90_kernel<Element, kSparse>;
  constexpr int kSharedBytes = sizeof(sm90::StreamStorage);
  constexpr int kTokens = sm90::Slice<Element>::kTokens;
  const AttendParams& attend = params.attend;
  const int64_t blocks = kSparse ? params.ids.topk : attend.batch.max_pages;
  DecodeParams stream = params;
  stream.kept_slices =
      kept_stream_slices(params.num_units * sm90::kStreamWarps,
                         blocks * sm90::Slice<Element>::kPerBlock / sm90::kStreamWarps);
  raise_shared_memory_limit<kernel>(context.op, context.device, kSharedBytes);
  launch_dependent(context.op, "launching msa_decode_stream_sm90_kernel", kernel, params.num_units,
                   sm90::kStreamThreads, kSharedBytes, static_cast<cudaStream_t>(context.stream),
                   stream, make_kv_map(attend.k_cache, attend, context, kTokens),
                   make_kv_map(attend.v_cache, attend, context, kTokens));
}

template <bool kSparse>
void launch_for(const DecodeParams& params, const ExecContext& context) {
  if (params.attend.k_cache.dtype == DType::kFloat8E4M3) {
    return launch<__nv_fp8_e4m3, kSparse>(params, context);
  }
  return launch<__nv_bfloat16, kSparse>(params, context);
}

}  // namespace

void run_decode_stream(const DecodeParams& params, const ExecContext& context, bool sparse) {
  if (sparse) return launch_for<true>(params, context);
  return launch_for<false>(params, context);
}

}  // namespace msa
