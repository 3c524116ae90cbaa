// Where a query token stands and which selected blocks count for it: the rules of the contract,
// once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/views.h"

namespace msa {

struct TokenPosition {
  int32_t request;  // -1: a padding row
  int32_t pos;  // position in the request; negative where the request is shorter than its queries
};

__device__ __forceinline__ int32_t seq_len_of(const BatchView& batch, int64_t request) {
  return batch.seq_lens[request * batch.seq_lens_stride];
}

__device__ __forceinline__ int32_t first_token_of(const BatchView& batch, int64_t request) {
  return batch.cu_seqlens_q[request * batch.cu_seqlens_stride];
}

// The request that token t belongs to, by bisection of cu_seqlens_q.
__device__ __forceinline__ TokenPosition find_position(const BatchView& batch, int32_t token) {
  if (token >= first_token_of(batch, batch.num_requests)) return {-1, -1};
  int32_t low = 0,
          high = static_cast<int32_t>(batch.num_requests);  // first[low] <= token < first[high]
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if (first_token_of(batch, middle) <= token) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int32_t end = first_token_of(batch, low + 1);
  return {low, seq_len_of(batch, low) - (end - token)};
}

// What find_position_by_warp() guesses by; on the host, since a division takes long on the device.
inline int32_t tokens_of_each(const BatchView& batch) {
  return static_cast<int32_t>(
      std::max<int64_t>(1, batch.num_tokens / std::max<int64_t>(1, batch.num_requests)));
}

// The same by a whole warp for one token, in few dependent loads: most decode batches have `each`
// tokens a request, so that request is looked at first; else the lanes cut the range in 33 a turn.
__device__ __forceinline__ TokenPosition find_position_by_warp(const BatchView& batch,
                                                               int32_t token, int32_t each) {
  const auto num_requests = static_cast<int32_t>(batch.num_requests);
  if (num_requests == 0) return {-1, -1};
  int32_t low = min(token / each, num_requests - 1);
  const int32_t total = first_token_of(batch, num_requests);
  int32_t begin = first_token_of(batch, low), end = first_token_of(batch, low + 1);
  int32_t length = seq_len_of(batch, low);
  if (token >= total) return {-1, -1};
  if (begin > token || token >= end) {
    const int lane = threadIdx.x % 32;
    low = 0;
    int32_t high = num_requests;  // first[low] <= token < first[high]
    while (high - low > 1) {
      const int32_t step = (high - low + 32) / 33;
      const int32_t probe = low + (lane + 1) * step;
      const bool before = probe < high && first_token_of(batch, probe) <= token;
      const int32_t passed = __popc(__ballot_sync(0xffffffffu, before));
      high = min(high, low + (passed + 1) * step);
      low += passed * step;
    }
    end = first_token_of(batch, low + 1);
    length = seq_len_of(batch, low);
  }
  return {low, length - (end - token)};
}

// Blocks that a token at `pos` may see.
__device__ __forceinline__ int32_t visible_blocks(const BatchView& batch, int32_t pos) {
  if (pos < 0) return 0;
  return static_cast<int32_t>(min(static_cast<int64_t>(pos / kBlock + 1), batch.max_pages));
}

__device__ __forceinline__ int64_t load_id(const IdsView& ids, int64_t head, int64_t token,
                                           int64_t slot) {
  const int64_t offset = head * ids.head_stride + token * ids.token_stride + slot * ids.slot_stride;
  return ids.dtype == DType::kInt64 ? static_cast<const int64_t*>(ids.data)[offset]
                                    : static_cast<const int32_t*>(ids.data)[offset];
}

__device__ __forceinline__ int32_t page_of(const BatchView& batch, int64_t request, int64_t block) {
  return batch.block_table[request * batch.table_row_stride + block * batch.table_col_stride];
}

// The block that entry `slot` of a token's row selects, -1 where the entry counts nothing: past
// min(K, visible), negative, not visible, or on a page outside the cache.
__device__ __forceinline__ int32_t selected_block(const IdsView& ids, const BatchView& batch,
                                                  int64_t num_pages, const TokenPosition& position,
                                                  int64_t head, int64_t token, int32_t slot) {
  const int32_t visible = position.request < 0 ? 0 : visible_blocks(batch, position.pos);
  if (slot >= visible) return -1;  // slot < K holds for every caller
  const int64_t id = load_id(ids, head, token, slot);
  if (id < 0 || id >= visible) return -1;
  if (batch.block_table == nullptr) return static_cast<int32_t>(id);
  const int32_t page = page_of(batch, position.request, id);
  return page >= 0 && page < num_pages ? static_cast<int32_t>(id) : -1;
}

}  // namespace msa
