// The producers of the KV-block-major kernel (prefill_kv_block_kernel.cuh): who walks the CTA's
// work items and brings their K, V and q to shared memory, and which consumer takes which tile.
#pragma once

#include <cuda_runtime.h>

#include "device/common.cuh"
#include "device/positions.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "step3_remap/sm80/block_item.cuh"
#include "step4_attend/sm90/prefill_fp8_page.cuh"
#include "step4_attend/sm90/prefill_kv_block_tile.h"

namespace msa::sparse_prefill::sm90 {

// Calls load(item) with the CTA's items, the i-th in lane i of the warp (an item of zeroes where
// there are no more), then visit(i, count) for each; whole warps. A batch's loads are under way
// together.
template <typename Load, typename Visit>
__device__ __forceinline__ void for_items(const KVBlockParams& params, const Load& load,
                                          const Visit& visit) {
  const auto grid = static_cast<int32_t>(gridDim.x);
  const int32_t lane = threadIdx.x % 32;
  // Those of the first round begin with 0, so that they are read beside the range.
  int32_t first = (params.round == 0 ? 0 : params.item_range[0]) + static_cast<int32_t>(blockIdx.x);
  const int32_t end_item = params.item_range[1];
  while (true) {
    const int32_t index = first + lane * grid;
    WorkItem item{};
    if (index < params.max_items) item = load_item(params.work_items, index);
    if (first >= end_item) return;
    const int32_t count = min(32, (end_item - first + grid - 1) / grid);
    if (lane >= count) item = {};  // what was read there is no item
    load(item);
    __syncwarp();
    for (int32_t i = 0; i < count; ++i) visit(i, count);
    first += 32 * grid;
  }
}

__device__ __forceinline__ uint32_t count_tiles(const KVBlockParams& params, const WorkItem& item) {
  const int log_tile_tokens = 6 - params.log_group;
  return static_cast<uint32_t>(item.end - item.begin + (1 << log_tile_tokens) - 1) >>
         log_tile_tokens;
}

// The tiles of a CTA's items, one after another, go to the consumers by turns. Of an item that
// comes after `before` tiles, consumer c has tiles first_tile(c, before), first_tile() + 3, ...
__device__ __forceinline__ uint32_t first_tile(uint32_t consumer, uint32_t before) {
  return (consumer + (kConsumers - 1) * before) % kConsumers;  // (c - before) mod 3
}

// The place of the item whose K and V are at `ring`. Twice as many places as stages: who is in the
// middle of an item may still read it when K of the next but one is on its way.
__device__ __forceinline__ int item_place(const RingPosition<kKVStages>& ring) {
  return ring.stage + kKVStages * static_cast<int>(ring.phase);
}

using Fp8Storage = SharedStorage<DType::kFloat8E4M3>;

// FP8: has the item's K arrived? Whole warp.
__device__ __forceinline__ bool has_landed(Fp8Storage& shared,
                                           const RingPosition<kKVStages>& ring) {
  return __shfl_sync(kAllLanes, barrier_test(&shared.conversion.k_landed[ring.stage], ring.phase),
                     0);
}

// FP8: a producer warp's quarter of the item's pages becomes a quarter of its blocks.
__device__ __forceinline__ void convert_item(Fp8Storage& shared, RingPosition<kKVStages>& ring,
                                             int producer) {
  constexpr int kRows = kBlock / kProducers;
  const int stage = ring.stage, offset = producer * kRows * 128;
  const bool first_lane = threadIdx.x % 32 == 0;
  uint8_t *k = shared.k[stage] + offset, *v = shared.v[stage] + offset;
  barrier_wait(&shared.conversion.k_landed[stage], ring.phase);
  convert_page<Converted::kBFloat16, kRows / 8>(k + kPageBytes / 2, k, false, 0, nullptr);
  fence_async_proxy();
  __syncwarp();
  if (first_lane) barrier_arrive(&shared.k_full[stage]);
  barrier_wait(&shared.conversion.v_landed[stage], ring.phase);
  const ItemInfo& item = shared.items[item_place(ring)];
  const int32_t written = item.written - producer * kRows;
  static_assert(kRows == 32, "a word of `wild` is a producer's");
  convert_page<Converted::kFloat16, kRows / 8>(v + kPageBytes / 2, v, item.masked, written,
                                               &shared.wild[stage][producer]);
  fence_async_proxy();
  __syncwarp();
  if (first_lane) barrier_arrive(&shared.v_full[stage]);
  ring.advance();
}

// FP8: brings the pages of an item into their own blocks, where the producers convert them.
__device__ __forceinline__ void copy_fp8_pages(const CUtensorMap* k_map, const CUtensorMap* v_map,
                                               Fp8Storage& shared,
                                               const RingPosition<kKVStages>& ring,
                                               const ItemInfo& item, float scale_log2) {
  const int stage = ring.stage;
  const auto copy = [&](const CUtensorMap* map, uint8_t* block, uint64_t* landed) {
    barrier_arrive_expect(landed, kFp8PageBytes);
    copy_box(block + kPageBytes / 2, map, landed, 0, 0, 0, item.head, item.page);
  };
  barrier_wait(&shared.k_empty[stage], ring.phase ^ 1);
  shared.items[item_place(ring)] = item;
  shared.conversion.scale_log2[stage] = scale_log2;
  copy(k_map, shared.k[stage], &shared.conversion.k_landed[stage]);
  barrier_wait(&shared.v_empty[stage], ring.phase ^ 1);
  for (uint32_t& rows : shared.wild[stage]) rows = 0;
  copy(v_map, shared.v[stage], &shared.conversion.v_landed[stage]);
}

template <DType kCache>
__device__ __forceinline__ void produce_kv(const KVBlockParams& params, const CUtensorMap* k_map,
                                           const CUtensorMap* v_map,
                                           SharedStorage<kCache>& shared) {
  const int lane = threadIdx.x % 32;
  RingPosition<kKVStages> ring;
  ItemInfo mine{};
  float scale_log2 = 0.0f;  // FP8
  bool started = false;
  // A block is read once, or by neighbours at a time: the partial results are what to keep.
  const uint64_t policy = evict_first_policy();
  for_items(
      params,
      [&](const WorkItem& item) {
        mine = {static_cast<int32_t>(count_tiles(params, item)), item.written, item.page, item.head,
                item.masked != 0};
        if constexpr (kIsFp8<kCache>) {
          scale_log2 = params.scale_log2 * scale_of(params.k_scale, item.head);
        }
      },
      [&](int32_t i, int32_t) {
        const ItemInfo info{
            __shfl_sync(kAllLanes, mine.tiles, i), __shfl_sync(kAllLanes, mine.written, i),
            __shfl_sync(kAllLanes, mine.page, i), __shfl_sync(kAllLanes, mine.head, i),
            __shfl_sync(kAllLanes, mine.masked, i) != 0};
        if constexpr (kIsFp8<kCache>) {
          const float item_scale = __shfl_sync(kAllLanes, scale_log2, i);
          if (lane == 0) copy_fp8_pages(k_map, v_map, shared, ring, info, item_scale);
          __syncwarp();
          convert_item(shared, ring, 0);
          return;
        }
        if (lane == 0) {
          barrier_wait(&shared.k_empty[ring.stage], ring.phase ^ 1);
          shared.items[item_place(ring)] = info;
          barrier_arrive_expect(&shared.k_full[ring.stage], kPageBytes);
          copy_box(shared.k[ring.stage], k_map, &shared.k_full[ring.stage], 0, 0, 0, info.head,
                   info.page, policy);
        }
        if (lane == 0) {
          barrier_wait(&shared.v_empty[ring.stage], ring.phase ^ 1);
          for (uint32_t& rows : shared.wild[ring.stage]) rows = 0;
          barrier_arrive_expect(&shared.v_full[ring.stage], kPageBytes);
          copy_box(shared.v[ring.stage], v_map, &shared.v_full[ring.stage], 0, 0, 0, info.head,
                   info.page, policy);
        }
        if (!started) named_barrier(kFirstTilesBarrier, kProducers * 32);
        started = true;
        ring.advance();
      });
}

// Lane i brings token i, i + 32, ... of a tile, and says where its result goes.
template <DType kCache>
__device__ __forceinline__ void produce_q(const KVBlockParams& params, const CUtensorMap* q_map,
                                          SharedStorage<kCache>& shared, int consumer) {
  const int lane = threadIdx.x % 32;
  const int group = 1 << params.log_group, tile_tokens = kTileRows >> params.log_group;
  const int first_stage = consumer * kQStagesPerConsumer;
  RingPosition<kQStagesPerConsumer> ring;
  RingPosition<kKVStages> kv;  // FP8
  int32_t head = 0, begin = 0, end = 0, first_valid = 0;
  uint32_t earlier_tiles = 0;
  bool started = false;
  Pair next{};  // of the lane, in the tile after the current one
  // Of the first item, the first tiles come before the second item's K and V: the copies of an SM
  // are served in order. Once, whether this consumer has a tile or not.
  const auto let_items_follow = [&] {
    if (!kIsFp8<kCache> && !started) named_barrier(kFirstTilesBarrier, kProducers * 32);
    started = true;
  };
  const auto load_pair = [&](int32_t first, int32_t item_end) {
    if (first + lane < item_end) next = params.pairs[first + lane];
  };
  for_items(
      params,
      [&](const WorkItem& item) {
        head = item.head;
        first_valid = item.first_valid;
        end = item.end;
        const uint32_t tiles = count_tiles(params, item);
        uint32_t before = sum_up_to_lane(tiles);
        before += earlier_tiles - tiles;
        begin = item.begin + static_cast<int32_t>(first_tile(consumer, before)) * tile_tokens;
        earlier_tiles = __shfl_sync(kAllLanes, before + tiles, 31) % kConsumers;
      },
      [&](int32_t i, int32_t count) {
        const int32_t item_head = __shfl_sync(kAllLanes, head, i);
        const int32_t item_begin = __shfl_sync(kAllLanes, begin, i);
        const int32_t item_end = __shfl_sync(kAllLanes, end, i);
        const int32_t item_valid = __shfl_sync(kAllLanes, first_valid, i);
        const int32_t next_begin = __shfl_sync(kAllLanes, begin, i + 1);
        const int32_t next_end = i + 1 < count ? __shfl_sync(kAllLanes, end, i + 1) : 0;
        if (i == 0) load_pair(item_begin, item_end);
        if (item_begin >= item_end) load_pair(next_begin, next_end);
        const auto gather = [&](int32_t first) {
          Pair pair = next;
          const int32_t following = first + kConsumers * tile_tokens;
          load_pair(following < item_end ? following : next_begin,
                    following < item_end ? item_end : next_end);
          const int tokens = min(tile_tokens, item_end - first);
          const int stage = first_stage + ring.stage;
          barrier_wait(&shared.q_empty[stage], ring.phase ^ 1);
          for (int token = lane; token < tile_tokens; token += 32) {
            if (token != lane && token < tokens) pair = params.pairs[first + token];
            shared.slots[stage][token] = token < tokens ? pair.slot : -1;
            shared.valid[stage][token] = min(kBlock, pair.token + item_valid);
          }
          __syncwarp();
          if (lane == 0) {
            barrier_arrive_expect(&shared.q_full[stage], tokens * group * kHeadDim * 2);
          }
          __syncwarp();
          for (int token = lane; token < tokens; token += 32) {
            // The last pair read above is the lane's last token's; earlier ones are read again.
            const int32_t source =
                token + 32 < tokens ? params.pairs[first + token].token : pair.token;
            const int row = token * group;
            uint8_t* rows = shared.q[stage] + row / 8 * 2048 + row % 8 * 128;
            if (group >= 8) {  // whole groups of 8 rows: one box
              copy_box(rows, q_map, &shared.q_full[stage], 0, 0, 0, item_head * group / 8, source);
            } else {  // a part of one: a box for each half of d
              copy_box(rows, q_map, &shared.q_full[stage], 0, item_head * group, 0, 0, source);
              copy_box(rows + 1024, q_map, &shared.q_full[stage], 0, item_head * group, 1, 0,
                       source);
            }
          }
          ring.advance();
          let_items_follow();
        };
        int32_t first = item_begin;
        if constexpr (kIsFp8<kCache>) {  // a tile first, rather than wait for the pages
          if (first < item_end && !has_landed(shared, kv)) {
            gather(first);
            first += kConsumers * tile_tokens;
          }
          convert_item(shared, kv, 1 + consumer);
        }
        for (; first < item_end; first += kConsumers * tile_tokens) gather(first);
        let_items_follow();
      });
}

}  // namespace msa::sparse_prefill::sm90
