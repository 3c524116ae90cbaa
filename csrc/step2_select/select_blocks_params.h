// Steps 1 and 2 at once: index_q and the index cache -> ids. On CUDA the scores of a window of
// tokens lie in the workspace in between; the CPU keeps none.
#pragma once

#include "step2_select/topk_blocks_params.h"

namespace msa {

struct SelectBlocksParams {
  RowsView index_q;         // [T, Hi, Di]
  PagedView index_k_cache;  // [pages, 1, 128, Di], dtype of index_q
  BatchView batch;
  SelectRule rule;
  IdsView ids;           // [Hi, T, K] int32, written: ascending, then -1
  int64_t max_seqlen_q;  // hints, 0 where none was given
  int64_t max_seqlen_k;
  void* workspace;  // select_blocks_workspace_bytes(), any contents
};

// Scratch memory of a call on this library's device; bounded, see docs/kernels/select_blocks.md.
int64_t select_blocks_workspace_bytes(const SelectBlocksParams& params);

void run_select_blocks(const SelectBlocksParams& params, const ExecContext& context);

}  // namespace msa
