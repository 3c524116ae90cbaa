// Step 1, score: the largest product of a query token's index head with the keys of each block.
#pragma once

#include "common/views.h"
#include "host/exec_context.h"

namespace msa {

struct IndexScoreParams {
  RowsView index_q;         // [T, Hi, Di]
  PagedView index_k_cache;  // [pages, 1, 128, Di], dtype of index_q
  BatchView batch;
  ScoresView scores;     // [Hi, T, max_pages], -inf where nothing is visible
  int64_t max_seqlen_q;  // hint, 0 where none was given
};

void run_index_score(const IndexScoreParams& params, const ExecContext& context);

}  // namespace msa
