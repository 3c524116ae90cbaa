// A worker's piece of the line of units (score_plan.h), walked unit by unit on the device.
#pragma once

#include <cuda_runtime.h>

#include "device/common.cuh"
#include "device/positions.cuh"
#include "step1_score/score_plan.h"

namespace msa::index_score::sm80 {

// What the batch says of a request; nothing where `there` does not hold. The loads do not wait for
// each other.
struct RequestWords {
  int32_t first = 0, end = 0, length = 0;
};

__device__ __forceinline__ RequestWords load_words(const BatchView& batch, int64_t request,
                                                   bool there) {
  RequestWords words;
  const int32_t* first = batch.cu_seqlens_q + request * batch.cu_seqlens_stride;
  load_if(there, first, words.first);
  load_if(there, first + batch.cu_seqlens_stride, words.end);
  load_if(there, batch.seq_lens + request * batch.seq_lens_stride, words.length);
  return words;
}

__device__ __forceinline__ RequestTokens load_request(const BatchView& batch, const ScoreCut& cut,
                                                      int64_t request) {
  return request_tokens(cut, first_token_of(batch, request), first_token_of(batch, request + 1),
                        seq_len_of(batch, request));
}

// Where a worker stands. The same in all lanes of a warp.
struct ScoreCursor {
  uint32_t left = 0;  // units of the piece, this one included; 0: past its end
  int32_t request = 0, tile = 0, block = 0, num_blocks = 0;
  RequestTokens tokens;

  // To the first block of the next tile that has one, as far as the piece goes.
  __device__ __forceinline__ void next_tile(const BatchView& batch, const ScoreCut& cut) {
    const auto cost = static_cast<uint32_t>(cut.tile_cost);
    block = 0;
    do {
      left -= min(left, cost);
      if (left == 0) return;
      if (++tile >= tokens.num_tiles(cut)) {
        tile = 0;
        do {
          tokens = load_request(batch, cut, ++request);
        } while (tokens.num_tokens == 0);
      }
      num_blocks = tokens.tile_blocks(cut, tile);
    } while (num_blocks == 0);
  }

  // To the next unit of the piece that is a block. True where that is another tile's.
  __device__ __forceinline__ bool advance(const BatchView& batch, const ScoreCut& cut) {
    --left;
    if (++block < num_blocks) return false;
    next_tile(batch, cut);
    return true;
  }
};

// Piece `part` of `parts` of a line of units.
struct Piece {
  uint32_t begin, units;
};

__device__ __forceinline__ Piece cut_piece(uint32_t line, uint32_t part, uint32_t parts) {
  uint32_t share = 0, rest = line;
  if (line >= parts) {  // a division takes 200 clocks
    share = line / parts;
    rest = line - share * parts;
  }
  return {share * part + min(part, rest), share + (part < rest)};
}

// Piece `part` of `parts`, found by one warp on its own: 32 requests at a time. `words`: of request
// `lane`.
__device__ __forceinline__ ScoreCursor find_piece(const BatchView& batch, const ScoreCut& cut,
                                                  uint32_t part, uint32_t parts,
                                                  const RequestWords& words) {
  const int lane = threadIdx.x % 32;
  const auto num_requests = static_cast<int32_t>(batch.num_requests);
  // Of the lane's request of the 32 at hand.
  RequestTokens tokens = request_tokens(cut, words.first, words.end, words.length);
  uint32_t units = request_units(tokens, cut);
  uint32_t sum = units;
#pragma unroll 1
  for (int32_t request = lane + 32; request < num_requests; request += 32) {
    sum += request_units(load_request(batch, cut, request), cut);
  }
  sum = __reduce_add_sync(kAllLanes, sum);
  const auto [begin, units_of_piece] = cut_piece(sum, part, parts);
  ScoreCursor cursor;
  cursor.left = units_of_piece;
  if (cursor.left == 0) return cursor;

  uint32_t before = 0;  // units before the 32 requests at hand
  for (int32_t base = 0;; base += 32) {
    if (base > 0) {
      const int32_t request = base + lane;
      tokens = request < num_requests ? load_request(batch, cut, request) : RequestTokens{};
      units = request_units(tokens, cut);
    }
    uint32_t end = units;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      if (distance >= num_requests) break;
      const uint32_t other = __shfl_up_sync(kAllLanes, end, distance);
      if (lane >= distance) end += other;
    }
    end += before;
    const unsigned past = __ballot_sync(kAllLanes, end > begin);
    if (past) {
      const int found = __ffs(past) - 1;
      const uint32_t within = begin - __shfl_sync(kAllLanes, end - units, found);
      cursor.request = base + found;
      cursor.tokens.first_token = __shfl_sync(kAllLanes, tokens.first_token, found);
      cursor.tokens.num_tokens = __shfl_sync(kAllLanes, tokens.num_tokens, found);
      cursor.tokens.first_pos = __shfl_sync(kAllLanes, tokens.first_pos, found);
      cursor.tile = tile_of_unit(cursor.tokens, cut, within);
      cursor.num_blocks = cursor.tokens.tile_blocks(cut, cursor.tile);
      const uint32_t in_tile = within - units_before(cursor.tokens, cut, cursor.tile);
      const auto cost = static_cast<uint32_t>(cut.tile_cost);
      cursor.block = static_cast<int32_t>(in_tile - min(in_tile, cost));
      cursor.left -= min(cursor.left, cost - min(in_tile, cost));
      if (cursor.num_blocks == 0 && cursor.left > 0) cursor.next_tile(batch, cut);
      return cursor;
    }
    before = __shfl_sync(kAllLanes, end, 31);
  }
}

__device__ __forceinline__ ScoreCursor find_piece(const BatchView& batch, const ScoreCut& cut,
                                                  uint32_t part, uint32_t parts) {
  const int lane = threadIdx.x % 32;
  return find_piece(batch, cut, part, parts, load_words(batch, lane, lane < batch.num_requests));
}

}  // namespace msa::index_score::sm80
