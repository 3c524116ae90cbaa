#include "bindings/launch_functions.h"
#include "checks/op_checks.h"
#include "host/launch.h"
#include "step2_select/topk_blocks_params.h"

namespace msa {
namespace {

// ids: written when given, allocated otherwise.
Tensor select(const Tensor& scores, const Tensor& visible_blocks, const SelectRule& rule,
              const OptionalTensor& ids) {
  const TensorInfo scores_info = info("scores", scores);
  const TensorInfo visible = info("visible_blocks", visible_blocks);
  check_topk_blocks(scores_info, visible, rule.topk, rule.init_blocks, rule.local_blocks,
                    info("ids", ids));

  const Tensor result =
      ids ? *ids
          : empty_like_device(scores, {scores_info.size(0), scores_info.size(1), rule.topk},
                              ScalarType::Int);
  if (result.numel() == 0) return result;
  TopkBlocksParams params{};
  params.scores = scores_view(scores_info);
  params.visible_blocks = static_cast<const int32_t*>(visible.data);
  params.visible_stride = visible.stride(0);
  params.num_tokens = scores_info.size(1);
  params.rule = rule;
  params.ids = ids_view(info("ids", result));
  run_topk_blocks(params, ExecScope("topk_blocks", scores));
  return result;
}

}  // namespace

Tensor launch_topk_blocks(const Tensor& scores, const Tensor& visible_blocks, int64_t topk,
                          int64_t init_blocks, int64_t local_blocks) {
  return select(scores, visible_blocks, {topk, init_blocks, local_blocks}, std::nullopt);
}

void launch_topk_blocks_out(const Tensor& scores, const Tensor& visible_blocks, int64_t topk,
                            int64_t init_blocks, int64_t local_blocks, const Tensor& ids) {
  select(scores, visible_blocks, {topk, init_blocks, local_blocks}, ids);
}

}  // namespace msa
