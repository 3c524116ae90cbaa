// Before bounds of scores: the factors of their errors (score_error.cuh).
//
//   row_factors[t, h] of query rows; block_factors[b, j], the largest of the keys of block j of
//   request b.
//
// Bound by reading the index keys once.
//
// Grid      a CTA 128 vectors: first the blocks of the table, then the query rows.
// Work      four lanes a vector, a quarter each: what one step of the products multiplies.
// Shared    factors of a block, one of each warp.
// Also      sets the counters of the kernels that follow to zero, and finds for them where each
//           token stands.
// A NaN counts as 0: its score is NaN, whatever the bound. A block that is not there, or that no
// token sees fully, has factors of 0: nobody scores it again, whatever the lengths say.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/sm90/fp8.cuh"
#include "step1_score/score_run.h"
#include "step1_score/sm80/score_rows.cuh"
#include "step1_score/sm90/score_error.cuh"

namespace msa::index_score::sm90 {

constexpr int kFactorThreads = 128;

struct FactorParams {
  RowsView index_q;
  PagedView index_k_cache;
  BatchView batch;
  int32_t num_heads;
  float4* row_factors;    // [T * Hi]
  float4* block_factors;  // [B * max_pages]
  int2* token_words;      // [T]: request, visible blocks; -1, 0 of a token of none
  int32_t* counters;
  int64_t num_counters;
};

// Of a quarter of a vector: its factor, whose lanes are four neighbours. `address` of the vector.
__device__ __forceinline__ float quarter_factor(const uint8_t* address, int quarter) {
  const auto* source = reinterpret_cast<const uint4*>(address + quarter * 32);
  const uint4 bits[2] = {source[0], source[1]};
  const uint32_t words[8] = {bits[0].x, bits[0].y, bits[0].z, bits[0].w,
                             bits[1].x, bits[1].y, bits[1].z, bits[1].w};
  float squares = 0.0f, largest = 0.0f;
#pragma unroll
  for (uint32_t word : words) {
    word &= 0x7f7f7f7fu;
    uint32_t pairs[2];
    msa::sm90::e4m3_to_float16(word & ~msa::sm90::e4m3_nan_mask(word), pairs);
#pragma unroll
    for (const uint32_t pair : pairs) {
      const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&pair));
      squares = fmaf(values.x, values.x, fmaf(values.y, values.y, squares));
      largest = fmaxf(largest, fmaxf(values.x, values.y));
    }
  }
  if (largest > 0.0f) largest = fmaxf(largest, 0x1p-6f);
  float before = __shfl_up_sync(kAllLanes, squares, 1, 4);  // of the quarters before this one
  if (quarter == 0) before = 0.0f;
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const float other = __shfl_up_sync(kAllLanes, before, distance, 4);
    const float larger = __shfl_up_sync(kAllLanes, largest, distance, 4);
    if (quarter >= distance) {
      before += other;
      largest = fmaxf(largest, larger);
    }
  }
  return fmaxf(largest, sqrtf(before));
}

__global__ void __launch_bounds__(kFactorThreads)
    msa_score_factors_sm90_kernel(const __grid_constant__ FactorParams params) {
  __shared__ float factors[kFactorThreads / 32][4];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, quarter = lane % 4;
  const BatchView& batch = params.batch;
  const int64_t num_blocks = batch.num_requests * batch.max_pages;
  wait_for_previous_kernel();
  start_next_kernel();
  for (int64_t i = blockIdx.x * int64_t{kFactorThreads} + thread; i < params.num_counters;
       i += int64_t{gridDim.x} * kFactorThreads) {
    params.counters[i] = 0;
  }

  if (blockIdx.x >= num_blocks) {
    const int64_t first = (blockIdx.x - num_blocks) * 128 + warp * 32 + lane / 4;
    const int64_t rows = batch.num_tokens * params.num_heads;
    const int64_t own = (blockIdx.x - num_blocks) * 128 + thread;
    if (own < batch.num_tokens) {
      const TokenPosition position = find_position(batch, static_cast<int32_t>(own));
      // Tokens before the first request's, where cu_seqlens_q does not begin with 0, are of none:
      // they have no bounds, and lists have no room for them.
      const bool is_real = position.request >= 0 && own >= first_token_of(batch, 0);
      params.token_words[own] = {is_real ? position.request : -1,
                                 is_real ? visible_blocks(batch, position.pos) : 0};
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = min(first + 8 * i, rows - 1);
      const int64_t token = row / params.num_heads, head = row - token * params.num_heads;
      const uint8_t* address = static_cast<const uint8_t*>(params.index_q.data) +
                               token * params.index_q.token_stride +
                               head * params.index_q.head_stride;
      reinterpret_cast<float*>(params.row_factors + row)[quarter] =
          quarter_factor(address, quarter) * kFactorMargin;
    }
    return;
  }

  const int64_t request = blockIdx.x / batch.max_pages;
  const int64_t block = blockIdx.x - request * batch.max_pages;
  if (block >= seq_len_of(batch, request) / kBlock) {  // no token sees all of it
    if (thread == 0) params.block_factors[blockIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return;
  }
  const int32_t page = page_of(batch, request, block);
  float largest = 0.0f;
  if (page >= 0 && page < params.index_k_cache.num_pages) {
    const uint8_t* keys = static_cast<const uint8_t*>(params.index_k_cache.data) +
                          page * params.index_k_cache.page_stride +
                          (warp * 32 + lane / 4) * params.index_k_cache.token_stride;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      largest =
          fmaxf(largest, quarter_factor(keys + 8 * i * params.index_k_cache.token_stride, quarter));
    }
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    }
  }
  if (lane < 4) factors[warp][lane] = largest;
  __syncthreads();
  if (thread < 4) {
#pragma unroll
    for (int w = 1; w < kFactorThreads / 32; ++w) largest = fmaxf(largest, factors[w][thread]);
    reinterpret_cast<float*>(params.block_factors + blockIdx.x)[thread] = largest;
  }
}

}  // namespace msa::index_score::sm90
