#include "device/dependent_launch.cuh"
#include "step3_view/sm80/decode_view_kernel.cuh"

namespace msa {

namespace sm80 = decode_view::sm80;

void run_decode_view(const DecodeViewParams& params, const ExecContext& context) {
  const int64_t rows = params.batch.num_tokens * params.ids.num_heads;
  launch_portable<sm80::msa_decode_view_sm80_kernel>(
      context, "launching msa_decode_view_sm80_kernel",
      dim3(static_cast<unsigned>((rows + sm80::kWarps - 1) / sm80::kWarps)), sm80::kWarps * 32, 0,
      params, tokens_of_each(params.batch));
}

}  // namespace msa
