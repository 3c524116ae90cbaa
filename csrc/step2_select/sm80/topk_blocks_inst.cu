#include "configs/built_configs.h"
#include "device/architecture.h"
#include "step2_select/sm80/topk_blocks_kernel.cuh"

namespace msa {
namespace topk_blocks::sm80 {
namespace {

constexpr int64_t kManyRows = 2048;  // fill a large GPU with a CTA each

template <int kWarps, int kValues>
void launch(const TopkKernelParams& params, const ExecContext& context) {
  constexpr int kRows = kWarps == 1 ? kRowsPerCta : 1;
  const int64_t rows = params.num_tokens * params.scores.num_heads;
  launch_portable<msa_topk_blocks_sm80_kernel<kWarps, kValues>>(
      context, "the launch of msa_topk_blocks_sm80_kernel",
      static_cast<unsigned>((rows + kRows - 1) / kRows), kRows * kWarps * 32, 0, params);
}

}  // namespace

void run_topk(const TopkKernelParams& params, int64_t max_blocks, const ExecContext& context) {
  if (max_blocks <= 256) return launch<1, 8>(params, context);
  if (max_blocks <= 512) return launch<1, 16>(params, context);
  if (max_blocks <= 1024) return launch<1, 32>(params, context);
  // More warps a row end sooner, fewer take less of the machine.
  if (params.num_tokens * params.scores.num_heads > kManyRows) {
    if (max_blocks <= 2048) return launch<2, 32>(params, context);
    if (max_blocks <= 4096) return launch<4, 32>(params, context);
  }
  if (max_blocks <= 2048) return launch<8, 8>(params, context);
  if (max_blocks <= 8192) return launch<8, 32>(params, context);
  if (max_blocks <= 16384) return launch<16, 32>(params, context);
  return launch<16, 0>(params, context);
}

}  // namespace topk_blocks::sm80

void run_topk_blocks(const TopkBlocksParams& params, const ExecContext& context) {
  topk_blocks::sm80::TopkKernelParams kernel_params{};
  kernel_params.scores = params.scores;
  kernel_params.visible_blocks = params.visible_blocks;
  kernel_params.visible_stride = params.visible_stride;
  kernel_params.num_tokens = params.num_tokens;
  kernel_params.rule = params.rule;
  kernel_params.ids = params.ids;
  topk_blocks::sm80::run_topk(kernel_params, params.scores.num_blocks, context);
}

}  // namespace msa
