// FP8 prefill on Hopper: a selection of bounds and a few exact scores, instead of all exact scores.
#pragma once

#include "host/exec_context.h"
#include "step2_select/select_blocks_params.h"

namespace msa::select_blocks::sm90 {

constexpr int kLogMostRows = 17;  // of a window: a place in a list holds a row's number

// Whether a call's shapes let it pay, on Hopper; lengths are not known on the host. used_blocks: of
// a row, the table's width or what the caller's hint says.
bool bounds_pay(const SelectBlocksParams& params, int64_t used_blocks);

// Scratch memory of windows of `window_tokens` query tokens, `row_blocks` scores a row: a multiple
// of 8 that the table's width fits in, as bounds are stored 8 at a time.
int64_t bounded_workspace_bytes(const SelectBlocksParams& params, int64_t window_tokens,
                                int64_t row_blocks);

void run_bounded(const SelectBlocksParams& params, int64_t window_tokens, int64_t row_blocks,
                 const ExecContext& context);

}  // namespace msa::select_blocks::sm90
