// What the selection kernels share: the order of scores, and where a row's candidates lie.
#pragma once

#include <cuda_runtime.h>

#include "device/common.cuh"
#include "device/positions.cuh"
#include "step2_select/topk_blocks_params.h"

namespace msa::topk_blocks::sm80 {

// Orders scores as the selection does, larger is better: +0 and -0 alike, NaN below -inf. 0 is no
// score at all.
__device__ __forceinline__ uint32_t score_key(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);  // -0 + 0 = +0
  const uint32_t key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return score != score ? 1u : key;
}

// The blocks of a row: [0, init_end) and [local_begin, visible) are in whatever their scores,
// `capacity` of the candidates between them too. Where all that is visible is selected, all of it
// counts as forced.
struct RowBlocks {
  int32_t init_end, local_begin, visible, capacity;

  __device__ __forceinline__ RowBlocks(const SelectRule& rule, int32_t visible_blocks)
      : visible(visible_blocks) {
    const auto topk = static_cast<int32_t>(rule.topk);
    init_end = visible <= topk ? visible : static_cast<int32_t>(rule.init_blocks);
    local_begin = max(visible - static_cast<int32_t>(rule.local_blocks), init_end);
    capacity = min(topk, visible) - (init_end + visible - local_begin);
  }
};

// The request of a token, as find_position(), found by a whole warp: 32 requests a probe.
__device__ __forceinline__ TokenPosition find_position_by_warp(const BatchView& batch,
                                                               int32_t token) {
  const int lane = threadIdx.x % 32;
  auto low = 0, high = static_cast<int32_t>(batch.num_requests);
  if (high == 0 || token >= first_token_of(batch, high)) return {-1, -1};
  while (high - low > 1) {  // first token of low <= token < first token of high
    const int32_t step = (high - low + 31) / 32;
    const int32_t probe = low + (lane + 1) * step;
    const bool before = probe < high && first_token_of(batch, probe) <= token;
    low += __popc(__ballot_sync(kAllLanes, before)) * step;
    high = min(low + step, high);
  }
  return {low, seq_len_of(batch, low) - (first_token_of(batch, low + 1) - token)};
}

}  // namespace msa::topk_blocks::sm80
