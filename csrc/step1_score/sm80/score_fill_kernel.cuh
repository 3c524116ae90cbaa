// Step 1, index_score: -inf for the blocks that a token does not see. Writes what the score kernels
// leave alone, and nothing else; a CTA a token.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/positions.cuh"

namespace msa::index_score::sm80 {

constexpr int kFillThreads = 128;

struct FillParams {
  ScoresView scores;
  BatchView batch;
};

static __global__ void __launch_bounds__(kFillThreads)
    msa_index_score_fill_sm80_kernel(const __grid_constant__ FillParams params) {
  wait_for_previous_kernel();
  const ScoresView& scores = params.scores;
  const int64_t token = blockIdx.x;
  int32_t visible = 0;
  if (params.batch.num_requests > 0) {
    const TokenPosition position = find_position(params.batch, static_cast<int32_t>(token));
    if (position.request >= 0) visible = visible_blocks(params.batch, position.pos);
  }
  for (int64_t head = 0; head < scores.num_heads; ++head) {
    float* row = scores.data + head * scores.head_stride + token * scores.token_stride;
    for (int64_t block = visible + threadIdx.x; block < scores.num_blocks; block += kFillThreads) {
      row[block * scores.block_stride] = -INFINITY;
    }
  }
}

}  // namespace msa::index_score::sm80
