// Step 3 of prefill for calls of few tokens (PrefillSizes::short_call): every entry is a leftover,
// and the whole plan is one launch without memory to clear.
//
// Grid      one cluster, a CTA a KV head.
// Shared    histogram  [B * max_pages] pairs of each row, then the row's first pair
//           places     row and rank of each entry
//           positions, masks of entries that count, a token each
// Steps     1 positions   2 entries into the histogram: their rows and ranks
//           3 sum over the CTA's rows, then over the cluster's CTAs by distributed shared memory
//           4 work items and row begins   5 every entry to its row
// Slots are fixed: K a (head, token).
#pragma once

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include "device/dependent_launch.cuh"
#include "device/positions.cuh"
#include "step3_remap/prefill_plan.h"
#include "step3_remap/sm80/kv_block_schedule_kernel.cuh"
#include "step3_remap/sm90/split_selection_kernel.cuh"

namespace msa::split_selection::sm90 {

using kv_block_schedule::sm80::kFieldMask;
using kv_block_schedule::sm80::kItemShift;
using kv_block_schedule::sm80::Sums;
using kv_block_schedule::sm80::sums_of_row;

constexpr int kShortThreads = 1024;
constexpr int kRankBits = 14;
constexpr uint32_t kNowhere = 0xffffffffu;
static_assert(kShortTokens <= kShortThreads, "a thread looks up a token");
static_assert(kShortEntries <= 1 << kRankBits && kShortRows < 1 << 18, "row and rank fit a word");

struct ShortState {
  TokenPosition positions[kShortTokens];
  uint32_t mask[kShortTokens];
  Sums warp_sums[kShortThreads / 32];
  Sums total;
  // uint32_t places[entries] of a head, histogram[rows] follow
};

inline int short_shared_bytes(int64_t head_entries, int64_t head_rows) {
  return static_cast<int>(sizeof(ShortState) + (head_entries + head_rows) * sizeof(uint32_t));
}

__global__ void __launch_bounds__(kShortThreads)
    msa_split_selection_short_sm90_kernel(const __grid_constant__ SplitParams params) {
  namespace cg = cooperative_groups;
  extern __shared__ __align__(16) uint8_t shared_memory[];
  ShortState& state = *reinterpret_cast<ShortState*>(shared_memory);
  start_next_kernel();
  const PrefillPlan& plan = params.plan;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int head = blockIdx.x, num_tokens = static_cast<int>(plan.num_tokens);
  const auto topk = static_cast<uint32_t>(params.ids.topk);
  const uint32_t entries = num_tokens * topk;
  const int rows = static_cast<int>(params.batch.num_requests * params.batch.max_pages);
  // Row and rank of each entry; all ones: it counts nothing.
  auto* const places = reinterpret_cast<uint32_t*>(shared_memory + sizeof(ShortState));
  uint32_t* const histogram = places + entries;
#pragma unroll 1
  for (int i = thread; i < rows; i += kShortThreads) histogram[i] = 0;
  if (thread < num_tokens) {
    state.positions[thread] = find_position(params.batch, thread);
    state.mask[thread] = 0;
  }
  __syncthreads();

#pragma unroll 1
  for (uint32_t entry = thread; entry < entries; entry += kShortThreads) {
    const uint32_t token = entry / topk, k = entry % topk;
    const TokenPosition position = state.positions[token];
    const int32_t block =
        selected_block(params.ids, params.batch, params.num_pages, position, head, token, k);
    places[entry] = kNowhere;
    if (block < 0) continue;
    const uint32_t row = position.request * static_cast<uint32_t>(params.batch.max_pages) + block;
    places[entry] = row << kRankBits | atomicAdd(histogram + row, 1);
    atomicOr(&state.mask[token], 1u << k);
  }
  __syncthreads();

  // Rows of a thread are neighbours, so that a plain prefix sum keeps their order.
  const auto max_queries = static_cast<uint32_t>(plan.sizes.max_queries_per_item);
  const int thread_rows = (rows + kShortThreads - 1) / kShortThreads;
  const int first_row = thread * thread_rows, end_row = min(first_row + thread_rows, rows);
  Sums mine = 0;
#pragma unroll 1
  for (int i = first_row; i < end_row; ++i) {
    mine += sums_of_row(histogram[i], max_queries);
  }
  Sums inclusive = mine;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const Sums other = __shfl_up_sync(0xffffffffu, inclusive, distance);
    if (lane >= distance) inclusive += other;
  }
  if (lane == 31) state.warp_sums[warp] = inclusive;
  __syncthreads();
  Sums before = 0, total = 0;
#pragma unroll 4
  for (int w = 0; w < kShortThreads / 32; ++w) {
    if (w < warp) before += state.warp_sums[w];
    total += state.warp_sums[w];
  }
  if (thread == 0) state.total = total;
  const cg::cluster_group cluster = cg::this_cluster();
  cluster.sync();
  for (int other = 0; other < head; ++other) {
    before += *cluster.map_shared_rank(&state.total, other);
  }
  cluster.sync();  // no CTA may end while another reads its sum
  before += inclusive - mine;

#pragma unroll 1
  for (int i = first_row; i < end_row; ++i) {
    const uint32_t count = histogram[i];
    if (count == 0) continue;
    const auto begin = static_cast<int32_t>(before & kFieldMask);
    int32_t* item = plan.work_items + 3 * static_cast<int64_t>(before >> kItemShift);
    histogram[i] = begin;
    const uint32_t items = row_items(count, max_queries);
#pragma unroll 1
    for (uint32_t part = 0; part < items; ++part, item += 3) {
      item[0] = head * rows + i;
      item[1] = begin + static_cast<int32_t>(item_begin(count, items, part));
      item[2] = begin + static_cast<int32_t>(item_begin(count, items, part + 1));
    }
    before += sums_of_row(count, max_queries);
  }
  if (head + 1 == gridDim.x && thread + 1 == kShortThreads) {  // `before` is all of them by now
    plan.round_items[0] = 0;
    plan.round_items[1] = static_cast<int32_t>(before >> kItemShift);
  }
  if (thread < num_tokens) {
    const int unit = head * num_tokens + thread;
    plan.leftovers[unit] = __popc(state.mask[thread]);
    plan.first_slot[unit] = unit * topk;
  }
  __syncthreads();

#pragma unroll 1
  for (uint32_t entry = thread; entry < entries; entry += kShortThreads) {
    if (places[entry] == kNowhere) continue;
    const uint32_t token = entry / topk, k = entry % topk;
    const auto slot = static_cast<int32_t>((head * num_tokens + token) * topk) +
                      __popc(state.mask[token] & ((1u << k) - 1));
    const uint32_t rank = places[entry] & ((1u << kRankBits) - 1);
    plan.pairs[histogram[places[entry] >> kRankBits] + rank] = {static_cast<int32_t>(token), slot};
  }
}

}  // namespace msa::split_selection::sm90
