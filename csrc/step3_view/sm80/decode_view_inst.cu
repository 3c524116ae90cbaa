#include <algorithm>

#include "device/dependent_launch.cuh"
#include "step3_view/sm80/decode_view_kernel.cuh"

namespace msa {

namespace sm80 = decode_view::sm80;

void run_decode_view(const DecodeViewParams& params, const ExecContext& context) {
  const int64_t heads = params.ids.num_heads, warps = std::min<int64_t>(heads, sm80::kWarps);
  const dim3 grid(static_cast<unsigned>(params.batch.num_tokens),
                  static_cast<unsigned>((heads + warps - 1) / warps));
  launch_portable<sm80::msa_decode_view_sm80_kernel>(
      context, "launching msa_decode_view_sm80_kernel", grid, static_cast<int>(warps * 32),
      sm80::kSharedBytes, params, tokens_of_each(params.batch));
}

}  // namespace msa
