// Step 3 of prefill, remap: {q -> blocks} into {block -> q}, cut into even work items.
#pragma once

#include "common/views.h"
#include "host/exec_context.h"

namespace msa {

// A row is one (KV head h, request b, block j): row = (h * B + b) * max_blocks + j.
struct KVBlockScheduleParams {
  IdsView ids;      // [Hkv, T, K]
  BatchView batch;  // the operator knows no block table; max_pages = max_blocks
  int64_t max_queries_per_item;
  int32_t* row_ptr;         // [Hkv * B * max_blocks + 1]
  int32_t* pairs;           // [Hkv * T * K]: t * K + k, in any order within a row, -1 past the last
  int32_t* work_items;      // [max_work_items, 3]: row, begin, end; -1 past num_work_items
  int32_t* num_work_items;  // [1]
  int64_t max_work_items;
  void* workspace;  // kv_block_schedule_workspace_bytes(), any contents
};

// Scratch memory of a schedule on this library's device.
int64_t kv_block_schedule_workspace_bytes(const KVBlockScheduleParams& params);

// Work items that any selection of `num_pairs` entries over `num_rows` rows fits in.
inline int64_t max_work_items(int64_t num_rows, int64_t num_pairs, int64_t max_queries_per_item) {
  const int64_t non_empty_rows = num_rows < num_pairs ? num_rows : num_pairs;
  return non_empty_rows + num_pairs / max_queries_per_item;
}

void run_kv_block_schedule(const KVBlockScheduleParams& params, const ExecContext& context);

}  // namespace msa
