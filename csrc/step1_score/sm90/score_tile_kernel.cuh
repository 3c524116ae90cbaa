// Steps 1 and 2 for many query rows a request (prefill) on Hopper: scores of tiles of query rows
// with every block before their tokens' own.
//
//   score[h, t, j] = max over the 128 keys of block j of index_q[t, h] . key
//
// Bound by the tensor cores: 256 query rows share a page, 2 x 256 x 128 x 128 FLOP of it. No mask:
// own blocks are not scored (they are forced), and every other block is seen fully.
//
// Grid      persistent, a CTA an SM. Each CTA takes an equal contiguous piece of the line of
//           (tile, page) units (score_plan.h); a tile is as many tokens as fill 256 query rows, all
//           heads of a token together.
// Roles     role           warps  registers  does
//           consumer 0..1  0-7    232        128 rows each, two products m64n128 a page
//           producer       8      40         a page a TMA box
//           idle           9-11   40
// Shared    q  [half of d][256 rows][64 d]            65,536   128-byte swizzle
//           k  4 stages [half of d][128 keys][64 d]  131,072   the same
// Barriers  name        arrivals                     who arrives             who waits
//           full        1 + bytes of a page          producer                consumers
//           empty       8                            each consumer warp      producer
//           named 1, 2  128                          a consumer, about its rows of q
//           A page that is not there is announced without bytes, and its scores are -inf.
// Timeline  consumer: wait page | products of tile 0, tile 1 | maxima of tile 0 under the products
//           of tile 1 | release the page | maxima of tile 1, store. The other consumer's products
//           fill the tensor cores meanwhile.
// Next      the launch of the top-k begins when every CTA is at its last page.
// Limits    bfloat16; tensor map: strides of the index cache are multiples of 16 bytes.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"
#include "step1_score/sm80/score_rows.cuh"

namespace msa::index_score::sm90 {

using sm80::end_of_token;
using sm80::find_page;
using sm80::find_piece;
using sm80::kAllLanes;
using sm80::max_or_nan;
using sm80::ScoreCursor;
using sm80::token_of_row;

constexpr int kTileConsumers = 2;
constexpr int kTileThreads = (kTileConsumers + 1) * 128;
constexpr int kConsumerRegisters = 232;
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRows = 128;
constexpr int kTileRows = kTileConsumers * kConsumerRows;
constexpr int kTileStages = 4;
constexpr int kRowBytes = kHeadDim * 2;
constexpr int kHalfBytes = kRowBytes / 2;  // of a row, 128-byte swizzle
constexpr int kTilePageBytes = kBlock * kRowBytes;
static_assert((kTileConsumers * kConsumerRegisters + kProducerRegisters) * 128 <=
                  168 * kTileThreads,
              "setmaxnreg hands out what the CTA holds at launch");

struct TileSharedStorage {
  alignas(1024) uint8_t q[2][kTileRows][kHalfBytes];
  alignas(1024) uint8_t k[kTileStages][kTilePageBytes];
  uint64_t full[kTileStages], empty[kTileStages];
  int32_t there[kTileStages];  // whether the stage holds a page
};
constexpr int kTileSharedBytes = sizeof(TileSharedStorage);
static_assert(kTileSharedBytes <= 227 * 1024, "shared memory of one CTA");

__device__ __forceinline__ void produce_pages(const ScoreWork& work, const CUtensorMap* map,
                                              TileSharedStorage& shared) {
  const int lane = threadIdx.x % 32;
  ScoreCursor cursor = find_piece(work.batch, work.cut, blockIdx.x, gridDim.x);
  msa::sm90::RingPosition<kTileStages> ring;
  while (cursor.left > 0) {
    const int32_t page = find_page(work, cursor);
    if (lane == 0) {
      msa::sm90::barrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
      shared.there[ring.stage] = page >= 0;
      if (page >= 0) {
        msa::sm90::barrier_arrive_expect(&shared.full[ring.stage], kTilePageBytes);
        msa::sm90::copy_box(shared.k[ring.stage], map, &shared.full[ring.stage], 0, 0, 0, 0, page);
      } else {
        msa::sm90::barrier_arrive(&shared.full[ring.stage]);
      }
    }
    __syncwarp();
    ring.advance();
    cursor.advance(work.batch, work.cut);
  }
}

// A consumer's rows of a tile to shared memory; rows past the tile are zeros.
__device__ __forceinline__ void load_queries(const ScoreWork& work, const ScoreCursor& cursor,
                                             TileSharedStorage& shared, int consumer) {
  constexpr int kRowChunks = kRowBytes / 16;
  const int thread = threadIdx.x % 128, chunk = thread % kRowChunks;
  const int32_t tile_token = cursor.tile << work.cut.log_tile;
  const int64_t first_token = cursor.tokens.first_token + tile_token;
  const int32_t rows = cursor.tokens.tile_tokens(work.cut, cursor.tile) * work.num_heads;
  constexpr int kThreadRows = kConsumerRows / (128 / kRowChunks);
  uint4 bits[kThreadRows];  // all loads under way before the first store
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const int row = consumer * kConsumerRows + thread / kRowChunks + i * (128 / kRowChunks);
    bits[i] = {0, 0, 0, 0};
    if (row < rows) {
      const int32_t token = token_of_row(work, row), head = row - token * work.num_heads;
      const auto* source = static_cast<const uint8_t*>(work.index_q.data) +
                           ((first_token + token) * work.index_q.token_stride +
                            (work.first_head + head) * work.index_q.head_stride) *
                               2;
      bits[i] = *reinterpret_cast<const uint4*>(source + chunk * 16);
    }
  }
  msa::sm90::named_barrier(1 + consumer, 128);  // the rows of the tile before have been used
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const int row = consumer * kConsumerRows + thread / kRowChunks + i * (128 / kRowChunks);
    *reinterpret_cast<uint4*>(&shared.q[chunk / 8][row][(chunk % 8 ^ row % 8) * 16]) = bits[i];
  }
  msa::sm90::fence_async_proxy();
  msa::sm90::named_barrier(1 + consumer, 128);
}

// Of both rows of a thread in an accumulator: the largest of the thread's columns.
__device__ __forceinline__ void row_maxima(const msa::sm90::Accumulator& values, float& low,
                                           float& high) {
  low = max_or_nan(values[0], values[1]);
  high = max_or_nan(values[2], values[3]);
#pragma unroll
  for (int i = 4; i < 64; i += 4) {
    low = max_or_nan(low, max_or_nan(values[i], values[i + 1]));
    high = max_or_nan(high, max_or_nan(values[i + 2], values[i + 3]));
  }
}

__device__ __forceinline__ void consume_pages(const ScoreWork& work, TileSharedStorage& shared,
                                              int consumer) {
  using namespace msa::sm90;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint64_t q_base =
      make_descriptor(shared_address(shared.q[0][consumer * kConsumerRows]), 16, 1024);
  const uint64_t k_base = make_descriptor(shared_address(shared.k[0]), 16, 1024);
  // The row that the reduction below leaves in this lane.
  const int row =
      consumer * kConsumerRows + (lane & 2 ? 64 : 0) + warp * 16 + (lane & 1 ? 8 : 0) + lane / 4;

  ScoreCursor next = find_piece(work.batch, work.cut, blockIdx.x, gridDim.x);
  bool more = next.left > 0, new_tile = true;
  RingPosition<kTileStages> ring;
  float* target = nullptr;
  int32_t end = 0, consumer_end = 0;  // the first block that the row, and no row, wants
  while (more) {
    const ScoreCursor cursor = next;
    if (new_tile) {
      load_queries(work, cursor, shared, consumer);
      const int32_t tile_token = cursor.tile << work.cut.log_tile;
      const int32_t first_pos = cursor.tokens.first_pos + tile_token;
      const int32_t rows = cursor.tokens.tile_tokens(work.cut, cursor.tile) * work.num_heads;
      const int32_t token = token_of_row(work, row), head = row - token * work.num_heads;
      target = work.scores.data +
               (cursor.tokens.first_token + tile_token - work.first_token + token) *
                   work.scores.token_stride +
               (work.first_head + head) * work.scores.head_stride;
      end = row < rows ? end_of_token(work.cut, first_pos + token) : 0;
      const int32_t last_row = min((consumer + 1) * kConsumerRows, rows) - 1;
      consumer_end = last_row >= consumer * kConsumerRows
                         ? end_of_token(work.cut, first_pos + token_of_row(work, last_row))
                         : 0;
    }
    new_tile = next.advance(work.batch, work.cut);
    more = next.left > 0;
    if (!more) start_next_kernel();

    barrier_wait(&shared.full[ring.stage], ring.phase);
    float score = -INFINITY;
    if (cursor.block < consumer_end && shared.there[ring.stage]) {
      const uint32_t k = ring.stage * kTilePageBytes;
      Accumulator sums[2];
      wgmma_fence();
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step) {
          const int half = step / 4, within = step % 4 * 32;
          multiply_ss(
              advance(q_base, half * kTileRows * kHalfBytes + tile * 64 * kHalfBytes + within),
              advance(k_base, k + half * (kTilePageBytes / 2) + within), sums[tile], step > 0);
        }
        wgmma_commit();
      }
      float best[2][2];
      wgmma_wait<1>();
      hold(sums[0]);
      row_maxima(sums[0], best[0][0], best[0][1]);
      wgmma_wait<0>();
      hold(sums[1]);
      if (lane == 0) barrier_arrive(&shared.empty[ring.stage]);
      row_maxima(sums[1], best[1][0], best[1][1]);
      // Four rows of four lanes: each lane keeps one.
      const bool upper = lane & 2, odd = lane & 1;
      float low = max_or_nan(upper ? best[1][0] : best[0][0],
                             __shfl_xor_sync(kAllLanes, upper ? best[0][0] : best[1][0], 2));
      float high = max_or_nan(upper ? best[1][1] : best[0][1],
                              __shfl_xor_sync(kAllLanes, upper ? best[0][1] : best[1][1], 2));
      score = max_or_nan(odd ? high : low, __shfl_xor_sync(kAllLanes, odd ? low : high, 1));
    } else if (lane == 0) {
      barrier_arrive(&shared.empty[ring.stage]);
    }
    if (cursor.block < end) target[cursor.block * work.scores.block_stride] = score;
    ring.advance();
  }
}

static __global__ void __launch_bounds__(kTileThreads, 1)
    msa_index_score_tile_sm90_kernel(const __grid_constant__ ScoreWork work,
                                     const __grid_constant__ CUtensorMap k_map) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  TileSharedStorage& shared = *reinterpret_cast<TileSharedStorage*>(shared_memory);
  if (threadIdx.x == 0) {
    msa::sm90::prefetch_tensor_map(&k_map);
    for (int stage = 0; stage < kTileStages; ++stage) {
      msa::sm90::barrier_init(&shared.full[stage], 1);
      msa::sm90::barrier_init(&shared.empty[stage], kTileConsumers * 4);
    }
    msa::sm90::fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_kernel();
  // A warp's index through a shuffle, so that the compiler knows it is the same in all its lanes.
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0);
  if (warp >= kTileConsumers * 4) {
    msa::sm90::lower_registers<kProducerRegisters>();
    if (warp == kTileConsumers * 4) produce_pages(work, &k_map, shared);
  } else {
    msa::sm90::raise_registers<kConsumerRegisters>();
    consume_pages(work, shared, warp / 4);
  }
}

}  // namespace msa::index_score::sm90
