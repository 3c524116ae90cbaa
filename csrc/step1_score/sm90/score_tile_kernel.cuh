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
//           consumer 0..1  0-7    232 (216)  128 rows each, two products m64n128 a page
//           producer       8      40         bfloat16: a page a TMA box; 9-11 idle
//           converter      8-11   (72)       FP8: the same, and each page to float16, exactly
//                                            (why not FP8 products: docs/kernels/select_blocks.md)
// Shared    q    [half of d][256 rows][64 d]              65,536   128-byte swizzle
//           k    4 (3) stages [half of d][128 keys][64 d]
//                                              131,072 (98,304)   the same
//           raw  2 stages [128 keys][128 d], FP8 alone    32,768   the same
// Barriers  name        arrivals                     who arrives             who waits
//           full        1 + bytes of a page (128)    producer (converter)    consumers
//           empty       8                            each consumer warp      producer (converter)
//           raw_full    1 + bytes of a page          warp 8                  converter
//           named 1, 2  128                          a consumer, about its rows of q
//           named 3     128                          the converter: a raw stage has been read
//           A page that is not there is announced without bytes, and its scores are -inf.
// Timeline  consumer: wait page | products of tile 0, tile 1 | maxima of tile 0 under the products
//           of tile 1 | release the page | maxima of tile 1, store. The other consumer's products
//           fill the tensor cores meanwhile.
// Next      the launch of the top-k begins when every CTA is at its last page.
// Limits    tensor map: strides of the index cache are multiples of 16 bytes.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"
#include "step1_score/sm80/score_rows.cuh"

namespace msa::index_score::sm90 {

using sm80::end_of_rows;
using sm80::end_of_token;
using sm80::find_page;
using sm80::find_piece;
using sm80::ScoreCursor;
using sm80::token_of_row;

constexpr int kTileConsumers = 2;
constexpr int kTileThreads = (kTileConsumers + 1) * 128;
constexpr int kConsumerRows = 128;
constexpr int kTileRows = kTileConsumers * kConsumerRows;
constexpr int kHalfBytes = kHeadDim;  // half a row of 16-bit elements, 128-byte swizzle
constexpr int kTilePageBytes = kBlock * 2 * kHalfBytes;
constexpr int kRawPageBytes = kBlock * kHeadDim;
constexpr int kRawStages = 2;

// What differs between bfloat16 and FP8.
template <DType dtype>
struct TileConfig {
  static constexpr bool kConverts = dtype == DType::kFloat8E4M3;
  static constexpr int kStages = kConverts ? 3 : 4;
  static constexpr int kConsumerRegisters = kConverts ? 216 : 232;
  static constexpr int kProducerRegisters = kConverts ? 72 : 40;
  static constexpr int kFullArrivals = kConverts ? 128 : 1;
  static_assert((kTileConsumers * kConsumerRegisters + kProducerRegisters) * 128 <=
                    168 * kTileThreads,
                "setmaxnreg hands out what the CTA holds at launch");
};

template <DType dtype>
struct TileSharedStorage {
  using Config = TileConfig<dtype>;
  alignas(1024) uint8_t q[2][kTileRows][kHalfBytes];
  alignas(1024) uint8_t k[Config::kStages][kTilePageBytes];
  alignas(
      1024) uint8_t raw[Config::kConverts ? kRawStages : 1][Config::kConverts ? kRawPageBytes : 16];
  uint64_t full[Config::kStages], empty[Config::kStages], raw_full[kRawStages];
  int32_t there[Config::kStages];  // whether the stage holds a page
};

template <DType dtype>
constexpr int tile_shared_bytes() {
  static_assert(sizeof(TileSharedStorage<dtype>) <= 227 * 1024, "shared memory of one CTA");
  return sizeof(TileSharedStorage<dtype>);
}

// 16 bytes of e4m3 as 32 of float16.
__device__ __forceinline__ void to_half(const uint4& bits, uint4 (&halves)[2]) {
  halves[0] = {e4m3_to_half(bits.x), e4m3_to_half(bits.x >> 16), e4m3_to_half(bits.y),
               e4m3_to_half(bits.y >> 16)};
  halves[1] = {e4m3_to_half(bits.z), e4m3_to_half(bits.z >> 16), e4m3_to_half(bits.w),
               e4m3_to_half(bits.w >> 16)};
}

// Where chunk `chunk` (16 bytes) of a row of 128 bytes lies, 128-byte swizzle.
__device__ __forceinline__ int swizzled(int row, int chunk) { return (chunk ^ row % 8) * 16; }

__device__ __forceinline__ void produce_pages(const ScoreWork& work, const CUtensorMap* map,
                                              TileSharedStorage<DType::kBFloat16>& shared) {
  const int lane = threadIdx.x % 32;
  ScoreCursor cursor = find_piece(work.batch, work.cut, blockIdx.x, gridDim.x);
  msa::sm90::RingPosition<TileConfig<DType::kBFloat16>::kStages> ring;
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

// A page of e4m3 to one of float16 in the layout of the products, by 128 threads. Both stores of a
// warp meet every bank evenly: the threads of either half begin with another chunk.
__device__ __forceinline__ void convert_page(const uint8_t* raw, uint8_t* page) {
  constexpr int kRowChunks = kHeadDim / 16;
  const int thread = threadIdx.x % 128, chunk = thread % kRowChunks, half = chunk / 4;
#pragma unroll
  for (int i = 0; i < kBlock * kRowChunks / 128; ++i) {
    const int row = thread / kRowChunks + i * (128 / kRowChunks);
    uint4 halves[2];
    to_half(*reinterpret_cast<const uint4*>(raw + row * kHeadDim + swizzled(row, chunk)), halves);
    uint8_t* const target = page + half * (kTilePageBytes / 2) + row * kHalfBytes;
    *reinterpret_cast<uint4*>(target + swizzled(row, chunk % 4 * 2 + half)) =
        half ? halves[1] : halves[0];
    *reinterpret_cast<uint4*>(target + swizzled(row, chunk % 4 * 2 + 1 - half)) =
        half ? halves[0] : halves[1];
  }
}

__device__ __forceinline__ void convert_pages(const ScoreWork& work, const CUtensorMap* map,
                                              TileSharedStorage<DType::kFloat8E4M3>& shared) {
  const bool copies = threadIdx.x % 128 == 0;
  const auto copy_raw = [&](int32_t page, int stage) {
    if (!copies || page < 0) return;
    msa::sm90::barrier_arrive_expect(&shared.raw_full[stage], kRawPageBytes);
    msa::sm90::copy_box(shared.raw[stage], map, &shared.raw_full[stage], 0, 0, 0, 0, page);
  };
  ScoreCursor next = find_piece(work.batch, work.cut, blockIdx.x, gridDim.x);
  msa::sm90::RingPosition<TileConfig<DType::kFloat8E4M3>::kStages> ring;
  msa::sm90::RingPosition<kRawStages> raw;  // of the pages that are there
  int32_t next_page = next.left > 0 ? find_page(work, next) : -1;
  copy_raw(next_page, raw.stage);
  while (next.left > 0) {
    const int32_t page = next_page;
    next.advance(work.batch, work.cut);
    next_page = next.left > 0 ? find_page(work, next) : -1;
    const int stage = raw.stage;
    const uint32_t phase = raw.phase;
    if (page >= 0) raw.advance();
    msa::sm90::named_barrier(3, 128);  // the stage of the page before has been read
    copy_raw(next_page, raw.stage);
    msa::sm90::barrier_wait(&shared.empty[ring.stage], ring.phase ^ 1);
    if (copies) shared.there[ring.stage] = page >= 0;
    if (page >= 0) {
      msa::sm90::barrier_wait(&shared.raw_full[stage], phase);
      convert_page(shared.raw[stage], shared.k[ring.stage]);
      msa::sm90::fence_async_proxy();
    }
    msa::sm90::barrier_arrive(&shared.full[ring.stage]);
    ring.advance();
  }
}

// A consumer's rows of a tile to shared memory; rows past the tile are zeros.
template <DType dtype>
__device__ __forceinline__ void load_queries(const ScoreWork& work, const ScoreCursor& cursor,
                                             TileSharedStorage<dtype>& shared, int consumer) {
  constexpr int kBytes = TileConfig<dtype>::kConverts ? 1 : 2;  // of an element in memory
  constexpr int kRowChunks = kHeadDim * kBytes / 16;
  constexpr int kThreadRows = kConsumerRows * kRowChunks / 128;
  const int thread = threadIdx.x % 128, chunk = thread % kRowChunks;
  const int first_row = consumer * kConsumerRows + thread / kRowChunks;
  const int32_t tile_token = cursor.tile << work.cut.log_tile;
  const int64_t first_token = cursor.tokens.first_token + tile_token;
  const int32_t rows = cursor.tokens.tile_tokens(work.cut, cursor.tile) * work.num_heads;
  uint4 bits[kThreadRows];  // all loads under way before the first store
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const int row = first_row + i * (128 / kRowChunks);
    bits[i] = {0, 0, 0, 0};
    if (row < rows) {
      const int32_t token = token_of_row(work, row), head = row - token * work.num_heads;
      const auto* source = static_cast<const uint8_t*>(work.index_q.data) +
                           ((first_token + token) * work.index_q.token_stride +
                            (work.first_head + head) * work.index_q.head_stride) *
                               kBytes;
      bits[i] = *reinterpret_cast<const uint4*>(source + chunk * 16);
    }
  }
  msa::sm90::named_barrier(1 + consumer, 128);  // the rows of the tile before have been used
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const int row = first_row + i * (128 / kRowChunks);
    if constexpr (TileConfig<dtype>::kConverts) {
      uint4 halves[2];
      to_half(bits[i], halves);
      uint8_t* const target = shared.q[chunk / 4][row];
      *reinterpret_cast<uint4*>(target + swizzled(row, chunk % 4 * 2)) = halves[0];
      *reinterpret_cast<uint4*>(target + swizzled(row, chunk % 4 * 2 + 1)) = halves[1];
    } else {
      *reinterpret_cast<uint4*>(&shared.q[chunk / 8][row][swizzled(row, chunk % 8)]) = bits[i];
    }
  }
  msa::sm90::fence_async_proxy();
  msa::sm90::named_barrier(1 + consumer, 128);
}

// The largest of many values is, by their bits, the largest signed number or, where that is
// negative, the smallest unsigned one. NaN of the tensor cores is positive, and so above all. There
// are instructions for three of either, and for two floats at most.
struct LargestSigned {
  static __device__ __forceinline__ int32_t of(int32_t a, int32_t b) { return max(a, b); }
  static __device__ __forceinline__ int32_t of(int32_t a, int32_t b, int32_t c) {
    return __vimax3_s32(a, b, c);
  }
};
struct SmallestUnsigned {
  static __device__ __forceinline__ int32_t of(int32_t a, int32_t b) {
    return static_cast<int32_t>(min(static_cast<uint32_t>(a), static_cast<uint32_t>(b)));
  }
  static __device__ __forceinline__ int32_t of(int32_t a, int32_t b, int32_t c) {
    return static_cast<int32_t>(
        __vimin3_u32(static_cast<uint32_t>(a), static_cast<uint32_t>(b), static_cast<uint32_t>(c)));
  }
};

// Of both rows of a thread in an accumulator: the best of the thread's columns.
template <typename Best>
__device__ __forceinline__ void best_of_columns(const msa::sm90::Accumulator& values, int32_t& low,
                                                int32_t& high) {
  const auto bits = [&](int i) { return __float_as_int(values[i]); };
  low = Best::of(bits(0), bits(1));
  high = Best::of(bits(2), bits(3));
#pragma unroll
  for (int i = 4; i < 64; i += 4) {
    low = Best::of(low, bits(i), bits(i + 1));
    high = Best::of(high, bits(i + 2), bits(i + 3));
  }
}

// Two rows of four lanes, `best` of which a lane has seen: the even lanes get that of the lower
// row, the odd ones that of the upper.
template <typename Best>
__device__ __forceinline__ int32_t best_of_quad(const int32_t (&best)[2]) {
  const bool odd = threadIdx.x & 1;
  const int32_t own =
      Best::of(odd ? best[1] : best[0], __shfl_xor_sync(kAllLanes, odd ? best[0] : best[1], 1));
  return Best::of(own, __shfl_xor_sync(kAllLanes, own, 2));
}

// The same of an accumulator, as scores.
__device__ __forceinline__ float largest_of_quad(const msa::sm90::Accumulator& values) {
  int32_t best[2];
  best_of_columns<LargestSigned>(values, best[0], best[1]);
  int32_t largest = best_of_quad<LargestSigned>(best);
  if (__any_sync(kAllLanes, largest < 0)) {
    best_of_columns<SmallestUnsigned>(values, best[0], best[1]);
    const int32_t negative = best_of_quad<SmallestUnsigned>(best);
    largest = largest < 0 ? negative : largest;
  }
  return __int_as_float(largest);
}

// Four rows of four lanes, `best` of which a lane has seen: each lane gets that of one row.
template <typename Best>
__device__ __forceinline__ int32_t best_of_rows(const int32_t (&best)[2][2]) {
  const bool upper = threadIdx.x & 2, odd = threadIdx.x & 1;
  const int32_t low = Best::of(upper ? best[1][0] : best[0][0],
                               __shfl_xor_sync(kAllLanes, upper ? best[0][0] : best[1][0], 2));
  const int32_t high = Best::of(upper ? best[1][1] : best[0][1],
                                __shfl_xor_sync(kAllLanes, upper ? best[0][1] : best[1][1], 2));
  return Best::of(odd ? high : low, __shfl_xor_sync(kAllLanes, odd ? low : high, 1));
}

template <DType dtype>
__device__ __forceinline__ void consume_pages(const ScoreWork& work,
                                              TileSharedStorage<dtype>& shared, int consumer) {
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
  RingPosition<TileConfig<dtype>::kStages> ring;
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
      consumer_end = end_of_rows(work, first_pos, rows, consumer * kConsumerRows, kConsumerRows);
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
          const uint64_t a =
              advance(q_base, half * kTileRows * kHalfBytes + tile * 64 * kHalfBytes + within);
          const uint64_t b = advance(k_base, k + half * (kTilePageBytes / 2) + within);
          if constexpr (TileConfig<dtype>::kConverts) {
            multiply_ss_float16(a, b, sums[tile], step > 0);
          } else {
            multiply_ss(a, b, sums[tile], step > 0);
          }
        }
        wgmma_commit();
      }
      int32_t best[2][2];
      wgmma_wait<1>();
      hold(sums[0]);
      best_of_columns<LargestSigned>(sums[0], best[0][0], best[0][1]);
      wgmma_wait<0>();
      hold(sums[1]);
      if (lane == 0) barrier_arrive(&shared.empty[ring.stage]);
      best_of_columns<LargestSigned>(sums[1], best[1][0], best[1][1]);
      int32_t largest = best_of_rows<LargestSigned>(best);
      if (__any_sync(kAllLanes, largest < 0)) {
        best_of_columns<SmallestUnsigned>(sums[0], best[0][0], best[0][1]);
        best_of_columns<SmallestUnsigned>(sums[1], best[1][0], best[1][1]);
        const int32_t negative = best_of_rows<SmallestUnsigned>(best);
        largest = largest < 0 ? negative : largest;
      }
      score = __int_as_float(largest);
    } else {
      barrier_arrive_warp(&shared.empty[ring.stage]);
    }
    if (cursor.block < end) target[cursor.block * work.scores.block_stride] = score;
    ring.advance();
  }
}

template <DType dtype>
__global__ void __launch_bounds__(kTileThreads, 1)
    msa_index_score_tile_sm90_kernel(const __grid_constant__ ScoreWork work,
                                     const __grid_constant__ CUtensorMap k_map) {
  using Config = TileConfig<dtype>;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  auto& shared = *reinterpret_cast<TileSharedStorage<dtype>*>(shared_memory);
  if (threadIdx.x == 0) {
    msa::sm90::prefetch_tensor_map(&k_map);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      msa::sm90::barrier_init(&shared.full[stage], Config::kFullArrivals);
      msa::sm90::barrier_init(&shared.empty[stage], kTileConsumers * 4);
    }
    for (uint64_t& barrier : shared.raw_full) msa::sm90::barrier_init(&barrier, 1);
    msa::sm90::fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_kernel();
  // A warp's index through a shuffle, so that the compiler knows it is the same in all its lanes.
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0);
  if (warp >= kTileConsumers * 4) {
    msa::sm90::lower_registers<Config::kProducerRegisters>();
    if constexpr (Config::kConverts) {
      convert_pages(work, &k_map, shared);
    } else if (warp == kTileConsumers * 4) {
      produce_pages(work, &k_map, shared);
    }
  } else {
    msa::sm90::raise_registers<Config::kConsumerRegisters>();
    consume_pages(work, shared, warp / 4);
  }
}

}  // namespace msa::index_score::sm90
