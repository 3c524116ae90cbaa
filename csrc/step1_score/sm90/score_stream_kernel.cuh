// Steps 1 and 2 for few query rows a request on Hopper: scores of every page that they see, a
// stream of the index cache that is read once.
//
//   score[h, t, j] = max over keys of block j that t sees of index_q[t, h] . key
//
// Bound by memory: 32 KiB of bfloat16 a page against 1 MFLOP at 32 query rows.
//
// Grid      persistent, a CTA an SM. Each warp takes an equal contiguous piece of the line of
//           (tile, page) units (score_plan.h); a tile is as many tokens as fill kRows query rows.
// Roles     all warps alike: a warp owns a stage and fills it itself, by one plain bulk copy of the
//           page (a row at a time where the rows of a page do not touch), so that 192 KiB are under
//           way an SM. No tensor map, no swizzle, no CTA barrier.
// Shared    a page a warp: 6 x 32 KiB of bfloat16, 12 x 16 KiB of FP8.
// Registers the tile's query rows, as B fragments: kRows registers a lane.
// Barriers  full[warp], 1 arrival and the bytes of a page; its phase changes with each page copied.
// Timeline  wait(page i), products, issue(page i + 1), reduce and store the scores of page i. The
//           table entry of page i + 1 is fetched before the wait.
// Next      the launch of the top-k begins when the first warp of every CTA is at its last page.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "step1_score/sm80/score_rows.cuh"

namespace msa::index_score::sm90 {

using namespace msa::index_score::sm80;  // the cursor, the rows and the products are the portable
                                         // ones
namespace hopper = msa::sm90;

template <DType dtype, int kRows>
constexpr int stream_warps() {
  if (dtype == DType::kBFloat16) return 6;
  return kRows <= 32 ? 12 : 8;
}

template <DType dtype, int kRows>
constexpr int stream_shared_bytes() {
  return stream_warps<dtype, kRows>() * kBlock * IndexElement<dtype>::kRowBytes;
}

template <DType dtype, int kRows>
__global__ void __launch_bounds__(stream_warps<dtype, kRows>() * 32, 1)
    msa_index_score_stream_sm90_kernel(const __grid_constant__ ScoreWork work) {
  constexpr int kWarps = stream_warps<dtype, kRows>();
  constexpr int kRowBytes = IndexElement<dtype>::kRowBytes;
  constexpr int kPageBytes = kBlock * kRowBytes;
  extern __shared__ __align__(128) uint8_t shared_memory[];
  __shared__ uint64_t full[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint8_t* const stage = shared_memory + warp * kPageBytes;
  const int64_t row_stride = work.index_k_cache.token_stride * (kRowBytes / kHeadDim);
  const auto copy_page = [&](int32_t page) {
    if (page < 0) return;
    const uint8_t* source = page_address<dtype>(work, page);
    if (lane == 0) hopper::barrier_arrive_expect(&full[warp], kPageBytes);
    __syncwarp();
    if (row_stride == kRowBytes) {
      if (lane == 0) hopper::copy_bytes(stage, source, kPageBytes, &full[warp]);
    } else {
      for (int row = lane; row < kBlock; row += 32) {
        hopper::copy_bytes(stage + row * kRowBytes, source + row * row_stride, kRowBytes,
                           &full[warp]);
      }
    }
  };

  if (lane == 0) hopper::barrier_init(&full[warp], 1);
  hopper::fence_barrier_init();
  __syncwarp();
  wait_for_previous_kernel();
  ScoreCursor next =
      find_piece(work.batch, work.cut, blockIdx.x * kWarps + warp, gridDim.x * kWarps);
  if (next.left == 0) return;
  ScoreCursor cursor;
  int32_t page, next_page = find_page(work, next);
  bool more = true, new_tile = true, scored = false;
  uint32_t phase = 0;
  WarpRows<dtype, kRows> rows;
  Maxima<kRows> best;
  while (true) {
    copy_page(next_page);
    if (scored) rows.store(work, cursor.block, best);
    if (!more) break;
    cursor = next;
    page = next_page;
    if (new_tile) rows.enter(work, cursor, 0);
    new_tile = next.advance(work.batch, work.cut);
    more = next.left > 0;
    next_page = more ? find_page(work, next) : -1;
    if (!more) start_next_kernel();
    clear<kRows>(best);
    if (page >= 0) {
      hopper::barrier_wait(&full[warp], phase);
      phase ^= 1;
      score_keys<dtype, kRows, kBlock, false>(
          shared_address(stage), 0, rows.queries, best, rows.masked(work, cursor.block),
          [&](int n) { return rows.last_key(work, cursor.block, n); });
      __syncwarp();  // the stage has been read
    }
    scored = true;
  }
}

}  // namespace msa::index_score::sm90
