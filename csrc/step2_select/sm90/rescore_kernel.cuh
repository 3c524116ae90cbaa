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
// Roles     two warpgroups alike: they load and convert together, then multiply 128 rows each,
//           while the places of the next item are on their way.
// Shared    q    [half of d][256 rows][64 d]   65,536   128-byte swizzle
//           k    [half of d][128 keys][64 d]   32,768   the same
//           places of the list                  1,024
// Barriers  __syncthreads: rows and keys are there; they have been read.
// Order     a row's score does not depend on where in a list it stands.
#pragma once

#include "step1_score/sm90/score_tile_kernel.cuh"
#include "step2_select/sm90/bounded_rows.cuh"

namespace msa::select_blocks::sm90 {

constexpr int kRescoreThreads = 256;

struct RescoreSharedStorage {
  alignas(1024) uint8_t q[2][kItemRows][index_score::sm90::kHalfBytes];
  alignas(1024) uint8_t k[2][kBlock][index_score::sm90::kHalfBytes];
  int32_t places[kItemRows];
};
static_assert(sizeof(RescoreSharedStorage) <= 113 * 1024, "two CTAs an SM");

// Chunk `chunk` of a row of e4m3, as float16 in the layout of the products. Each store of a warp
// meets every bank evenly where eight threads hold half of each of two neighbouring rows.
template <int kRows>
__device__ __forceinline__ void store_halves(uint8_t (&target)[2][kRows][128], int row, int chunk,
                                             const uint4& bits) {
  using index_score::sm90::swizzled;
  uint4 halves[2];
  index_score::sm90::to_half(bits, halves);
  uint8_t* const place = target[chunk / 4][row];
  *reinterpret_cast<uint4*>(place + swizzled(row, chunk % 4 * 2)) = halves[0];
  *reinterpret_cast<uint4*>(place + swizzled(row, chunk % 4 * 2 + 1)) = halves[1];
}

__global__ void __launch_bounds__(kRescoreThreads, 2)
    msa_rescore_candidates_sm90_kernel(const __grid_constant__ BoundedRows work) {
  using namespace msa::sm90;
  constexpr int kChunks = kHeadDim / 16, kTogether = kRescoreThreads / kChunks;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  auto& shared = *reinterpret_cast<RescoreSharedStorage*>(shared_memory);
  const int thread = threadIdx.x, lane = thread % 32;
  // Of rows and keys the thread has chunk `chunk` of first_row, first_row + kTogether, ...
  const int chunk = lane % 4 + lane / 8 % 2 * 4;
  const int first_row = thread / 32 * 4 + lane / 16 * 2 + lane / 4 % 2;
  const int warpgroup = __shfl_sync(kAllLanes, thread / 128, 0);
  const uint64_t q_base = make_descriptor(shared_address(shared.q[0][warpgroup * 128]), 16, 1024);
  const uint64_t k_base = make_descriptor(shared_address(shared.k[0]), 16, 1024);
  constexpr int kKeys = kBlock / kTogether, kQueries = kItemRows / kTogether;  // of a thread
  // The item's rows come with it: places of a list past its end hold anything.
  const auto load_places = [&](const RescoreItem& item, int32_t& rows,
                               int32_t (&places)[kQueries]) {
    rows = work.list_counts[int64_t{item.list} * kCounterStride] -
           item.block_chunk / kMostBlocks * kItemRows;
#pragma unroll
    for (int j = 0; j < kQueries; ++j) {
      places[j] = work.lists[item.begin + first_row + j * kTogether];
    }
  };
  const uint8_t* const first_query = static_cast<const uint8_t*>(work.index_q.data) +
                                     work.first_token * work.index_q.token_stride + chunk * 16;
  const auto token_stride = static_cast<uint32_t>(work.index_q.token_stride);
  const auto head_stride = static_cast<uint32_t>(work.index_q.head_stride);
  wait_for_previous_kernel();
  start_next_kernel();
  const int32_t num_items = *work.num_items;
  RescoreItem item{}, next{};
  int32_t rows = 0, places[kQueries];
  if (static_cast<int32_t>(blockIdx.x) < num_items) {
    item = work.items[blockIdx.x];
    load_places(item, rows, places);
  }
#pragma unroll 1
  for (int32_t i = blockIdx.x; i < num_items; i += gridDim.x) {
    const bool more = i + static_cast<int32_t>(gridDim.x) < num_items;
    if (more) next = work.items[i + gridDim.x];
    const int32_t block = item.block_chunk % kMostBlocks;
    const int32_t item_rows = min(rows, kItemRows);
    // Its page is there: its factors are not 0.
    const uint8_t* const first_key = static_cast<const uint8_t*>(work.index_k_cache.data) +
                                     item.page * work.index_k_cache.page_stride + chunk * 16 +
                                     first_row * work.index_k_cache.token_stride;
    uint4 keys[kKeys], queries[kQueries];
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      keys[j] = *reinterpret_cast<const uint4*>(first_key +
                                                j * kTogether * work.index_k_cache.token_stride);
    }
#pragma unroll
    for (int j = 0; j < kQueries; ++j) {
      // Past the item's rows any row does: of its scores nothing is kept.
      const int32_t row =
          j * kTogether < item_rows - first_row ? places[j] & ((1 << kLogMostRows) - 1) : 0;
      const uint32_t token = token_of_row(work, row), head = row - token * work.num_heads;
      queries[j] = *reinterpret_cast<const uint4*>(first_query + uint64_t{token} * token_stride +
                                                   uint64_t{head} * head_stride);
    }
    __syncthreads();  // what the item before left has been read
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      store_halves(shared.k, first_row + j * kTogether, chunk, keys[j]);
    }
#pragma unroll
    for (int j = 0; j < kQueries; ++j) {
      const int row = first_row + j * kTogether;
      store_halves(shared.q, row, chunk, queries[j]);
      if (chunk == 0) shared.places[row] = places[j];
    }
    fence_async_proxy();
    __syncthreads();
    if (more) load_places(next, rows, places);
#pragma unroll 1
    for (int tile = 0; tile < 2; ++tile) {
      const int tile_row = warpgroup * 128 + tile * 64;
      if (tile_row >= item_rows) break;
      Accumulator sums;
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kHeadDim / 16; ++step) {
        const int half = step / 4, within = step % 4 * 32;
        multiply_ss_float16(advance(q_base, half * sizeof(shared.q[0]) + tile * 64 * 128 + within),
                            advance(k_base, half * sizeof(shared.k[0]) + within), sums, step > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      hold(sums);
      const float score = index_score::sm90::largest_of_quad(sums);
      // Two rows of four lanes: the first two keep one each.
      const int row = tile_row + thread / 32 % 4 * 16 + (lane & 1) * 8 + lane / 4;
      if (!(lane & 2) && row < item_rows) {
        const auto place = static_cast<uint32_t>(shared.places[row]);
        const int64_t number = place & ((1u << kLogMostRows) - 1);
        uint32_t* const target = place >> 31
                                     ? work.bounds + number * work.row_blocks + block
                                     : work.exact + number * kRowEntries + (place >> kLogMostRows);
        *target = score_key(score);
      }
    }
    item = next;
  }
}

}  // namespace msa::select_blocks::sm90
