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
// Barriers  name   arrivals                       who arrives           who waits
//           full   1 + bytes of page and factors  producer              consumers
//           empty  16                             each consumer warp    producer
//           A page that is not there is announced without bytes, and its bounds are -inf.
// Timeline  consumer: wait page | products | release the page | maxima, bound, store. The products
//           of the other three fill the tensor cores meanwhile; two consumers of 128 rows leave
//           them idle for a tenth of the time.
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
static_assert((kBoundConsumers * kBoundConsumerRegisters + kBoundProducerRegisters) * 128 <=
                  96 * kBoundThreads,
              "setmaxnreg hands out what the CTA holds at launch");

struct BoundWork {
  ScoreWork scores;  // their bounds go elsewhere; all heads in one launch
  // [rows][row_blocks]: as ordered integers (step2_select/sm80/topk_row.cuh); a row is
  // (token - first_token) * num_heads + head.
  uint32_t* bounds;
  int64_t row_blocks;
  const float4* row_factors;    // [T * Hi]
  const float4* block_factors;  // [B * max_pages]
};

struct BoundSharedStorage {
  alignas(1024) uint8_t k[kBoundStages][kRawPageBytes];
  float4 factors[kBoundStages];  // x < 0: the stage holds no page
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

// As row_maxima(), of the bits: the same where a largest is not negative, by half as many
// instructions, as there is one for the largest of three. NaN of the tensor cores is positive.
__device__ __forceinline__ void row_maxima_of_bits(const msa::sm90::Accumulator& values,
                                                   int32_t& low, int32_t& high) {
  const auto bits = [&](int i) { return __float_as_int(values[i]); };
  low = max(bits(0), bits(1));
  high = max(bits(2), bits(3));
#pragma unroll
  for (int i = 4; i < 64; i += 4) {
    low = __vimax3_s32(low, bits(i), bits(i + 1));
    high = __vimax3_s32(high, bits(i + 2), bits(i + 3));
  }
}

__device__ __forceinline__ void consume_bound_pages(const BoundWork& work,
                                                    BoundSharedStorage& shared, int consumer) {
  using namespace msa::sm90;
  constexpr int kSteps = kHeadDim / 32;
  const ScoreWork& scores = work.scores;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint64_t k_base = make_descriptor(shared_address(shared.k[0]), 16, 1024);
  const int first_row = consumer * kBoundConsumerRows + warp * 16 + lane / 4;  // and 8 below it
  // The row that the reduction below leaves in this lane, and in the lane two further.
  const int row = first_row + (lane & 1 ? 8 : 0);

  ScoreCursor next = find_piece(scores.batch, scores.cut, blockIdx.x, gridDim.x);
  bool more = next.left > 0, new_tile = true;
  RingPosition<kBoundStages> ring;
  uint32_t queries[kSteps][4];
  float4 row_factors{};
  uint32_t* target = nullptr;
  int32_t end = 0, consumer_end = 0;  // the first block that the row, and no row, wants
  while (more) {
    const ScoreCursor cursor = next;
    if (new_tile) {
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
      end = 0;
      if (row < rows) {
        row_factors = work.row_factors[(first_token + token) * scores.num_heads + head];
        if (!(lane & 2)) end = end_of_token(scores.cut, first_pos + token);
      }
      consumer_end =
          end_of_rows(scores, first_pos, rows, consumer * kBoundConsumerRows, kBoundConsumerRows);
    }
    new_tile = next.advance(scores.batch, scores.cut);
    more = next.left > 0;
    if (!more) start_next_kernel();

    barrier_wait(&shared.full[ring.stage], ring.phase);
    uint32_t bound = score_key(-INFINITY);
    // Before the products: a load between them would keep the later ones waiting.
    const float4 block_factors = shared.factors[ring.stage];
    if (cursor.block < consumer_end && block_factors.x >= 0.0f) {
      Accumulator sums;
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        multiply_rs_e4m3(queries[step], advance(k_base, ring.stage * kRawPageBytes + step * 32),
                         sums, step > 0);
      }
      wgmma_commit();
      float error = score_error(row_factors, block_factors);
      compute_here(error);  // now, while the products are under way
      wgmma_wait<0>();
      hold(sums);
      if (lane == 0) barrier_arrive(&shared.empty[ring.stage]);
      int32_t low, high;
      row_maxima_of_bits(sums, low, high);
      // Two rows of four lanes: each lane keeps one.
      const bool odd = lane & 1;
      int32_t best = max(odd ? high : low, __shfl_xor_sync(kAllLanes, odd ? low : high, 1));
      best = max(best, __shfl_xor_sync(kAllLanes, best, 2));
      float score = __int_as_float(best);
      if (__any_sync(kAllLanes, best < 0)) {
        float low_score, high_score;
        row_maxima(sums, low_score, high_score);
        score = max_or_nan(odd ? high_score : low_score,
                           __shfl_xor_sync(kAllLanes, odd ? low_score : high_score, 1));
        score = max_or_nan(score, __shfl_xor_sync(kAllLanes, score, 2));
      }
      bound = score_key(upper_bound(score, error));
    } else if (lane == 0) {
      barrier_arrive(&shared.empty[ring.stage]);
    }
    if (cursor.block < end) target[cursor.block] = bound;
    ring.advance();
  }
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
