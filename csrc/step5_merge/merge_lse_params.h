// Step 5, merge: partial attention results over disjoint keys into the result over all of them.
#pragma once

#include "common/views.h"
#include "host/exec_context.h"

namespace msa {

// Parts in tensors of their own, passed by value to the kernel.
constexpr int kMaxSeparateParts = 16;

struct MergePart {
  const void* out;   // [T, H, D], the part's result; not read where its LSE is -inf
  const float* lse;  // [T, H], natural logarithm
  int64_t out_token_stride, out_head_stride;
  int64_t lse_token_stride, lse_head_stride;
};

struct MergeLseParams {
  // Stacked parts: parts[0] is the first, part p lies p strides further. Separate: parts[p].
  MergePart parts[kMaxSeparateParts];
  int64_t out_part_stride;
  int64_t lse_part_stride;
  bool stacked;
  DType dtype;  // of the parts and of out: kFloat32 or kBFloat16
  int64_t num_parts;
  int64_t num_tokens;
  int64_t num_heads;
  RowsView out;  // [T, H, D]
  LseView lse;   // [T, H]
};

void run_merge_lse(const MergeLseParams& params, const ExecContext& context);

}  // namespace msa
