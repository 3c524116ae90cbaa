// Step 3 of prefill, kv_block_schedule: {token -> blocks} into {block -> tokens}, a counting sort
// over rows (KV head, request, block), and the even work items that a persistent attention grid
// takes.
//
// Launches in stream order, no host knowledge of the selection:
//   clear    counters, chain and item count to 0                         (memset)
//   count    a CTA a (KV head, kChunkTokens tokens): its entries into a histogram of its requests'
//            rows in shared memory, each with its rank there; the histogram into the counters,
//            which gives the CTA's base in each row. Too many rows: straight into the counters
//   scan     kScanThreads rows a CTA; a warp of each adds up what the CTAs before published, back
//            to one that knows all before it. Writes row_ptr and the work items of its rows, and
//            turns each counter into the row's first pair
//   scatter  each entry to row begin + base + rank, without atomics
//   fill     -1 past the last pair and item
//
// Portable, sm_80 and up. Chain: CTAs take tickets, so that a CTA waits only for running ones.
// Order of the pairs within a row is not fixed: the ranks come of atomics. What is computed from
// them is: a partial result lies in a slot of its own, whatever tile it was computed in.
// Limits: num_rows, Hkv * T * K and the items fit int32 (checked on the host).
#pragma once

#include <cuda_runtime.h>

#include "device/common.cuh"
#include "device/dependent_launch.cuh"
#include "device/positions.cuh"
#include "step3_remap/kv_block_schedule_params.h"
#include "step3_remap/sm80/token_chunk.cuh"
#include "step3_remap/work_plan.h"

namespace msa::kv_block_schedule::sm80 {

constexpr int kThreads = 512;
constexpr int kChunkTokens = 256;
constexpr int kScanThreads = 512;

// Pairs and work items in one 64-bit sum: bits 0-30 pairs, 31-61 items; then what a CTA has
// published of its rows: 62 their own sum, 63 the sum of all rows up to its last.
using Sums = unsigned long long;
constexpr int kItemShift = 31;
constexpr Sums kFieldMask = (1ull << 31) - 1;
constexpr Sums kOwn = 1ull << 62, kInclusive = 1ull << 63;
constexpr Sums kSumsMask = kOwn - 1;

struct Workspace {
  uint32_t* counters;  // [num_rows], then each row's cursor
  Sums* chain;         // [scan CTAs]
  uint32_t* ticket;    // [1]
};

inline __host__ __device__ int64_t scan_ctas(int64_t num_rows) {
  return num_rows > kScanThreads ? (num_rows + kScanThreads - 1) / kScanThreads : 1;
}

// chain first: it needs 8-byte alignment.
inline __host__ __device__ Workspace split_workspace(void* workspace, int64_t num_rows) {
  Workspace result;
  result.chain = static_cast<Sums*>(workspace);
  result.counters = reinterpret_cast<uint32_t*>(result.chain + scan_ctas(num_rows));
  result.ticket = result.counters + num_rows;
  return result;
}

inline int64_t counter_bytes(int64_t num_rows) {
  const auto end = split_workspace(nullptr, num_rows).ticket + 1;
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(end));
}

// Between count and scatter.
struct Ranks {
  uint32_t* entry_rank;  // [Hkv * T * K]: among its chunk's entries of the same row
  uint32_t* chunk_base;  // [Hkv * chunks][chunk_rows]: the row's entries of other chunks before
  int64_t chunk_rows;
  int32_t chunks;  // of a head
};

struct Chunk : TokenChunk {
  int32_t head;
  int64_t first_row;    // of the first request, among all rows
  int64_t first_entry;  // of the first token, among all entries
};

__device__ __forceinline__ Chunk load_chunk(const KVBlockScheduleParams& params, const Ranks& ranks,
                                            TokenPosition* positions) {
  Chunk chunk;
  chunk.head = static_cast<int32_t>(blockIdx.x) / ranks.chunks;
  chunk.first_token = static_cast<int32_t>(blockIdx.x) % ranks.chunks * kChunkTokens;
  chunk.tokens =
      min(kChunkTokens, static_cast<int32_t>(params.batch.num_tokens) - chunk.first_token);
  locate_tokens(params.batch, ranks.chunk_rows, chunk, positions);
  chunk.first_row =
      (chunk.head * params.batch.num_requests + chunk.first_request) * params.batch.max_pages;
  chunk.first_entry = (chunk.head * params.batch.num_tokens + chunk.first_token) * params.ids.topk;
  return chunk;
}

// Calls visit(entry of the chunk, row of the chunk, pair) for the entries that count.
template <typename Visit>
__device__ __forceinline__ void visit_entries(const KVBlockScheduleParams& params,
                                              const Chunk& chunk, const TokenPosition* positions,
                                              const Visit& visit) {
  const auto topk = static_cast<uint32_t>(params.ids.topk);
#pragma unroll 2
  for (uint32_t entry = threadIdx.x; entry < chunk.tokens * topk; entry += kThreads) {
    const uint32_t token = entry / topk;
    const int32_t block = selected_block(params.ids, params.batch, 0, positions[token], chunk.head,
                                         chunk.first_token + token, entry % topk);
    if (block < 0) continue;
    visit(entry, chunk.row_of(params.batch, positions[token].request, block),
          static_cast<int32_t>(chunk.first_token * topk + entry));
  }
}

static __global__ void __launch_bounds__(kThreads)
    msa_kv_block_schedule_count_sm80_kernel(const __grid_constant__ KVBlockScheduleParams params,
                                            const Workspace workspace, const Ranks ranks) {
  extern __shared__ uint32_t histogram[];
  __shared__ TokenPosition positions[kChunkTokens];
  const Chunk chunk = load_chunk(params, ranks, positions);
  for (int row = threadIdx.x; row < chunk.rows; row += kThreads) histogram[row] = 0;
  __syncthreads();
  uint32_t* const counters = workspace.counters + chunk.first_row;
  visit_entries(params, chunk, positions, [&](uint32_t entry, int64_t row, int32_t) {
    // Two branches, each with a counter of one kind: a pointer to either would be generic.
    ranks.entry_rank[chunk.first_entry + entry] =
        chunk.rows > 0 ? atomicAdd(&histogram[row], 1) : atomicAdd(&counters[row], 1);
  });
  __syncthreads();
  for (int row = threadIdx.x; row < chunk.rows; row += kThreads) {
    if (histogram[row] == 0) continue;
    ranks.chunk_base[blockIdx.x * ranks.chunk_rows + row] =
        atomicAdd(counters + row, histogram[row]);
  }
}

static __global__ void __launch_bounds__(kThreads)
    msa_kv_block_schedule_scatter_sm80_kernel(const __grid_constant__ KVBlockScheduleParams params,
                                              const Workspace workspace, const Ranks ranks) {
  __shared__ TokenPosition positions[kChunkTokens];
  const Chunk chunk = load_chunk(params, ranks, positions);
  const uint32_t* const begins = workspace.counters + chunk.first_row;
  const uint32_t* const bases = ranks.chunk_base + blockIdx.x * ranks.chunk_rows;
  visit_entries(params, chunk, positions, [&](uint32_t entry, int64_t row, int32_t pair) {
    const uint32_t place = begins[row] + (chunk.rows > 0 ? bases[row] : 0) +
                           ranks.entry_rank[chunk.first_entry + entry];
    params.pairs[place] = pair;
  });
}

// Past the last pair and the last item.
static __global__ void __launch_bounds__(kThreads)
    msa_kv_block_schedule_fill_sm80_kernel(const __grid_constant__ KVBlockScheduleParams params,
                                           int64_t num_rows, int64_t num_pairs) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = params.row_ptr[num_rows] + first; i < num_pairs; i += step) {
    params.pairs[i] = -1;
  }
  for (int64_t i = 3 * int64_t{*params.num_work_items} + first; i < 3 * params.max_work_items;
       i += step) {
    params.work_items[i] = -1;
  }
}

__device__ __forceinline__ Sums sums_of_row(uint32_t num_pairs, uint32_t max_queries_per_item) {
  return static_cast<Sums>(row_items(num_pairs, max_queries_per_item)) << kItemShift | num_pairs;
}

// Exclusive sum over the CTA's threads; `total` is their sum.
__device__ __forceinline__ Sums scan_threads(Sums value, Sums& total) {
  __shared__ Sums warp_sums[kScanThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Sums inclusive = sum_up_to_lane(value);
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  Sums before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kScanThreads / 32; ++w) {
    if (w < warp) before += warp_sums[w];
    total += warp_sums[w];
  }
  return before + inclusive - value;
}

// Publishes a CTA's sum and returns that of all CTAs before it; one warp.
__device__ __forceinline__ Sums sum_of_earlier(Sums* chain, int32_t cta, Sums own) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) atomicExch(chain + cta, own | (cta == 0 ? kInclusive : kOwn));
  Sums earlier = 0;
  for (int32_t last = cta - 1; last >= 0; last -= 32) {
    const int32_t mine = last - lane;
    Sums seen = mine >= 0 ? 0 : kOwn;
    while (__any_sync(kAllLanes, seen == 0)) {
      if (seen == 0) seen = *const_cast<const volatile Sums*>(chain + mine);
    }
    const unsigned inclusive = __ballot_sync(kAllLanes, (seen & kInclusive) != 0);
    const int stop = inclusive ? __ffs(inclusive) - 1 : 31;
    Sums part = lane <= stop ? seen & kSumsMask : 0;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      part += __shfl_xor_sync(kAllLanes, part, distance);
    }
    earlier += part;
    if (inclusive) break;
  }
  if (lane == 0 && cta > 0) atomicExch(chain + cta, (earlier + own) | kInclusive);
  return earlier;
}

// The operator's work items: row, begin, end.
struct RowItems {
  int32_t* fields;  // [.., 3]

  using Item = int32_t;
  __device__ __forceinline__ Item of_row(uint32_t row) const { return static_cast<int32_t>(row); }
  __device__ __forceinline__ void write(int64_t index, Item row, int32_t begin, int32_t end) const {
    fields[3 * index] = row;
    fields[3 * index + 1] = begin;
    fields[3 * index + 2] = end;
  }
};

// What a scan makes of the counters. `Items` says what a work item is.
template <typename Items>
struct ScanParams {
  int64_t num_rows;
  uint32_t max_queries_per_item;
  int32_t* row_ptr;  // [num_rows + 1], or null
  Items items;
  int32_t* num_work_items;  // [1], or null
  // Rows in equal ranges, whose first work items are wanted too (items then are of a row counted
  // from the range's first): range_items [num_rows / range_rows + 1]. range_rows 0: none.
  uint32_t range_rows;
  int32_t* range_items;
};

template <typename Items>
static __global__ void __launch_bounds__(kScanThreads)
    msa_kv_block_schedule_scan_sm80_kernel(const __grid_constant__ ScanParams<Items> params,
                                           const Workspace workspace) {
  start_next_kernel();
  wait_for_previous_kernel();
  __shared__ uint32_t shared_ticket;
  __shared__ Sums shared_before;
  if (threadIdx.x == 0) shared_ticket = atomicAdd(workspace.ticket, 1);
  __syncthreads();
  const auto num_rows = static_cast<uint32_t>(params.num_rows);
  const uint32_t cta = shared_ticket, row = cta * kScanThreads + threadIdx.x;
  const uint32_t count = row < num_rows ? workspace.counters[row] : 0;
  const uint32_t range_row = params.range_rows ? row % params.range_rows : row;
  typename Items::Item item{};
  if (row < num_rows) item = params.items.of_row(range_row);
  const Sums mine = sums_of_row(count, params.max_queries_per_item);
  Sums total;
  Sums before = scan_threads(mine, total);
  if (threadIdx.x < 32) {
    const Sums earlier = sum_of_earlier(workspace.chain, cta, total);
    if (threadIdx.x == 0) {
      shared_before = earlier;
      if (cta + 1 == gridDim.x) {
        const Sums all = earlier + total;
        const auto items = static_cast<int32_t>(all >> kItemShift);
        if (params.row_ptr) params.row_ptr[num_rows] = static_cast<int32_t>(all & kFieldMask);
        if (params.num_work_items) *params.num_work_items = items;
        if (params.range_rows) params.range_items[num_rows / params.range_rows] = items;
      }
    }
  }
  __syncthreads();
  before += shared_before;
  if (row >= num_rows) return;

  const auto begin = static_cast<int32_t>(before & kFieldMask);
  const auto first_item = static_cast<int32_t>(before >> kItemShift);
  if (params.row_ptr) params.row_ptr[row] = begin;
  if (params.range_rows && range_row == 0) {
    params.range_items[row / params.range_rows] = first_item;
  }
  workspace.counters[row] = begin;
  const uint32_t items = row_items(count, params.max_queries_per_item);
#pragma unroll 1
  for (uint32_t part = 0; part < items; ++part) {
    params.items.write(first_item + static_cast<int64_t>(part), item,
                       begin + static_cast<int32_t>(item_begin(count, items, part)),
                       begin + static_cast<int32_t>(item_begin(count, items, part + 1)));
  }
}

}  // namespace msa::kv_block_schedule::sm80
