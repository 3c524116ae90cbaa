// Step 0, write: the keys, values and index keys of new tokens into their slots.
#pragma once

#include "common/views.h"
#include "host/exec_context.h"

namespace msa {

struct WriteCacheParams {
  RowsView k;                   // [T, Hkv, D]
  RowsView v;                   // [T, Hkv, D]
  RowsView index_k;             // [T, Di], data null without an indexer
  const int64_t* slot_mapping;  // [T]; a slot outside [0, pages * kBlock) skips its token
  int64_t slot_stride;
  PagedView k_cache;
  PagedView v_cache;
  PagedView index_k_cache;
  ScaleView k_scale;  // stored = k / scale, FP8 caches only (1 otherwise)
  ScaleView v_scale;
  int64_t num_tokens;
  int64_t num_kv_heads;
};

void run_write_cache(const WriteCacheParams& params, const ExecContext& context);

}  // namespace msa
