// Step 2, select: the K best blocks of each (index head, token) from their scores.
#pragma once

#include "common/views.h"
#include "host/exec_context.h"

namespace msa {

// Which blocks win: forced ones first, then by score; ties go to the lower id.
struct SelectRule {
  int64_t topk;          // K, 1 to kMaxTopk
  int64_t init_blocks;   // first blocks, always selected
  int64_t local_blocks;  // last visible blocks, always selected
};

struct TopkBlocksParams {
  ScoresView scores;              // [Hi, T, blocks]
  const int32_t* visible_blocks;  // [T], 0 marks a padding row
  int64_t visible_stride;
  int64_t num_tokens;
  SelectRule rule;
  IdsView ids;  // [Hi, T, K] int32, written: ascending, then -1
};

void run_topk_blocks(const TopkBlocksParams& params, const ExecContext& context);

}  // namespace msa
