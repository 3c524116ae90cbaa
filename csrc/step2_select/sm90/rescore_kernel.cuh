// Step 2 of FP8 prefill on Hopper, second part: exact scores of the blocks whose bounds do not say
// whether a row selects them.
//
//   score[row, j] = max over the 128 keys of block j of index_q[row] . key, for every row of block
//                   j's list (candidates_kernel.cuh): beside its entry, or, of a wide
//                   row, in place of its bound
//
// Bound by the tensor cores where rows are many; by latency where they are few. e4m3 becomes
// float16, whose products are exact and whose sums are float32: what the exact kernel does
// (step1_score/sm90/score_tile_kernel.cuh).
//
// Grid      persistent, two CTAs an SM; a work item is up to kItemRows rows of one block's list.
// Roles     two warpgroups alike: they convert the keys together, then multiply two tiles of 64
//           rows each, tiles dealt in turns. A warp brings, converts and multiplies its own rows,
//           from registers; four lanes have a row: of each 16 elements, which a step multiplies,
//           each has four neighbours. The keys of a step lie in that order too.
// Shared    k            2 stages [half of d][128 keys][64 d]   65,536   128-byte swizzle
//           raw keys     [4][thread] of 16 bytes                16,384   as they come
//           raw queries  [tile][warp][upper 8 rows][16 d][8 rows][16 bytes]   32,768
// Barriers  __syncthreads, once an item: its keys are there, and the stage before has been read.
// Timeline  item: wait for its copies | convert keys, ask for those of the next | barrier | of each
//           tile: convert rows, ask for the next item's, products, maxima.
// Order     a row's score does not depend on where in a list it stands.
#pragma once

#include "device/sm80_async_copy.cuh"
#include "step1_score/sm90/score_tile_kernel.cuh"
#include "step2_select/sm90/bounded_rows.cuh"

namespace msa::select_blocks::sm90 {

constexpr int kRescoreThreads = 256;
constexpr int kRescoreTiles = 2;                                        // of a warpgroup
constexpr int kRescoreChunks = kHeadDim / 16;                           // of a row, 16 bytes
constexpr int kKeysTogether = kRescoreThreads / kRescoreChunks;          // keys of a round
constexpr int kRescoreKeys = kBlock * kRescoreChunks / kRescoreThreads;  // chunks of a thread
static_assert(kRescoreTiles * kRescoreThreads / 128 * 64 == kItemRows);
static_assert(kKeysTogether % 8 == 0, "keys of a thread have one swizzle");

struct RescoreSharedStorage {
  alignas(1024) uint8_t k[2][2][kBlock][index_score::sm90::kHalfBytes];
  uint4 keys[kRescoreKeys][kRescoreThreads];
  uint4 queries[kRescoreTiles][kRescoreThreads / 32][2][kRescoreChunks][8];
};
static_assert(sizeof(RescoreSharedStorage) <= 113 * 1024, "two CTAs an SM");

// Rows of an item that a thread has a part of, as its list's places.
struct RescorePlaces {
  int32_t rows;  // of the item, and of its list behind it
  int32_t places[kRescoreTiles][2];
};

// 16 elements of a key as float16: of four words the lower halves, and the upper ones.
__device__ __forceinline__ void store_key(uint32_t low_address, uint32_t high_address,
                                          const uint4& bits) {
  uint4 low, high;
  fp8_to_f16(bits.x, low.x, high.x);
  fp8_to_f16(bits.y, low.y, high.y);
  fp8_to_f16(bits.z, low.z, high.z);
  fp8_to_f16(bits.w, low.w, high.w);
  store_shared_16(low_address, low);
  store_shared_16(high_address, high);
}

__global__ void __launch_bounds__(kRescoreThreads, 2)
    msa_rescore_candidates_sm90_kernel(const __grid_constant__ BoundedRows work) {
  using namespace msa::sm90;
  constexpr int kStageBytes = sizeof(RescoreSharedStorage::k[0]);
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  auto& shared = *reinterpret_cast<RescoreSharedStorage*>(shared_memory);
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp = __shfl_sync(kAllLanes, thread / 32, 0);
  // Of keys the thread has chunk `chunk` of first_key_row, first_key_row + kKeysTogether, ... Each
  // store of a warp meets every bank evenly where eight threads hold half of each of two
  // neighbouring rows.
  const int chunk = lane % 4 + lane / 8 % 2 * 4;
  const int first_key_row = warp * 4 + lane / 16 * 2 + lane / 4 % 2;
  const uint32_t first_key = shared_address(shared.k[0][chunk / 4][first_key_row]) +
                             index_score::sm90::swizzled(first_key_row, chunk % 4 * 2);
  // Of a tile's rows it has words of `row_of_warp`, and of that 8 below it.
  const int quarter = lane % 4, row_of_warp = lane / 4;
  const auto first_row_of_tile = [&](int tile) { return (tile * 2 + warp / 4) * 64; };
  const auto first_row_of_warp = [&](int tile) {
    return first_row_of_tile(tile) + warp % 4 * 16 + row_of_warp;
  };
  const uint64_t k_base = make_descriptor(shared_address(shared.k[0]), 16, 1024);
  const auto token_stride = static_cast<uint32_t>(work.index_q.token_stride);
  const auto head_stride = static_cast<uint32_t>(work.index_q.head_stride);
  const uint8_t* const first_query = static_cast<const uint8_t*>(work.index_q.data) +
                                     work.first_token * work.index_q.token_stride + quarter * 16;

  // An item's rows come with it: places of a list past its end hold anything.
  const auto load_places = [&](const RescoreItem& item) {
    RescorePlaces result;
    result.rows = work.list_counts[int64_t{item.list} * kCounterStride] -
                  item.block_chunk / kMostBlocks * kItemRows;
#pragma unroll
    for (int tile = 0; tile < kRescoreTiles; ++tile) {
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        result.places[tile][high] = work.lists[item.begin + first_row_of_warp(tile) + high * 8];
      }
    }
    return result;
  };
  const auto copy_keys = [&](const RescoreItem& item) {
    // Its page is there: its factors are not 0.
    const uint8_t* source = static_cast<const uint8_t*>(work.index_k_cache.data) +
                            item.page * work.index_k_cache.page_stride + chunk * 16 +
                            first_key_row * work.index_k_cache.token_stride;
#pragma unroll
    for (int j = 0; j < kRescoreKeys; ++j) {
      copy_async_16(shared_address(&shared.keys[j][thread]), source);
      source += kKeysTogether * work.index_k_cache.token_stride;
    }
  };
  const auto copy_queries = [&](int tile, const RescorePlaces& item) {
    if (first_row_of_tile(tile) >= item.rows) return;
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      // Past the item's rows any row does: of its scores nothing is kept.
      const bool is_there = first_row_of_warp(tile) + high * 8 < item.rows;
      const int32_t row = is_there ? item.places[tile][high] & ((1 << kLogMostRows) - 1) : 0;
      const uint32_t token = token_of_row(work, row), head = row - token * work.num_heads;
      const uint8_t* const source =
          first_query + uint64_t{token} * token_stride + uint64_t{head} * head_stride;
#pragma unroll
      for (int j = 0; j < kRescoreChunks / 4; ++j) {
        copy_async_16(
            shared_address(&shared.queries[tile][warp][high][j * 4 + quarter][row_of_warp]),
            source + j * 64);
      }
    }
  };

  wait_for_previous_kernel();
  start_next_kernel();
  const int32_t num_items = *work.num_items, step = gridDim.x;
  int32_t i = blockIdx.x;
  if (i >= num_items) return;
  RescorePlaces next_places = load_places(work.items[i]);
  copy_keys(work.items[i]);
#pragma unroll
  for (int tile = 0; tile < kRescoreTiles; ++tile) copy_queries(tile, next_places);
  commit_async_copies();
  // Of two rows of four lanes, the first two keep one each.
  const bool odd = lane & 1;
  int32_t rows = 0, places[kRescoreTiles];
  const auto keep_places = [&] {
    rows = next_places.rows;
#pragma unroll
    for (int tile = 0; tile < kRescoreTiles; ++tile) {
      places[tile] = odd ? next_places.places[tile][1] : next_places.places[tile][0];
    }
  };
  keep_places();
  RescoreItem next{};
  if (i + step < num_items) next_places = load_places(work.items[i + step]);
  uint32_t stage = 0;
#pragma unroll 1
  while (true) {
    const bool more = i + step < num_items;
    wait_async_copies<0>();
    __syncwarp();
    const uint32_t low_key = first_key + stage * kStageBytes, high_key = low_key ^ 16;
#pragma unroll
    for (int j = 0; j < kRescoreKeys; ++j) {
      store_key(low_key + j * kKeysTogether * 128, high_key + j * kKeysTogether * 128,
                shared.keys[j][thread]);
    }
    fence_async_proxy();
    __syncthreads();
    if (more) copy_keys(work.items[i + step]);
    // The item after the next one; the rest of it is in L1 then.
    if (i + 2 * step < num_items) {
      next.begin = work.items[i + 2 * step].begin;
      next.list = work.items[i + 2 * step].list;
    }
    const uint64_t keys = advance(k_base, stage * kStageBytes);
#pragma unroll
    for (int tile = 0; tile < kRescoreTiles; ++tile) {
      const bool has_rows = first_row_of_tile(tile) < rows;
      uint32_t queries[kRescoreChunks][4];
      if (has_rows) {
#pragma unroll
        for (int high = 0; high < 2; ++high) {
#pragma unroll
          for (int j = 0; j < kRescoreChunks; ++j) {
            const uint4& bits = shared.queries[tile][warp][high][j][row_of_warp];
            fp8_to_f16(reinterpret_cast<const uint32_t*>(&bits)[quarter], queries[j][high],
                       queries[j][2 + high]);
          }
        }
      }
      __syncwarp();  // what the next copies take the place of has been read
      if (more) copy_queries(tile, next_places);
      if (!has_rows) continue;
      Accumulator sums;
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < kRescoreChunks; ++j) {
        multiply_rs_float16_rows(queries[j],
                                 advance(keys, j / 4 * (kStageBytes / 2) + j % 4 * 32), sums,
                                 j > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      hold(sums);
      const float score = index_score::sm90::largest_of_quad(sums);
      if (!(lane & 2) && first_row_of_warp(tile) + odd * 8 < rows) {
        const auto place = static_cast<uint32_t>(places[tile]);
        const int64_t number = place & ((1u << kLogMostRows) - 1);
        if (place >> 31) {
          const int32_t block = work.items[i].block_chunk % kMostBlocks;
          work.wide_scores[number * work.row_blocks + block] = score_key(score);
        } else {
          work.exact[number * kRowEntries + (place >> kLogMostRows)] = score_key(score);
        }
      }
    }
    if (!more) break;
    commit_async_copies();
    keep_places();
    i += step;
    if (i + step < num_items) {
      next.block_chunk = work.items[i + step].block_chunk;
      next_places = load_places(next);
    }
    stage ^= 1;
  }
}

}  // namespace msa::select_blocks::sm90
