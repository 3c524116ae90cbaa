// Where a query token stands and which selected blocks count for it: the rules of the contract,
// once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/views.h"
#include "device/division.h"
#include "device/instructions.cuh"

namespace msa {

struct TokenPosition {
  int32_t request;  // -1: a padding row
  int32_t pos;  // position in the request; negative where the request is shorter than its queries
};

// A length below 0 is one of 0: no token of the request is seen, and no position wraps.
__device__ __forceinline__ int32_t seq_len_of(const BatchView& batch, int64_t request) {
  return max(batch.seq_lens[request * batch.seq_lens_stride], 0);
}

__device__ __forceinline__ int32_t first_token_of(const BatchView& batch, int64_t request) {
  return batch.cu_seqlens_q[request * batch.cu_seqlens_stride];
}

// The request that token t belongs to, by bisection of cu_seqlens_q.
__device__ __forceinline__ TokenPosition find_position(const BatchView& batch, int32_t token) {
  if (batch.num_requests == 0 || token >= first_token_of(batch, batch.num_requests)) {
    return {-1, -1};
  }
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

// By the tokens that a request probably has.
inline Division tokens_of_each(const BatchView& batch) {
  return division_by(static_cast<uint32_t>(
      std::max<int64_t>(1, batch.num_tokens / std::max<int64_t>(1, batch.num_requests))));
}

// The request that a token is probably of: most decode batches have `each` tokens a request. -1:
// there are none.
__device__ __forceinline__ int32_t guess_request(const BatchView& batch, int32_t token,
                                                 const Division& each) {
  return min(static_cast<int32_t>(each(static_cast<uint32_t>(token))),
             static_cast<int32_t>(batch.num_requests) - 1);
}

// Where the guessed request begins and ends. The loads do not wait for each other, nor do they keep
// what the caller loads next waiting: nothing looks at them here.
struct PositionGuess {
  int32_t request = -1;
  int32_t begin = 0, end = 0, length = 0;  // of that request; the length as the caller gave it
};

__device__ __forceinline__ PositionGuess guess_position(const BatchView& batch, int32_t request) {
  const bool there = request >= 0;
  const auto row = static_cast<uint32_t>(request);
  const int32_t* const first = batch.cu_seqlens_q + row * batch.cu_seqlens_stride;
  PositionGuess guess;
  guess.request = request;
  load_if(there, batch.seq_lens + row * batch.seq_lens_stride, guess.length);
  load_if(there, first, guess.begin);
  load_if(there, first + batch.cu_seqlens_stride, guess.end);
  return guess;
}

// The same as find_position() by a whole warp for one token, in few dependent loads: the guess is
// looked at first; else the lanes cut the range in 33 a turn.
__device__ __forceinline__ TokenPosition find_position_by_warp(const BatchView& batch,
                                                               int32_t token,
                                                               const PositionGuess& guess) {
  int32_t low = guess.request, end = guess.end, length = max(guess.length, 0);
  if (guess.begin > token || token >= end) {
    if (batch.num_requests == 0 || token >= first_token_of(batch, batch.num_requests)) {
      return {-1, -1};
    }
    const int lane = threadIdx.x % 32;
    low = 0;
    auto high = static_cast<int32_t>(batch.num_requests);  // first[low] <= token < first[high]
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

__device__ __forceinline__ TokenPosition find_position_by_warp(const BatchView& batch,
                                                               int32_t token,
                                                               const Division& each) {
  return find_position_by_warp(batch, token,
                               guess_position(batch, guess_request(batch, token, each)));
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

// An id on its way: nothing waits for it before it is looked at.
struct LoadingId {
  int32_t low = -1, high = 0;  // words; of int32 ids the first is the id
};

// -1 where the entry is not `there`.
__device__ __forceinline__ LoadingId start_load_id(const IdsView& ids, int64_t head, int64_t token,
                                                   int64_t slot, bool there) {
  const bool is_wide = ids.dtype == DType::kInt64;
  const int64_t offset = head * ids.head_stride + token * ids.token_stride + slot * ids.slot_stride;
  const int32_t* words = static_cast<const int32_t*>(ids.data) + (offset << (is_wide ? 1 : 0));
  LoadingId id;
  load_if(there, words, id.low);
  load_if(there && is_wide, words + 1, id.high);
  return id;
}

// Whether it is one of the first `visible` blocks.
__device__ __forceinline__ bool is_visible(const LoadingId& id, int32_t visible) {
  return static_cast<uint32_t>(id.low) < static_cast<uint32_t>(visible) && id.high == 0;
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
