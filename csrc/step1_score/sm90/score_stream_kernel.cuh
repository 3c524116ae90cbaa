// Steps 1 and 2 for few query rows a request on Hopper: scores of every page that they see, a
// stream of the index cache that is read once.
//
//   score[h, t, j] = max over keys of block j that t sees of index_q[t, h] . key
//
// Bound by memory: 32 KiB of bfloat16 a page against 1 MFLOP at 32 query rows. Of one short request
// it is a chain of latencies: lengths, table, page, products, scores.
//
// Grid      persistent, a CTA an SM. Each warp takes an equal contiguous piece of the line of
//           (tile, page) units (score_plan.h); a tile is as many tokens as fill kRows query rows.
//           Pieces of bfloat16 are dealt over CTAs first, so that those that are one unit longer
//           than others do not meet in few SMs.
// Roles     all warps alike: a warp owns a stage and fills it itself, by a plain bulk copy of each
//           part of the page (a row at a time where the rows of a page do not touch), so that
//           192 KiB are under way an SM. No tensor map, no swizzle, no CTA barrier.
// Shared    a page a warp: 6 x 32 KiB of bfloat16, 12 x 16 KiB of FP8.
// Registers the tile's query rows, as operands: 2 kRows registers a lane, of 8 bfloat16 rows 32.
// Barriers  full[warp][part], 1 arrival and the bytes of a part: halves of a page, FP8 the whole of
//           it. Their phase changes with each page copied.
// Timeline  for each part: wait(page i), products, issue(page i + 1); then reduce and store the
//           scores of page i. The table entry of page i + 1 is fetched before the first wait, and
//           the queries of a tile after that: behind the copies both take long.
// Next      the launch of the top-k begins when the first warp of every CTA is at its last page,
// or,
//           where that is its first one, before it is copied.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "step1_score/sm80/score_rows.cuh"

namespace msa::index_score::sm90 {

using namespace msa::index_score::sm80;  // the cursor, the rows and the products are the portable
                                         // ones
namespace hopper = msa::sm90;

// Parts that a page is copied, waited for and multiplied in.
template <DType dtype>
constexpr int page_parts() {
  return dtype == DType::kBFloat16 ? 2 : 1;
}

template <DType dtype, int kRows>
constexpr int stream_warps() {
  if (dtype == DType::kBFloat16) return 6;
  return kRows <= 32 ? 12 : 8;
}

template <DType dtype, int kRows>
constexpr int stream_shared_bytes() {
  return stream_warps<dtype, kRows>() * kBlock * IndexElement<dtype>::kRowBytes;
}

// Has the queries come to L2, a line a thread, while the lengths are on their way: fetched behind
// the first pages they would wait for those.
template <DType dtype>
__device__ __forceinline__ void prefetch_queries(const ScoreWork& work) {
  constexpr int64_t kLine = 128;
  const RowsView& queries = work.index_q;
  if (queries.head_stride != kHeadDim || queries.token_stride != work.num_heads * kHeadDim) return;
  const int64_t row_bytes = work.num_heads * IndexElement<dtype>::kRowBytes;
  const int64_t offset =
      work.cut.token_begin * row_bytes + (int64_t{threadIdx.x} * gridDim.x + blockIdx.x) * kLine;
  if (offset >= work.cut.token_end * row_bytes) return;
  prefetch_to_l2(static_cast<const uint8_t*>(queries.data) + offset);
}

template <DType dtype, int kRows>
__global__ void __launch_bounds__(stream_warps<dtype, kRows>() * 32, 1)
    msa_index_score_stream_sm90_kernel(const __grid_constant__ ScoreWork work) {
  constexpr int kWarps = stream_warps<dtype, kRows>();
  constexpr int kRowBytes = IndexElement<dtype>::kRowBytes;
  constexpr int kParts = page_parts<dtype>(), kPartKeys = kBlock / kParts;
  constexpr int kPartBytes = kPartKeys * kRowBytes;
  extern __shared__ __align__(128) uint8_t shared_memory[];
  __shared__ uint64_t full[kWarps][kParts];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint8_t* const stage = shared_memory + warp * kParts * kPartBytes;
  const int64_t row_stride = work.index_k_cache.token_stride * (kRowBytes / kHeadDim);
  const auto copy_part = [&](int32_t page, int part) {
    if (page < 0) return;
    const uint8_t* source = page_address<dtype>(work, page) + part * kPartKeys * row_stride;
    uint8_t* const target = stage + part * kPartBytes;
    uint64_t* const barrier = &full[warp][part];
    if (row_stride == kRowBytes) {
      if (!hopper::elect_one()) return;
      hopper::barrier_arrive_expect(barrier, kPartBytes);
      hopper::copy_bytes(target, source, kPartBytes, barrier);
      return;
    }
    if (lane == 0) hopper::barrier_arrive_expect(barrier, kPartBytes);
    __syncwarp();
    for (int row = lane; row < kPartKeys; row += 32) {
      hopper::copy_bytes(target + row * kRowBytes, source + row * row_stride, kRowBytes, barrier);
    }
  };

  if (hopper::elect_one()) {
    for (int part = 0; part < kParts; ++part) hopper::barrier_init(&full[warp][part], 1);
  }
  hopper::fence_barrier_init();
  __syncwarp();
  wait_for_previous_kernel();
  const RequestWords words = load_words(work.batch, lane, lane < work.batch.num_requests);
  const auto worker = static_cast<int32_t>(dtype == DType::kBFloat16 ? warp * gridDim.x + blockIdx.x
                                                                     : blockIdx.x * kWarps + warp);
  // Of one request, worker w has page w where pages are no more than workers: its entry is fetched
  // before the length is known.
  const bool guesses = work.batch.num_requests == 1 && worker < work.cut.max_blocks;
  int32_t guessed_page = -1;
  load_if(guesses, work.batch.block_table + worker * work.batch.table_col_stride, guessed_page);
  prefetch_queries<dtype>(work);
  ScoreCursor next = find_piece(work.batch, work.cut, worker, gridDim.x * kWarps, words);
  if (next.left <= 1) start_next_kernel();  // which would start late behind the copies
  if (next.left == 0) return;
  int32_t next_page =
      guesses && next.block == worker ? page_or_none(work, guessed_page) : find_page(work, next);
#pragma unroll 1
  for (int part = 0; part < kParts; ++part) copy_part(next_page, part);
  bool more = true, new_tile = true;
  uint32_t phase = 0;
  WarpRows<dtype, kRows> rows;
  RowMaxima<dtype, kRows> best;
  while (more) {
    const ScoreCursor cursor = next;
    const int32_t page = next_page;
    const bool enters = new_tile;
    new_tile = next.advance(work.batch, work.cut);
    more = next.left > 0;
    if (!more) start_next_kernel();
    next_page = more ? find_page(work, next) : -1;
    if (enters) rows.enter(work, cursor, 0);  // waits for the queries
    best.clear();
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      if (page >= 0) {
        hopper::barrier_wait(&full[warp][part], phase);
        score_keys<dtype, kRows, kPartKeys, false>(
            shared_address(stage) + part * kPartBytes, part * kPartKeys, rows.queries, best,
            rows.masked(work, cursor.block),
            [&](int n) { return rows.last_key(work, cursor.block, n); });
        __syncwarp();  // the part has been read
      }
      copy_part(next_page, part);
    }
    if (page >= 0) phase ^= 1;
    rows.store(work, cursor.block, best);
  }
}

}  // namespace msa::index_score::sm90
