// Steps 1 and 2 for many query rows a request (prefill): scores of tiles of query rows with every
// page that they see.
//
//   score[h, t, j] = max over keys of block j that t sees of index_q[t, h] . key
//
// Portable: every GPU from sm_80 on. Bound by the tensor cores: 256 query rows share a page.
//
// Grid      persistent. Each CTA takes an equal contiguous piece of the line of (tile, page) units
//           (score_plan.h); a tile is as many tokens as fill kTileRows query rows, all heads of a
//           token together.
// Roles     all warps alike: they copy each page together, and each multiplies it with 64 query
//           rows of its own.
// Shared    2 stages x a page (32 KiB of bfloat16), odd rows swizzled (chunk_offset()).
// Registers a warp's 64 query rows, as A fragments: 128 registers a lane.
// Barriers  one __syncthreads a page: it is there, and the other stage has been read.
// Timeline  page j + 1 is copied (cp.async) under the products of page j, across tiles.
// Limits    as the stream kernel's.
#pragma once

#include "step1_score/sm80/score_stream_kernel.cuh"

namespace msa::index_score::sm80 {

constexpr int kTileWarps = 4;
constexpr int kTileThreads = kTileWarps * 32;
constexpr int kWarpRows = 64;
constexpr int kTileRows = kTileWarps * kWarpRows;

template <DType dtype>
constexpr int tile_shared_bytes() {
  return 2 * kBlock * IndexElement<dtype>::kRowBytes;
}

template <DType dtype>
__global__ void __launch_bounds__(kTileThreads, 2)
    msa_index_score_tile_sm80_kernel(const __grid_constant__ ScoreWork work) {
  constexpr int kRowBytes = IndexElement<dtype>::kRowBytes;
  constexpr int kPageBytes = kBlock * kRowBytes;
  extern __shared__ __align__(128) uint8_t shared_memory[];
  const auto stages = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory));
  const int first_row = threadIdx.x / 32 * kWarpRows;
  const int64_t row_stride = work.index_k_cache.token_stride * (kRowBytes / kHeadDim);
  const auto copy_page = [&](int32_t page, int stage) {
    if (page >= 0) {
      copy_keys<dtype, kBlock, kTileThreads>(
          stages + stage * kPageBytes, page_address<dtype>(work, page), row_stride, threadIdx.x);
    }
    commit_async_copies();
  };

  wait_for_previous_kernel();
  ScoreCursor next = find_piece(work.batch, work.cut, blockIdx.x, gridDim.x);
  if (next.left == 0) return;
  int32_t next_page = find_page(work, next);
  copy_page(next_page, 0);
  bool more = true, new_tile = true;
  WarpRows<dtype, kWarpRows> rows;
  for (int stage = 0; more; stage ^= 1) {
    const ScoreCursor cursor = next;
    const int32_t page = next_page;
    if (new_tile) rows.enter(work, cursor, first_row);
    new_tile = next.advance(work.batch, work.cut);
    more = next.left > 0;
    next_page = more ? find_page(work, next) : -1;
    wait_async_copies<0>();
    __syncthreads();
    copy_page(next_page, stage ^ 1);
    if (cursor.block >= rows.end) continue;
    RowMaxima<dtype, kWarpRows> best;
    best.clear();
    if (page >= 0) {
      score_keys<dtype, kWarpRows, kBlock, true>(
          stages + stage * kPageBytes, 0, rows.queries, best, rows.masked(work, cursor.block),
          [&](int n) { return rows.last_key(work, cursor.block, n); });
    }
    rows.store(work, cursor.block, best);
  }
  wait_async_copies<0>();
}

}  // namespace msa::index_score::sm80
