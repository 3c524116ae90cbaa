// Step 3 of prefill for calls of few tokens (PrefillSizes::short_call): every entry is a leftover,
// and the whole plan is one launch without memory to clear.
//
// Grid      one cluster, a CTA a KV head.
// Shared    begins, lengths  of the requests
//           tokens     rows and visible blocks of each token, mask of its entries that count
//           entries    id of each entry, then its row and rank in place of it
//           pages      of each row, B * max_pages
//           histogram  pairs of each row, then the row's first pair
//           sorted     token and entry of each pair
// Steps     1 all that is read, at once, into shared memory
//           2 the tokens' positions
//           3 entries into the histogram: their rows and ranks
//           4 prefix sums over the CTA's rows: of pairs, and of items of each size, whose totals go
//             to the other CTAs' shared memory
//           5 every entry to its row; meanwhile the CTAs' totals arrive
//           6 pairs to memory, neighbours by neighbours: 3000 scattered stores took 6 us
//           7 work items to memory, the largest first
// The CTAs that attend draw items in this order (prefill_kv_block_kernel.cuh): large ones first,
// they end together. Items of one size are in the order of heads and rows, the pairs of a row in
// any: no result depends on it. Slots are fixed, K a (head, token), and so is where the pairs of a
// head begin. Memory is waited for once, and the loops are not unrolled: fetching the code is a
// part of the time.
#pragma once

#include <cuda_runtime.h>

#include "device/common.cuh"
#include "device/dependent_launch.cuh"
#include "device/positions.cuh"
#include "device/shared_memory.cuh"
#include "device/sm80_async_copy.cuh"
#include "device/sm90/cluster.cuh"
#include "step3_remap/prefill_plan.h"
#include "step3_remap/sm80/block_item.cuh"
#include "step3_remap/sm90/split_selection_kernel.cuh"
#include "step3_remap/work_plan.h"

namespace msa::split_selection::sm90 {

using namespace msa::sm90;

constexpr int kShortThreads = 1024;
constexpr int kRankBits = 14;
constexpr uint32_t kNowhere = 0xffffffffu;
// Work items by size: of 4 tiles and more, of 3, 2, 1. Their numbers are fields of one word, which
// add up without each other; only all items of a call may fill one, and then the others are empty.
constexpr int kSizeClasses = 4, kSizeBits = 16;
static_assert(kShortEntries * kShortHeads <= 1 << kSizeBits, "items, of a pair at least");
static_assert(kShortTokens <= kShortThreads, "a thread has a token");
static_assert(kShortEntries <= 1 << kRankBits && kShortRows < 1 << 18, "row and rank fit a word");

struct ShortToken {
  int32_t first_row;  // of its request
  int32_t visible;    // blocks that it may see
};

struct alignas(8) ShortState {  // entries of 64 bits may follow
  ShortToken tokens[kShortTokens];
  uint32_t mask[kShortTokens];
  int32_t begins[kShortRequests + 1], lengths[kShortRequests];
  uint64_t warp_items[kShortThreads / 32];  // of each size
  uint64_t items[kShortHeads];              // of a head, written by its CTA
  uint32_t warp_pairs[kShortThreads / 32];
  // entries [T * K] of ids' type, int32_t pages[rows], uint32_t histogram[rows + 1],
  // uint32_t sorted[T * K] follow
};

inline int short_shared_bytes(int64_t head_entries, int64_t id_bytes, int64_t head_rows) {
  return static_cast<int>(int64_t{sizeof(ShortState)} + head_entries * id_bytes +
                          (2 * head_rows + 1 + head_entries) * 4);
}

// Ids, pages, and where requests begin and end, into shared memory; by all threads, which wait.
__device__ __forceinline__ void load_short(const SplitParams& params, ShortState& state, int head,
                                           uint32_t entries, int rows, uint8_t* ids,
                                           int32_t* pages) {
  const IdsView& view = params.ids;
  const BatchView& batch = params.batch;
  const auto topk = static_cast<uint32_t>(view.topk);
  const bool wide = view.dtype == DType::kInt64;
#pragma unroll 1
  for (uint32_t entry = threadIdx.x; entry < entries; entry += kShortThreads) {
    const int64_t offset = head * view.head_stride + entry / topk * view.token_stride +
                           entry % topk * view.slot_stride;
    if (wide) {
      copy_async<8>(shared_address(ids + entry * 8),
                    static_cast<const int64_t*>(view.data) + offset);
    } else {
      copy_async<4>(shared_address(ids + entry * 4),
                    static_cast<const int32_t*>(view.data) + offset);
    }
  }
  const auto max_pages = static_cast<uint32_t>(batch.max_pages);
#pragma unroll 1
  for (uint32_t row = threadIdx.x; row < rows; row += kShortThreads) {
    copy_async<4>(shared_address(pages + row), batch.block_table +
                                                   row / max_pages * batch.table_row_stride +
                                                   row % max_pages * batch.table_col_stride);
  }
  const auto num_requests = static_cast<int>(batch.num_requests);
  for (int i = threadIdx.x; i <= num_requests; i += kShortThreads) {
    copy_async<4>(shared_address(state.begins + i),
                  batch.cu_seqlens_q + i * batch.cu_seqlens_stride);
    if (i == num_requests) break;
    copy_async<4>(shared_address(state.lengths + i), batch.seq_lens + i * batch.seq_lens_stride);
  }
  commit_async_copies();
  wait_async_copies<0>();
}

// How a row of pairs is cut into items (row_items(), item_begin()), and the field of their size.
struct RowCut {
  uint32_t items, share, rest, shift;
};

__device__ __forceinline__ RowCut cut_row(const SplitParams& params, uint32_t count) {
  const auto max_queries = static_cast<uint32_t>(params.plan.sizes.max_queries_per_item);
  const auto tile_tokens = static_cast<uint32_t>(params.plan.sizes.group_tokens);
  RowCut cut;
  cut.items = row_items(count, max_queries);
  cut.share = count / cut.items;
  cut.rest = count - cut.share * cut.items;
  const uint32_t more_tiles = (cut.share + (cut.rest > 0) - 1) / tile_tokens;
  cut.shift = kSizeBits * (kSizeClasses - 1 - min(more_tiles, kSizeClasses - 1u));
  return cut;
}

__global__ void __launch_bounds__(kShortThreads)
    msa_split_selection_short_sm90_kernel(const __grid_constant__ SplitParams params) {
  extern __shared__ __align__(16) uint8_t shared_memory[];
  ShortState& state = *reinterpret_cast<ShortState*>(shared_memory);
  start_next_kernel();
  cluster_arrive();  // once all CTAs run, they may write to each other
  const PrefillPlan& plan = params.plan;
  const BatchView& batch = params.batch;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int head = blockIdx.x, heads = gridDim.x;
  const int num_tokens = static_cast<int>(plan.num_tokens);
  const auto topk = static_cast<uint32_t>(params.ids.topk);
  const uint32_t entries = num_tokens * topk;
  const int rows = static_cast<int>(batch.num_requests * batch.max_pages);
  const bool wide = params.ids.dtype == DType::kInt64;
  auto* const ids = shared_memory + sizeof(ShortState);
  auto* const pages = reinterpret_cast<int32_t*>(ids + entries * (wide ? 8 : 4));
  auto* const histogram = reinterpret_cast<uint32_t*>(pages + rows);
  uint32_t* const sorted = histogram + rows + 1;
  // Row and rank of an entry; all ones: it counts nothing.
  const auto place_of = [&](uint32_t entry) -> uint32_t& {
    return *reinterpret_cast<uint32_t*>(ids + entry * (wide ? 8 : 4));
  };
  // Step 1.
  load_short(params, state, head, entries, rows, ids, pages);
#pragma unroll 1
  for (int i = thread; i < rows; i += kShortThreads) histogram[i] = 0;
  __syncthreads();

  // Step 2.
  if (thread < num_tokens) {
    const auto num_requests = static_cast<int>(batch.num_requests);
    ShortToken token{0, 0};
    if (thread < state.begins[num_requests]) {
      int low = 0, high = num_requests;  // begins[low] <= thread < begins[high]
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (state.begins[middle] <= thread) {
          low = middle;
        } else {
          high = middle;
        }
      }
      const int32_t pos = max(state.lengths[low], 0) - (state.begins[low + 1] - thread);
      token = {low * static_cast<int32_t>(batch.max_pages), visible_blocks(batch, pos)};
    }
    state.tokens[thread] = token;
    state.mask[thread] = 0;
  }
  __syncthreads();

  // Step 3.
#pragma unroll 1
  for (uint32_t entry = thread; entry - lane < entries; entry += kShortThreads) {
    const uint32_t token = entry / topk, k = entry % topk;
    uint32_t place = kNowhere;
    if (entry < entries) {
      const ShortToken seen = state.tokens[token];
      const int64_t id = wide ? reinterpret_cast<const int64_t*>(ids)[entry]
                              : reinterpret_cast<const int32_t*>(ids)[entry];
      if (static_cast<int>(k) < seen.visible && id >= 0 && id < seen.visible) {
        const uint32_t row = seen.first_row + static_cast<uint32_t>(id);
        if (pages[row] >= 0 && pages[row] < params.num_pages) {
          place = row << kRankBits | atomicAdd(histogram + row, 1);
        }
      }
      place_of(entry) = place;
    }
    // The warp's entries of a token are lanes in a row.
    const uint32_t counting = __ballot_sync(kAllLanes, place != kNowhere);
    if (entry < entries && (lane == 0 || k == 0)) {
      atomicOr(&state.mask[token], counting >> lane << k & (2u << (topk - 1)) - 1);
    }
  }
  __syncthreads();

  // Step 4. Rows of a thread are neighbours, so that a plain prefix sum keeps their order.
  const int thread_rows = (rows + kShortThreads - 1) / kShortThreads;
  const int first_row = min(thread * thread_rows, rows),
            end_row = min(first_row + thread_rows, rows);
  uint32_t row_pairs = 0;
  uint64_t items = 0;
#pragma unroll 1
  for (int i = first_row; i < end_row; ++i) {
    if (histogram[i] == 0) continue;
    const RowCut cut = cut_row(params, histogram[i]);
    items += static_cast<uint64_t>(cut.items) << cut.shift;
    row_pairs += histogram[i];
  }
  uint32_t begin = sum_up_to_lane(row_pairs);
  uint64_t next_items = sum_up_to_lane(items);
  if (lane == 31) {
    state.warp_pairs[warp] = begin;
    state.warp_items[warp] = next_items;
  }
  __syncthreads();
  // Of the lanes below `end`. A head has fewer items than a field holds, so halves add up alone.
  const auto sum_items = [&](int end) {
    const uint64_t sum = lane < end ? state.warp_items[lane] : 0;
    return static_cast<uint64_t>(__reduce_add_sync(kAllLanes, static_cast<uint32_t>(sum >> 32)))
               << 32 |
           __reduce_add_sync(kAllLanes, static_cast<uint32_t>(sum));
  };
  const uint32_t warp_pairs = state.warp_pairs[lane];
  begin += __reduce_add_sync(kAllLanes, lane < warp ? warp_pairs : 0) - row_pairs;
  next_items += sum_items(warp) - items;
  if (thread + 1 == kShortThreads) histogram[rows] = begin + row_pairs;
  cluster_wait();
  if (warp == 0) {
    const uint64_t head_items = sum_items(kShortThreads / 32);
    if (lane < heads) {
      const uint32_t place = cluster_address(shared_address(state.items + head), lane);
      cluster_store(place, static_cast<uint32_t>(head_items));
      cluster_store(place + 4, static_cast<uint32_t>(head_items >> 32));
    }
  }
#pragma unroll 1
  for (int i = first_row; i < end_row; ++i) {
    const uint32_t count = histogram[i];
    histogram[i] = begin;
    begin += count;
  }
  cluster_arrive();
  __syncthreads();

  // Step 5.
#pragma unroll 1
  for (uint32_t entry = thread; entry < entries; entry += kShortThreads) {
    const uint32_t place = place_of(entry);
    if (place == kNowhere) continue;
    const uint32_t pair = histogram[place >> kRankBits] + (place & ((1u << kRankBits) - 1));
    sorted[pair] = entry;
  }
  __syncthreads();
  // Step 6.
  const int32_t first_unit = head * num_tokens;
  const auto first_pair = static_cast<int32_t>(first_unit * topk);
#pragma unroll 1
  for (uint32_t pair = thread; pair < histogram[rows]; pair += kShortThreads) {
    const uint32_t token = sorted[pair] / topk, k = sorted[pair] % topk;
    plan.pairs[first_pair + pair] = {static_cast<int32_t>(token),
                                     static_cast<int32_t>(first_pair + token * topk) +
                                         __popc(state.mask[token] & ((1u << k) - 1))};
  }
  if (thread < num_tokens) {
    plan.leftovers[first_unit + thread] = __popc(state.mask[thread]);
  }
  cluster_wait();

  // Step 7. Items of a size come after all larger ones, of all heads, and those of earlier heads.
  constexpr uint64_t kEveryField = 0x0001000100010001;
  const uint64_t first_fields = params.large_first ? 0xffffull : 0;  // of all heads before others
  uint64_t firsts = 0, earlier_firsts = 0, earlier = 0;
  uint32_t all = 0;
#pragma unroll 1
  for (int other = 0; other < heads; ++other) {
    const uint64_t items = state.items[other];
    const uint32_t sum = static_cast<uint32_t>(items * kEveryField >> kSizeBits * (kSizeClasses - 1)) & 0xffff;
    const uint32_t its_firsts = static_cast<uint32_t>(items & first_fields);
    all += sum;
    firsts += its_firsts;
    if (other < head) {
      earlier_firsts += its_firsts;
      earlier += sum - its_firsts;
    }
  }
  const uint64_t mine = state.items[head], rest = mine & ~first_fields;
  // Field 0 by itself when it goes first; others after all firsts, and those of earlier heads.
  next_items += params.large_first ? earlier_firsts : earlier;
  next_items += (firsts + earlier) * (kEveryField & ~0xffffull) + ((rest * kEveryField - rest) & ~0xffffull);
  if (!params.large_first) next_items += 0;
  if (thread == 0) plan.ended_heads[head] = 0;
  if (head == 0 && thread == 0) {
    plan.round_items[0] = 0;
    plan.round_items[1] = static_cast<int32_t>(all);
    plan.item_tickets[0] = plan.merge_tickets[0] = 0;
  }
#pragma unroll 1
  for (int i = first_row; i < end_row; ++i) {
    const uint32_t count = histogram[i + 1] - histogram[i];
    if (count == 0) continue;
    const RowCut cut = cut_row(params, count);
    uint32_t item = next_items >> cut.shift & ((1u << kSizeBits) - 1);
    next_items += static_cast<uint64_t>(cut.items) << cut.shift;
    const int request = i / static_cast<int>(batch.max_pages);
    WorkItem fields =
        block_item(head, i - request * static_cast<int>(batch.max_pages), pages[i],
                   state.begins[request], state.begins[request + 1], state.lengths[request]);
    fields.end = first_pair + static_cast<int32_t>(histogram[i]);
    fields.by_head = !params.large_first || cut.shift > 0;
#pragma unroll 1
    for (uint32_t part = 0; part < cut.items; ++part, ++item) {
      fields.begin = fields.end;
      fields.end += static_cast<int32_t>(cut.share + (part < cut.rest));
      store_item(plan.work_items, item, fields);
    }
  }
}

}  // namespace msa::split_selection::sm90
