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
  const uint32_t bits = __float_as_uint(score + 0.0f);                                // -0 + 0 = +0
  const uint32_t negative = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31);  // all ones
  const uint32_t key = bits ^ (negative | 0x80000000u);
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

}  // namespace msa::topk_blocks::sm80
