// The producers of the KV-block-major kernel (prefill_kv_block_kernel.cuh): who walks the CTA's
// work items and brings their K, V and q to shared memory, and which consumer takes which tile.
#pragma once

#include <cuda_runtime.h>

#include "device/common.cuh"
#include "device/instructions.cuh"
#include "device/positions.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "step3_remap/sm80/block_item.cuh"
#include "step4_attend/sm90/prefill_fp8_page.cuh"
#include "step4_attend/sm90/prefill_kv_block_tile.h"

namespace msa::sparse_prefill::sm90 {

__device__ __forceinline__ bool is_last(const WorkItem& item) { return item.begin >= item.end; }

__device__ __forceinline__ uint32_t count_tiles(const KVBlockParams& params, const WorkItem& item) {
  const int log_tile_tokens = 6 - params.log_group;
  return static_cast<uint32_t>(item.end - item.begin + (1 << log_tile_tokens) - 1) >>
         log_tile_tokens;
}

// Where a CTA's work items come from, for the K/V producer's first lane: the first is the CTA's
// own, the others are drawn, so that CTAs end together whatever their items cost. Memory is not
// waited for: the item to be published next was read an item ago, and its number drawn two ago.
template <DType kCache>
struct ItemFeed {
  const KVBlockParams& params;
  SharedStorage<kCache>& shared;
  RingPosition<kItemPlaces> place{};
  int32_t first_drawn = 0, end = 0;  // of the round
  int32_t ticket = 0;                // of the item after `next`
  WorkItem next{};                   // without pairs: there are no more

  __device__ __forceinline__ void start() {
    // Items of the first round begin with 0, so that one is read beside the range.
    const int32_t mine =
        static_cast<int32_t>(blockIdx.x) + (params.round == 0 ? 0 : params.item_range[0]);
    next = mine < params.max_items ? load_item(params.work_items, mine) : WorkItem{};
    ticket = fetch_and_increment(params.item_tickets);
    end = params.item_range[1];
    first_drawn = params.item_range[0] + static_cast<int32_t>(gridDim.x);
    if (mine >= end) next = {};  // what was read there is no item
    publish();
  }

  __device__ __forceinline__ void publish() {
    barrier_wait(&shared.item_empty[place.stage], place.phase ^ 1);
    store_item(shared.items, place.stage, next);
    barrier_arrive(&shared.item_full[place.stage]);
    place.advance();
    const int32_t index = first_drawn + ticket;
    const bool leaves = next.head > 0 && static_cast<int32_t>(blockIdx.x) < params.leaving_ctas &&
                        next.by_head;
    next = {};
    if (index < end) {
      next = load_item(params.work_items, index);
      if (leaves) {
        end = 0;  // what was drawn is the last
      } else {
        ticket = fetch_and_increment(params.item_tickets);
      }
    }
  }
};

// The tiles of a CTA's items, one after another, go to the consumers by turns. Of an item that
// comes after `before` tiles, consumer c has tiles first_tile(c, before), first_tile() + 3, ...
__device__ __forceinline__ uint32_t first_tile(uint32_t consumer, uint32_t before) {
  return (consumer + (kConsumers - 1) * before) % kConsumers;  // (c - before) mod 3
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
                                             const WorkItem& item, int producer) {
  constexpr int kRows = kBlock / kProducers;
  const int stage = ring.stage, offset = producer * kRows * 128;
  uint8_t *k = shared.k[stage] + offset, *v = shared.v[stage] + offset;
  barrier_wait(&shared.conversion.k_landed[stage], ring.phase);
  convert_page<Converted::kBFloat16, kRows / 8>(k + kPageBytes / 2, k, false, 0, nullptr);
  fence_async_proxy();
  barrier_arrive_warp(&shared.k_full[stage]);
  barrier_wait(&shared.conversion.v_landed[stage], ring.phase);
  const int32_t written = item.written - producer * kRows;
  static_assert(kRows == 32, "a word of `wild` is a producer's");
  convert_page<Converted::kFloat16, kRows / 8>(v + kPageBytes / 2, v, item.masked != 0, written,
                                               &shared.wild[stage][producer]);
  fence_async_proxy();
  barrier_arrive_warp(&shared.v_full[stage]);
  ring.advance();
}

template <DType kCache>
__device__ __forceinline__ void produce_kv(const KVBlockParams& params, const CUtensorMap* k_map,
                                           const CUtensorMap* v_map,
                                           SharedStorage<kCache>& shared) {
  const bool first_lane = threadIdx.x % 32 == 0;
  if (!kIsFp8<kCache> && !first_lane) return;  // FP8: all lanes convert
  ItemFeed<kCache> feed{params, shared};
  if (first_lane) feed.start();
  RingPosition<kItemPlaces> place;
  RingPosition<kKVStages> ring;
  // A block is read once, or by neighbours at a time: the partial results are what to keep. But
  // where they are more than L2 holds anyway, K and V that go first are read again from memory.
  uint64_t policy = 0;
  if constexpr (!kIsFp8<kCache>) {
    const bool keep = params.used_slots != nullptr && *params.used_slots > params.kept_slots;
    policy = keep ? evict_normal_policy() : evict_first_policy();
  }
  for (bool first = true;; first = false) {
    barrier_wait(&shared.item_full[place.stage], place.phase);
    const WorkItem& item = shared.items[place.stage];
    if (is_last(item)) return;
    const int stage = ring.stage;
    // FP8 pages come into the second half of their own blocks, where the producers convert them.
    const auto copy = [&](const CUtensorMap* map, uint8_t* block, uint64_t* full) {
      if constexpr (kIsFp8<kCache>) {
        barrier_arrive_expect(full, kFp8PageBytes);
        copy_box(block + kPageBytes / 2, map, full, 0, 0, 0, item.head, item.page);
      } else {
        barrier_arrive_expect(full, kPageBytes);
        copy_box(block, map, full, 0, 0, 0, item.head, item.page, policy);
      }
    };
    uint64_t *k_there = &shared.k_full[stage], *v_there = &shared.v_full[stage];
    if constexpr (kIsFp8<kCache>) {
      k_there = &shared.conversion.k_landed[stage];
      v_there = &shared.conversion.v_landed[stage];
    }
    if (first_lane) {
      barrier_wait(&shared.k_empty[stage], ring.phase ^ 1);
      if constexpr (kIsFp8<kCache>) {
        shared.conversion.scale_log2[stage] =
            params.scale_log2 * scale_of(params.k_scale, item.head);
      }
      copy(k_map, shared.k[stage], k_there);
      feed.publish();
      barrier_wait(&shared.v_empty[stage], ring.phase ^ 1);
      for (uint32_t& rows : shared.wild[stage]) rows = 0;
      copy(v_map, shared.v[stage], v_there);
    }
    if constexpr (kIsFp8<kCache>) {
      __syncwarp();
      convert_item(shared, ring, item, 0);
    } else {
      if (first) barrier_wait(&shared.first_tiles, 0);
      ring.advance();
    }
    place.advance();
  }
}

// Lane i brings token i, i + 32, ... of a tile, and says where its result goes.
template <DType kCache>
__device__ __forceinline__ void produce_q(const KVBlockParams& params, const CUtensorMap* q_map,
                                          SharedStorage<kCache>& shared, int consumer) {
  const int lane = threadIdx.x % 32;
  const int group = 1 << params.log_group, tile_tokens = kTileRows >> params.log_group;
  const int first_stage = consumer * kQStagesPerConsumer;
  RingPosition<kItemPlaces> place;
  RingPosition<kQStagesPerConsumer> ring;
  RingPosition<kKVStages> kv;  // FP8
  uint32_t first = consumer;   // first_tile() of the item
  bool started = false;
  Pair next{};  // of the lane, in the consumer's next tile
  // Of the first item, the first tiles come before the second item's K and V: the copies of an SM
  // are served in order. Once, whether this consumer has a tile or not.
  const auto let_items_follow = [&] {
    if (!kIsFp8<kCache> && !started && lane == 0) barrier_arrive(&shared.first_tiles);
    started = true;
  };
  while (true) {
    barrier_wait(&shared.item_full[place.stage], place.phase);
    const WorkItem& item = shared.items[place.stage];
    if (is_last(item)) return;
    const int32_t head = item.head, end = item.end, first_valid = item.first_valid;
    const uint32_t tiles = count_tiles(params, item);
    int32_t begin = item.begin + static_cast<int32_t>(first) * tile_tokens;
    const auto load_pair = [&] {
      if (begin + lane < end) next = params.pairs[begin + lane];
    };
    const auto gather = [&] {
      const int tokens = min(tile_tokens, end - begin);
      const int stage = first_stage + ring.stage;
      Pair pair = next;
      barrier_wait(&shared.q_empty[stage], ring.phase ^ 1);
      for (int token = lane; token < tile_tokens; token += 32) {
        if (token != lane && token < tokens) pair = params.pairs[begin + token];
        shared.slots[stage][token] = token < tokens ? pair.slot : -1;
        shared.valid[stage][token] = min(kBlock, pair.token + first_valid);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive_expect(&shared.q_full[stage], tokens * group * kHeadDim * 2);
      __syncwarp();
      for (int token = lane; token < tokens; token += 32) {
        // The last pair read above is the lane's last token's; earlier ones are read again.
        const int32_t source = token + 32 < tokens ? params.pairs[begin + token].token : pair.token;
        const int row = token * group;
        uint8_t* rows = shared.q[stage] + row / 8 * 2048 + row % 8 * 128;
        if (group >= 8) {  // whole groups of 8 rows: one box
          copy_box(rows, q_map, &shared.q_full[stage], 0, 0, 0, head * group / 8, source);
        } else {  // a part of one: a box for each half of d
          copy_box(rows, q_map, &shared.q_full[stage], 0, head * group, 0, 0, source);
          copy_box(rows + 1024, q_map, &shared.q_full[stage], 0, head * group, 1, 0, source);
        }
      }
      ring.advance();
      let_items_follow();
      begin += kConsumers * tile_tokens;
      load_pair();
    };
    load_pair();
    if constexpr (kIsFp8<kCache>) {  // a tile first, rather than wait for the pages
      if (begin < end && !has_landed(shared, kv)) gather();
      convert_item(shared, kv, item, 1 + consumer);
    }
    while (begin < end) gather();
    let_items_follow();
    first = first_tile(first, tiles);
    barrier_arrive_warp(&shared.item_empty[place.stage]);
    place.advance();
  }
}

}  // namespace msa::sparse_prefill::sm90
