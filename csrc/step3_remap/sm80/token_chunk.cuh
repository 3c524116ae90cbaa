// Step 3 of prefill: the tokens of a CTA that counts selected blocks, and the rows it may count in
// shared memory. Counting there first takes the contention off the counters in memory: a row is one
// of few, and every token adds to K of them.
#pragma once

#include <cuda_runtime.h>

#include "device/positions.cuh"

namespace msa {

constexpr int kHistogramRows = 8192;  // rows that a CTA counts in shared memory

struct TokenChunk {
  int32_t first_token, tokens;
  int32_t first_request;  // of the first token
  int32_t rows;           // blocks of the chunk's requests; 0: too many for the histogram

  // The row of a request's block, counted from the first request's first.
  __device__ __forceinline__ int64_t row_of(const BatchView& batch, int32_t request,
                                            int32_t block) const {
    return (request - first_request) * batch.max_pages + block;
  }
};

// Fills `positions` and `chunk`'s requests and rows; by all threads of the CTA.
__device__ __forceinline__ void locate_tokens(const BatchView& batch, int64_t most_rows,
                                              TokenChunk& chunk, TokenPosition* positions) {
  for (int i = threadIdx.x; i < chunk.tokens; i += blockDim.x) {
    positions[i] = find_position(batch, chunk.first_token + i);
  }
  const int real_tokens =
      min(chunk.tokens, first_token_of(batch, batch.num_requests) - chunk.first_token);
  __syncthreads();
  // The tokens are in order of their requests, padding last.
  chunk.first_request = max(0, positions[0].request);
  chunk.rows = 0;
  if (real_tokens > 0) {
    const int64_t requests = positions[real_tokens - 1].request - chunk.first_request + 1;
    const int64_t rows = requests * batch.max_pages;
    if (rows <= most_rows) chunk.rows = static_cast<int32_t>(rows);
  }
}

}  // namespace msa
