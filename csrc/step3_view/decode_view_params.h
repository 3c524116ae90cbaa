// Step 3 of decode, view: the selection as page tables over the cache seen as per-head pages.
#pragma once

#include "common/views.h"
#include "host/exec_context.h"

namespace msa {

struct DecodeViewParams {
  IdsView ids;  // [Hkv, T, K]
  BatchView batch;
  int64_t num_pages;    // of the cache; a page outside it is left out of its row
  int64_t page_step;    // view pages between physical pages
  int64_t head_step;    // view pages between heads
  int32_t* page_table;  // [T * Hkv, K], strides free: row t * Hkv + h, ascending blocks, then 0
  int64_t table_row_stride;
  int64_t table_entry_stride;
  int32_t* kv_lens;  // [T * Hkv]
  int64_t kv_lens_stride;
};

void run_decode_view(const DecodeViewParams& params, const ExecContext& context);

}  // namespace msa
