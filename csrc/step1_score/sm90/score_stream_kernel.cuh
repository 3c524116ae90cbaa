// Steps 1 and 2 for few query rows a request on Hopper: scores of every page that they see, a
// stream of the index cache that is read once.
//
//   score[h, t, j] = max over keys of block j that t sees of index_q[t, h] . key
//
// Bound by memory: 32 KiB of bfloat16 a page against 1 MFLOP at 32 query rows. Of one short request
// it is a chain of latencies: lengths, table, page, products, scores.
//
// Grid      a CTA an SM, persistent. Each team of warps takes an equal contiguous piece of the line
//           of (tile, page) units (score_plan.h); a tile is as many tokens as fill kRows query
//           rows. Pieces are dealt over CTAs first, so that those that are one unit longer than
//           others do not meet in few SMs. A call of no more pages than SMs: a CTA a page, of one
//           team.
// Roles     all warps alike. The 1, 2 or 4 warps of a team share a page: each fills its own part of
//           the stage by a plain bulk copy (a row at a time where the rows of a page do not touch)
//           and multiplies it; the first one gathers their maxima and stores them. No tensor map,
//           no swizzle, no CTA barrier. One warp a page ends 0.6 us after its last byte, 32 query
//           rows keep it longer than the memory does.
// Shared    a page a team: 6 x 32 KiB of bfloat16 (4 of 64 rows), 12 x 16 KiB of FP8 (6 of
//           32, 8 of 64).
//           maxima [turn % 2][team][warp][row]
// Registers the tile's query rows, as operands: 2 kRows registers a lane, of 8 bfloat16 rows 32.
// Barriers  full[warp], 1 arrival and the bytes of its part; its phase changes with each page.
//           1 + team, bar.sync of a team's warps, once a page: the maxima are there, and those of
//           the page before have been read.
// Timeline  wait(page i), products, issue(page i + 1), reduce, gather, store the scores of page i.
//           The table entry of page i + 1 is fetched before the first wait, and the queries of a
//           tile after that: behind the copies both take long.
// L2        pages are read once, so their lines give way to each other before they displace what
//           else is there (kLongPiece: of a long piece after the first pages).
// Next      the launch of the top-k begins when a warp of every CTA is at its last page (FP8: the
//           first warp), or, where that is its first one, before it is copied.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"
#include "step1_score/sm80/score_rows.cuh"

namespace msa::index_score::sm90 {

using namespace msa::index_score::sm80;  // the cursor, the rows and the products are the portable
                                         // ones
namespace hopper = msa::sm90;

// Who shares a CTA. kSmall: a call of so few pages that every one has a CTA of its own.
template <DType dtype, int kRows, bool kSmall>
struct StreamShape {
  static constexpr bool kBfloat16 = dtype == DType::kBFloat16;
  static constexpr int kTeam = kSmall ? 4 : kBfloat16 || kRows == 32 ? 2 : 1;  // warps a page
  static constexpr int kTeams = kSmall        ? 1
                                : kRows == 64 ? (kBfloat16 ? 4 : 8)  // registers
                                : kTeam == 2  ? 6
                                              : 12;
  static constexpr int kWarps = kTeam * kTeams, kThreads = kWarps * 32;
  static constexpr int kPartKeys = kBlock / kTeam;
  static constexpr int kPartBytes = kPartKeys * IndexElement<dtype>::kRowBytes;
  static constexpr int kSharedBytes = kWarps * kPartBytes;
};

// Lines that others left dirty are written back when they are displaced: sparing them saves a short
// call 2 us and more, but a long one reads slowly among them to its end. So of a long piece the
// first pages displace what they find, and those after them the pages before.
constexpr uint32_t kLongPiece = 8, kFillingPages = 4;

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

// The piece of a batch of one request, which every lane knows: without the search for it. Tiles of
// streams have no cost in the cut. False: it is several tiles.
__device__ __forceinline__ bool find_piece_of_one(const ScoreCut& cut, uint32_t part,
                                                  uint32_t parts, const RequestWords& words,
                                                  ScoreCursor& cursor) {
  cursor.tokens = request_tokens(cut, words.first, words.end, words.length);
  const int32_t tiles = cursor.tokens.num_tiles(cut);
  if (tiles > 1) return false;
  cursor.num_blocks = tiles == 1 ? cursor.tokens.tile_blocks(cut, 0) : 0;
  const Piece piece = cut_piece(cursor.num_blocks, part, parts);
  cursor.block = static_cast<int32_t>(piece.begin);
  cursor.left = piece.units;
  return true;
}

template <DType dtype, int kRows, bool kSmall>
__global__ void __launch_bounds__(StreamShape<dtype, kRows, kSmall>::kThreads, 1)
    msa_index_score_stream_sm90_kernel(const __grid_constant__ ScoreWork work) {
  using Shape = StreamShape<dtype, kRows, kSmall>;
  using Maxima = RowMaxima<dtype, kRows>;
  constexpr int kTeam = Shape::kTeam, kTeams = Shape::kTeams;
  constexpr int kPartKeys = Shape::kPartKeys, kPartBytes = Shape::kPartBytes;
  constexpr int kRowBytes = IndexElement<dtype>::kRowBytes;
  extern __shared__ __align__(128) uint8_t shared_memory[];
  __shared__ uint64_t full[Shape::kWarps];
  __shared__ float maxima[2][kTeams][kTeam][kRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int team = warp / kTeam, member = warp % kTeam;
  uint8_t* const stage = shared_memory + warp * kPartBytes;
  const int64_t row_stride = work.index_k_cache.token_stride * (kRowBytes / kHeadDim);
  const auto copy_part = [&](int32_t page, bool keep) {
    if (page < 0) return;
    const uint8_t* source = page_address<dtype>(work, page) + member * kPartKeys * row_stride;
    const uint64_t policy = keep ? hopper::evict_normal_policy() : hopper::evict_first_policy();
    if (row_stride == kRowBytes) {
      if (!hopper::elect_one()) return;
      hopper::barrier_arrive_expect(&full[warp], kPartBytes);
      hopper::copy_bytes(stage, source, kPartBytes, &full[warp], policy);
      return;
    }
    if (lane == 0) hopper::barrier_arrive_expect(&full[warp], kPartBytes);
    __syncwarp();
    for (int row = lane; row < kPartKeys; row += 32) {
      hopper::copy_bytes(stage + row * kRowBytes, source + row * row_stride, kRowBytes, &full[warp],
                         policy);
    }
  };

  if (hopper::elect_one()) hopper::barrier_init(&full[warp], 1);
  hopper::fence_barrier_init();
  __syncwarp();
  wait_for_previous_kernel();
  const auto num_requests = static_cast<int32_t>(work.batch.num_requests);
  const bool alone = num_requests == 1;
  RequestWords words = load_words(work.batch, alone ? 0 : lane, alone || lane < num_requests);
  const auto worker = static_cast<int32_t>(team * gridDim.x + blockIdx.x);
  // Of one request, worker w has page w where pages are no more than workers: its entry is fetched
  // before the length is known.
  const bool guesses = alone && worker < work.cut.max_blocks;
  int32_t guessed_page = -1;
  load_if(guesses, work.batch.block_table + worker * work.batch.table_col_stride, guessed_page);
  prefetch_queries<dtype>(work);
  ScoreCursor next;
  if (!alone || !find_piece_of_one(work.cut, worker, gridDim.x * kTeams, words, next)) {
    if (lane >= num_requests) words = {};
    next = find_piece(work.batch, work.cut, worker, gridDim.x * kTeams, words);
  }
  if (next.left <= 1) start_next_kernel();  // which would start late behind the copies
  if (next.left == 0) return;
  int32_t next_page =
      guesses && next.block == worker ? page_or_none(work, guessed_page) : find_page(work, next);
  int32_t filling = next.left > kLongPiece ? kFillingPages : 0;
  copy_part(next_page, filling > 0);
  bool more = true, new_tile = true;
  uint32_t phase = 0, turn = 0;
  WarpRows<dtype, kRows> rows;
  Maxima best;
  while (more) {
    const ScoreCursor cursor = next;
    const int32_t page = next_page;
    const bool enters = new_tile;
    new_tile = next.advance(work.batch, work.cut);
    more = next.left > 0;
    // FP8: the first warp's piece is among the longest. Sooner, top-k CTAs cost 2 us at B 8.
    if (!more && (Shape::kBfloat16 || warp == 0)) start_next_kernel();
    next_page = more ? find_page(work, next) : -1;
    if (enters) rows.enter(work, cursor, 0);  // waits for the queries
    best.clear();
    if (page >= 0) {
      hopper::barrier_wait(&full[warp], phase);
      score_keys<dtype, kRows, kPartKeys, false>(
          shared_address(stage), member * kPartKeys, rows.queries, best,
          rows.masked(work, cursor.block),
          [&](int n) { return rows.last_key(work, cursor.block, n); });
      __syncwarp();  // the part has been read
      phase ^= 1;
    }
    copy_part(next_page, --filling > 0);
    float kept[Maxima::kKept];
    best.reduce(kept);
    if constexpr (kTeam > 1) {
      int kept_rows[Maxima::kKept];
      Maxima::kept_rows(kept_rows);
      auto& of_team = maxima[turn % 2][team];
      ++turn;
#pragma unroll
      for (int i = 0; i < Maxima::kKept; ++i) {
        if (kept_rows[i] >= 0) of_team[member][kept_rows[i]] = kept[i];
      }
      hopper::named_barrier(1 + team, kTeam * 32);
      if (member > 0) continue;
#pragma unroll
      for (int i = 0; i < Maxima::kKept; ++i) {
#pragma unroll
        for (int other = 1; other < kTeam; ++other) {
          kept[i] = max_or_nan(kept[i], of_team[other][max(kept_rows[i], 0)]);
        }
      }
    }
    rows.store(work, cursor.block, kept);
  }
}

}  // namespace msa::index_score::sm90
