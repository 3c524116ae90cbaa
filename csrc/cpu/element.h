// Rows of kHeadDim elements inside strided views.
#pragma once

#include <cstdint>

#include "common/views.h"

namespace msa {

inline int64_t element_size(DType dtype) {
  switch (dtype) {
    case DType::kFloat8E4M3:
      return 1;
    case DType::kBFloat16:
      return 2;
    case DType::kInt64:
      return 8;
    default:
      return 4;
  }
}

inline char* row_at(const RowsView& view, int64_t token, int64_t head) {
  return static_cast<char*>(view.data) +
         (token * view.token_stride + head * view.head_stride) * element_size(view.dtype);
}

// The first slot of a page, as one head sees it; slots follow at view.token_stride elements.
inline char* page_at(const PagedView& view, int64_t page, int64_t head) {
  return static_cast<char*>(view.data) +
         (page * view.page_stride + head * view.head_stride) * element_size(view.dtype);
}

inline float scale_of(const ScaleView& scale, int64_t head) {
  return scale.data ? scale.data[head * scale.head_stride] : scale.value;
}

inline int64_t id_at(const IdsView& ids, int64_t head, int64_t token, int64_t slot) {
  const int64_t offset = head * ids.head_stride + token * ids.token_stride + slot * ids.slot_stride;
  return ids.dtype == DType::kInt64 ? static_cast<const int64_t*>(ids.data)[offset]
                                    : static_cast<const int32_t*>(ids.data)[offset];
}

// The blocks that count in a row of a selection, sorted ascending: of its first min(K, visible)
// entries those in [0, visible); duplicates stay. Returns how many.
inline int selected_blocks(const IdsView& ids, int64_t head, int64_t token, int64_t visible,
                           int32_t blocks[kMaxTopk]) {
  const int64_t listed = ids.topk < visible ? ids.topk : visible;
  int count = 0;
  for (int64_t slot = 0; slot < listed; ++slot) {
    const int64_t block = id_at(ids, head, token, slot);
    if (block < 0 || block >= visible) continue;
    int place = count++;
    for (; place > 0 && blocks[place - 1] > block; --place) blocks[place] = blocks[place - 1];
    blocks[place] = static_cast<int32_t>(block);
  }
  return count;
}

}  // namespace msa
