// Steps 1 and 2 for few query rows a request: scores of every page that they see, a stream of the
// index cache that is read once.
//
//   score[h, t, j] = max over keys of block j that t sees of index_q[t, h] . key
//
// Portable: every GPU from sm_80 on (sm90/ has Hopper's own copy engine). Bound by memory.
//
// Grid      persistent. Each warp takes an equal contiguous piece of the line of (tile, page) units
//           (score_plan.h); a tile is as many tokens as fill kRows query rows.
// Roles     all warps alike: each copies its own pages and multiplies them, no CTA barrier at all.
// Shared    kStages x 8 KiB a warp: the parts of a page, odd rows swizzled (chunk_offset()).
// Registers the tile's query rows, as A fragments: 2 kRows registers a lane, 32 of 8 rows.
// Timeline  part p + 1 is copied (cp.async) under the products of part p, across pages.
// Limits    rows of the index cache 16-byte aligned, any page and token stride; 64-bit offsets.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/sm80_async_copy.cuh"
#include "step1_score/sm80/score_rows.cuh"

namespace msa::index_score::sm80 {

constexpr int kStreamWarps = 4;
constexpr int kStreamStages = 2;
constexpr int kStageBytes = 8192;
constexpr int kStreamSharedBytes = kStreamWarps * kStreamStages * kStageBytes;

// kKeys rows of a page, from `source` on, to shared memory, by threads [0, kThreads).
template <DType dtype, int kKeys, int kThreads>
__device__ __forceinline__ void copy_keys(uint32_t shared, const uint8_t* source,
                                          int64_t row_stride, int thread) {
  constexpr int kRowChunks = IndexElement<dtype>::kRowBytes / kChunkBytes;
  static_assert(kThreads % kRowChunks == 0, "a thread keeps its chunk of the row");
  const int chunk = thread % kRowChunks, first = thread / kRowChunks;
  const uint8_t* address = source + first * row_stride + chunk * kChunkBytes;
#pragma unroll
  for (int row = 0; row < kKeys; row += kThreads / kRowChunks) {
    copy_async_16(shared + chunk_offset<dtype, true>(first + row, chunk), address);
    address += kThreads / kRowChunks * row_stride;
  }
}

template <DType dtype, int kRows>
__global__ void __launch_bounds__(kStreamWarps * 32)
    msa_index_score_stream_sm80_kernel(const __grid_constant__ ScoreWork work) {
  constexpr int kRowBytes = IndexElement<dtype>::kRowBytes;
  constexpr int kKeys = kStageBytes / kRowBytes;
  constexpr int kParts = kBlock / kKeys;
  static_assert(kParts % kStreamStages == 0, "a part of a page has its stage");
  extern __shared__ __align__(128) uint8_t shared_memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) +
                    warp * kStreamStages * kStageBytes;
  const int64_t row_stride = work.index_k_cache.token_stride * (kRowBytes / kHeadDim);
  const auto copy_part = [&](int32_t page, int part) {
    if (page >= 0) {
      copy_keys<dtype, kKeys, 32>(ring + part % kStreamStages * kStageBytes,
                                  page_address<dtype>(work, page) + part * kKeys * row_stride,
                                  row_stride, lane);
    }
    commit_async_copies();
  };

  wait_for_previous_kernel();
  ScoreCursor next =
      find_piece(work.batch, work.cut, blockIdx.x * kStreamWarps + warp, gridDim.x * kStreamWarps);
  if (next.left == 0) return;
  int32_t next_page = find_page(work, next);
  copy_part(next_page, 0);
  bool more = true, new_tile = true;
  WarpRows<dtype, kRows> rows;
  while (more) {
    const ScoreCursor cursor = next;
    const int32_t page = next_page;
    const bool enters = new_tile;
    new_tile = next.advance(work.batch, work.cut);
    more = next.left > 0;
    next_page = more ? find_page(work, next) : -1;
    if (enters) rows.enter(work, cursor, 0);  // waits for the queries
    RowMaxima<dtype, kRows> best;
    best.clear();
    const bool masked = rows.masked(work, cursor.block);
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      copy_part(part + 1 < kParts ? page : next_page, (part + 1) % kParts);
      wait_async_copies<1>();
      __syncwarp();
      if (page >= 0) {
        score_keys<dtype, kRows, kKeys, true>(
            ring + part % kStreamStages * kStageBytes, part * kKeys, rows.queries, best, masked,
            [&](int n) { return rows.last_key(work, cursor.block, n); });
      }
      __syncwarp();  // the stage has been read
    }
    rows.store(work, cursor.block, best);
  }
  wait_async_copies<0>();
}

}  // namespace msa::index_score::sm80
