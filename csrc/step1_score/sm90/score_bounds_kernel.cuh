// Steps 1 and 2 for many query rows a request (prefill) and FP8 index keys on Hopper: upper bounds
// of the scores of tiles of query rows with every block before their tokens' own.
//
//   bound[h, t, j] = max over the 128 keys of block j of index_q[t, h] . key, by e4m3 products that
//                    Hopper sums in few bits, plus how far that may be off (score_error.cuh)
//
// Twice the speed of exact products; what bounds leave open is scored again (step2_select/sm90).
// Bound by the tensor cores, and by power: 256 query rows share a page. No mask, as own blocks are
// forced.
//
// Grid      persistent, a CTA an SM, pieces of the line of (tile, page) units as in the exact
//           kernel (score_tile_kernel.cuh).
// Roles     role           warps  registers  does
//           consumer 0..3  0-15   112        64 rows each, in registers: one product m64n128 a page
//           producer       16     32         a page a TMA box, and its factors; 17-19 idle
// Shared    k        8 stages [128 keys][128 d]   131,072   128-byte swizzle
//           factors  8 stages of a float4             128
//           bounds   of a warp's last 8 blocks     10,240
// Barriers  name   arrivals                       who arrives           who waits
//           full   1 + bytes of page and factors  producer              consumers
//           empty  16                             each consumer warp    producer
//           A page that is not there is announced without bytes, and its bounds are -inf.
// Timeline  consumer: wait page | products, and under them: bound and store of the page before, the
//           next unit, this page's error | release the page | maxima of columns. The tensor cores
//           have the products of the other three during the maxima alone. Bounds are stored 8
//           blocks at a time: L2 takes a whole sector of a row as it takes a word of it.
// Next      the launch of the next kernel begins when every CTA is at its last page.
// Limits    tensor map: strides of the index cache are multiples of 16 bytes.
#pragma once

#include "step1_score/sm90/score_error.cuh"
#include "step1_score/sm90/score_tile_kernel.cuh"
#include "step2_select/sm80/topk_row.cuh"

namespace msa::index_score::sm90 {

using topk_blocks::sm80::score_key;

constexpr int kBoundConsumers = 4;
constexpr int kBoundThreads = (kBoundConsumers + 1) * 128;
constexpr int kBoundConsumerRows = kTileRows / kBoundConsumers;
constexpr int kBoundConsumerRegisters = 112, kBoundProducerRegisters = 32;
constexpr int kBoundStages = 8;
constexpr int kBoundGroup = 8;   // blocks that are stored together: a sector of L2
constexpr int kBoundPitch = 20;  // words between blocks of 16 rows: both parts meet other banks
static_assert((kBoundConsumers * kBoundConsumerRegisters + kBoundProducerRegisters) * 128 <=
                  96 * kBoundThreads,
              "setmaxnreg hands out what the CTA holds at launch");

struct BoundWork {
  ScoreWork scores;  // their bounds go elsewhere; all heads in one launch
  // [rows][row_blocks], which is a multiple of kBoundGroup: as ordered integers
  // (step2_select/sm80/topk_row.cuh); a row is (token - first_token) * num_heads + head. Blocks
  // past a row's own, as far as its tile has them, are written too.
  uint32_t* bounds;
  int64_t row_blocks;
  const float4* row_factors;    // [T * Hi]
  const float4* block_factors;  // [B * max_pages]
};

struct BoundSharedStorage {
  alignas(1024) uint8_t k[kBoundStages][kRawPageBytes];
  float4 factors[kBoundStages];  // x < 0: the stage holds no page
  uint32_t bounds[kBoundConsumers * 4][kBoundGroup][kBoundPitch];
  uint64_t full[kBoundStages], empty[kBoundStages];
};

__device__ __forceinline__ void produce_bound_pages(const BoundWork& work, const CUtensorMap* map,
                                                    BoundSharedStorage& shared) {
  const ScoreWork& scores = work.scores;
  const int lane = threadIdx.x % 32;
  ScoreCursor cursor = find_piece(scores.batch, scores.cut, blockIdx.x, gridDim.x);
  msa::sm90::RingPosition<kBoundStages> ring;
  while (cursor.left > 0) {
    const int32_t page = find_page(scores, cursor);
    if (lane == 0) {
      msa::sm90::barrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
      uint64_t* const full = &shared.full[ring.stage];
      if (page >= 0) {
        msa::sm90::barrier_arrive_expect(full, kRawPageBytes + sizeof(float4));
        msa::sm90::copy_box(shared.k[ring.stage], map, full, 0, 0, 0, 0, page);
        msa::sm90::copy_bytes(
            &shared.factors[ring.stage],
            work.block_factors + cursor.request * scores.batch.max_pages + cursor.block,
            sizeof(float4), full);
      } else {
        shared.factors[ring.stage].x = -1.0f;
        msa::sm90::barrier_arrive(full);
      }
    }
    __syncwarp();
    ring.advance();
    cursor.advance(scores.batch, scores.cut);
  }
}

// The score of bits that were brought into the order of signed numbers.
__device__ __forceinline__ float score_of_order(int32_t order) {
  return __int_as_float(order < 0 ? order ^ 0x7fffffff : order);
}

__device__ __forceinline__ void consume_bound_pages(const BoundWork& work,
                                                    BoundSharedStorage& shared, int consumer) {
  using namespace msa::sm90;
  constexpr int kSteps = kHeadDim / 32, kPitchBytes = kBoundPitch * sizeof(uint32_t);
  const ScoreWork& scores = work.scores;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint64_t k_base = make_descriptor(shared_address(shared.k[0]), 16, 1024);
  const int first_row = consumer * kBoundConsumerRows + warp * 16 + lane / 4;  // and 8 below it
  // The row that the reduction below leaves in this lane, and in the lane two further: one of them
  // stores the first half of its blocks, the other the second.
  const int row_of_warp = lane / 4 + (lane & 1 ? 8 : 0), part = (lane & 2) * 2;
  const int row = consumer * kBoundConsumerRows + warp * 16 + row_of_warp;
  // Through a shuffle, so that the compiler does not find it anew before every store.
  const uint32_t row_bounds = __shfl_sync(
      kAllLanes, shared_address(&shared.bounds[consumer * 4 + warp][0][row_of_warp]), lane);

  ScoreCursor next = find_piece(scores.batch, scores.cut, blockIdx.x, gridDim.x);
  bool more = next.left > 0, new_tile = true;
  RingPosition<kBoundStages> ring;
  uint64_t keys = k_base;  // the descriptor of the stage, found under the products before
  const auto advance_ring = [&] {
    ring.advance();
    keys = ring.stage == 0 ? k_base : advance(keys, kRawPageBytes);
  };
  uint32_t queries[kSteps][4];
  float4 row_factors{};
  uint32_t* target = nullptr;
  bool is_there = false;     // the row
  int32_t first_block = 0;   // of the tile, in this piece
  int32_t consumer_end = 0;  // the first block that no row wants

  // Of the page before: what is left to do under the products of the next.
  int32_t best[2], block = -1;  // its block, negative where there is none
  float error = 0.0f;           // negative: there is no page, or nobody wants it
  bool is_last = false;         // of the tile in this piece
  const auto finish_page = [&] {
    if (block < 0) return;
    const float score = score_of_order(best_of_quad<LargestSigned>(best));
    const uint32_t bound =
        error >= 0.0f ? score_key(upper_bound(score, error)) : score_key(-INFINITY);
    const int32_t place = block & (kBoundGroup - 1);
    store_shared_4(row_bounds + place * kPitchBytes, bound);  // two lanes the same
    if (place < kBoundGroup - 1 && !is_last) return;
    __syncwarp();
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = load_shared_4(row_bounds + (part + i) * kPitchBytes);
    const int32_t begin = block - place + part;
    if (is_there && place == kBoundGroup - 1 && first_block <= block - place) {
      *reinterpret_cast<uint4*>(target + begin) = {words[0], words[1], words[2], words[3]};
    } else if (is_there) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (begin + i >= first_block && begin + i <= block) target[begin + i] = words[i];
      }
    }
    __syncwarp();
  };

  if (more) barrier_wait(&shared.full[0], 0);
  while (more) {  // the page is there
    const ScoreCursor cursor = next;
    if (new_tile) {
      finish_page();
      block = -1;
      const int32_t tile_token = cursor.tile << scores.cut.log_tile;
      const int64_t first_token = cursor.tokens.first_token + tile_token;
      const int32_t first_pos = cursor.tokens.first_pos + tile_token;
      const int32_t rows = cursor.tokens.tile_tokens(scores.cut, cursor.tile) * scores.num_heads;
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        const int r = first_row + high * 8;
        const int32_t token = token_of_row(scores, r), head = r - token * scores.num_heads;
        const uint8_t* source = static_cast<const uint8_t*>(scores.index_q.data) +
                                (first_token + token) * scores.index_q.token_stride +
                                head * scores.index_q.head_stride + lane % 4 * 4;
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) {
          queries[i / 2][i % 2 * 2 + high] =
              r < rows ? *reinterpret_cast<const uint32_t*>(source + i * 16) : 0;
        }
      }
      const int32_t token = token_of_row(scores, row), head = row - token * scores.num_heads;
      const int64_t window_token = first_token - scores.first_token + token;
      target = work.bounds + (window_token * scores.num_heads + head) * work.row_blocks;
      is_there = row < rows;
      if (is_there) {
        row_factors = work.row_factors[(first_token + token) * scores.num_heads + head];
      }
      first_block = cursor.block;
      consumer_end =
          end_of_rows(scores, first_pos, rows, consumer * kBoundConsumerRows, kBoundConsumerRows);
    }
    const bool has_rows = consumer_end > 0;
    if (!has_rows) {
      barrier_arrive_warp(&shared.empty[ring.stage]);
      advance_ring();
      new_tile = next.advance(scores.batch, scores.cut);
      more = next.left > 0;
      if (!more) start_next_kernel();
      if (more) barrier_wait(&shared.full[ring.stage], ring.phase);
      continue;
    }
    // Before the products: a load between them would keep the later ones waiting.
    const float4 block_factors = shared.factors[ring.stage];
    Accumulator sums;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      multiply_rs_e4m3(queries[step], advance(keys, step * 32), sums, step > 0);
    }
    wgmma_commit();
    finish_page();
    new_tile = next.advance(scores.batch, scores.cut);
    more = next.left > 0;
    if (!more) start_next_kernel();
    block = cursor.block;
    is_last = new_tile || !more;
    error = block < consumer_end && block_factors.x >= 0.0f
                ? score_error(row_factors, block_factors)
                : -1.0f;
    uint64_t* const empty = &shared.empty[ring.stage];
    advance_ring();
    if (more) barrier_wait(&shared.full[ring.stage], ring.phase);
    wgmma_wait<0>();
    hold(sums);
    if (lane == 0) barrier_arrive(empty);
    best_of_columns<LargestSigned>(sums, best[0], best[1]);
    if (__any_sync(kAllLanes, (best[0] | best[1]) < 0)) {
      int32_t negative[2];
      best_of_columns<SmallestUnsigned>(sums, negative[0], negative[1]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (best[i] < 0) best[i] = negative[i] ^ 0x7fffffff;
      }
    }
  }
  finish_page();
}

__global__ void __launch_bounds__(kBoundThreads, 1)
    msa_score_bounds_sm90_kernel(const __grid_constant__ BoundWork work,
                                 const __grid_constant__ CUtensorMap k_map) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  auto& shared = *reinterpret_cast<BoundSharedStorage*>(shared_memory);
  if (threadIdx.x == 0) {
    msa::sm90::prefetch_tensor_map(&k_map);
    for (int stage = 0; stage < kBoundStages; ++stage) {
      msa::sm90::barrier_init(&shared.full[stage], 1);
      msa::sm90::barrier_init(&shared.empty[stage], kBoundConsumers * 4);
    }
    msa::sm90::fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_kernel();
  // A warp's index through a shuffle, so that the compiler knows it is the same in all its lanes.
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0);
  if (warp >= kBoundConsumers * 4) {
    msa::sm90::lower_registers<kBoundProducerRegisters>();
    if (warp == kBoundConsumers * 4) produce_bound_pages(work, &k_map, shared);
  } else {
    msa::sm90::raise_registers<kBoundConsumerRegisters>();
    consume_bound_pages(work, shared, warp / 4);
  }
}

}  // namespace msa::index_score::sm90
