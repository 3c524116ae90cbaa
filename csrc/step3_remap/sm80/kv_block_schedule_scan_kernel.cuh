// Step 3 of prefill: from the number of pairs in each row to where it begins, and the even work
// items of the rows; for kv_block_schedule and for the plan of sparse_prefill.
//
// Grid      a CTA kScanThreads rows, a thread a row
// Steps     1 the CTA's own sum of pairs and items
//           2 a warp adds up what the CTAs before published, back to one that knows all before it
//           3 row_ptr, the row's work items; the counter becomes the row's first pair
// Chain     CTAs take tickets, so that a CTA waits only for running ones; counters, chain and
// ticket
//           are made ready by earlier kernels (counts, 0, 0)
// Limits: rows, pairs and items fit int32 (checked on the host).
#pragma once

#include <cuda_runtime.h>

#include "device/common.cuh"
#include "device/dependent_launch.cuh"
#include "step3_remap/work_plan.h"

namespace msa::kv_block_schedule::sm80 {

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
