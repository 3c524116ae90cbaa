// Step 3 of prefill: a work item of a request's block, without its pairs.
#pragma once

#include "device/common.cuh"
#include "device/positions.cuh"
#include "step3_remap/prefill_plan.h"

namespace msa {

// `begin` and `end`: the request's tokens; `length`: of its KV after this step.
__device__ __forceinline__ WorkItem block_item(int32_t head, int32_t block, int32_t page,
                                               int32_t begin, int32_t end, int32_t length) {
  WorkItem item{};
  item.page = page;
  item.head = head;
  item.written = length - block * kBlock;
  // Token t sees pos - block * 128 + 1 keys, and pos = length - (end - t).
  item.first_valid = item.written - end + 1;
  item.masked = item.written - (end - begin) < kBlock - 1;  // where the first of them stands
  return item;
}

__device__ __forceinline__ void store_item(WorkItem* items, int64_t index, const WorkItem& item) {
  auto* vectors = reinterpret_cast<int4*>(items + index);
  vectors[0] = make_int4(item.page, item.head, item.begin, item.end);
  vectors[1] = make_int4(item.first_valid, item.written, item.masked, item.by_head);
}

__device__ __forceinline__ WorkItem load_item(const WorkItem* items, int64_t index) {
  const auto* vectors = reinterpret_cast<const int4*>(items + index);
  const int4 first = vectors[0], second = vectors[1];
  return {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
}

// For the scan of the remap: items of the rows (KV head, request, block) of a round.
struct BlockItems {
  BatchView batch;
  WorkItem* items;

  using Item = WorkItem;
  __device__ __forceinline__ Item of_row(uint32_t row) const {
    const auto max_blocks = static_cast<uint32_t>(batch.max_pages);
    const auto num_requests = static_cast<uint32_t>(batch.num_requests);
    const uint32_t block = row % max_blocks, head_request = row / max_blocks;
    const uint32_t request = head_request % num_requests;
    return block_item(static_cast<int32_t>(head_request / num_requests),
                      static_cast<int32_t>(block), page_of(batch, request, block),
                      first_token_of(batch, request), first_token_of(batch, request + 1),
                      seq_len_of(batch, request));
  }
  __device__ __forceinline__ void write(int64_t index, Item item, int32_t begin,
                                        int32_t end) const {
    item.begin = begin;
    item.end = end;
    store_item(items, index, item);
  }
};

}  // namespace msa
