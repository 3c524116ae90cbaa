// The top-k launch that topk_blocks and select_blocks share.
#pragma once

#include "device/division.h"
#include "host/exec_context.h"
#include "step2_select/topk_blocks_params.h"

namespace msa::topk_blocks::sm80 {

struct TopkKernelParams {
  ScoresView scores;              // token t of ids is token t - first_token here
  const int32_t* visible_blocks;  // [T], or null: they follow from `batch`
  int64_t visible_stride;
  BatchView batch;
  Division tokens_each;  // tokens_of_each(batch)
  int64_t first_token;   // tokens [first_token, first_token + num_tokens) of ids are written
  int64_t num_tokens;
  // The kernel before this one has waited for all that came earlier, and writes nothing but scores:
  // the rest may be read while it still runs.
  bool after_scores;
  SelectRule rule;
  IdsView ids;
};

// max_blocks: the most blocks that a row is expected to have; it chooses the kernel, not the
// result.
void run_topk(const TopkKernelParams& params, int64_t max_blocks, const ExecContext& context);

}  // namespace msa::topk_blocks::sm80
