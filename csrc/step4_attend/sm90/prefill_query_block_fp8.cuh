// FP8 caches in the query-major prefill kernel: who brings what, and q in float16.
//
// clang-format off
// Roles     role           warps  registers  does
//           converter 0..2 12-14  32         page n of the CTA's blocks (K and V in turn) where
//                                            n % 3 is its number: waits for it and for its place
//           loader         15     32         one box a page, beside its block; the tokens of q
// Shared    k, v           as for bfloat16     131,072
//           pages          3 [128 tokens][128 d] 49,152   128-byte swizzle
//           q              1 stage, a part a consumer 49,152
// Barriers  name        arrivals                 who arrives           who waits
//           page_full   1 + bytes of a page      loader                its converter
//           page_empty  1                        its converter         loader
//           k_full      1                        a converter           consumers
//           v_full      1                        a converter           consumers
//           k_empty, v_empty  12                 each consumer warp    converters
//           q_full      1 + bytes of the tokens  loader                a consumer
//           q_empty     4                        each warp of it, after its last Q K^T    loader
//           named 1..3  128                      a consumer, when its q is converted
//           A converter does not wait for every phase of k_empty and v_empty. None of its waits
//           passes on an older phase: its page before, n - 3, waited until all consumers had let go
//           of a block after which the phase two before the wanted one is complete.
// clang-format on
#pragma once

#include "step4_attend/sm90/prefill_query_block_tile.cuh"

namespace msa::sparse_prefill::sm90 {

// FP8: brings q to those of the consumers `waiting` (bits) that have let go of the tile before.
// Returns who still waits. Whole warp.
__device__ __forceinline__ uint32_t load_free_q(const FinishParams& params, const CUtensorMap* map,
                                                Fp8TileStorage& shared, const Tile& tile,
                                                uint32_t waiting, uint32_t phase) {
  const int lane = threadIdx.x % 32, group = 1 << params.log_group;
  const int group_tokens = kTileRows >> params.log_group;
#pragma unroll 1
  for (int consumer = 0; consumer < kConsumers; ++consumer) {
    if ((waiting >> consumer & 1) == 0) continue;
    const bool free = barrier_test(&shared.q_empty[consumer], phase ^ 1);
    if (!__shfl_sync(kAllLanes, free, 0)) continue;
    waiting ^= 1u << consumer;
    const int first = consumer * group_tokens;
    const int tokens = max(0, min(group_tokens, tile.tokens - first));
    if (lane == 0) {
      barrier_arrive_expect(&shared.q_full[consumer], tokens * group * kHeadDim * 2);
    }
    __syncwarp();
    if (lane < tokens) {
      copy_box(shared.q[0] + (first + lane) * group / 8 * 2048, map, &shared.q_full[consumer], 0, 0,
               0, tile.head * group / 8, tile.first_token + first + lane);
    }
  }
  return waiting;
}

// FP8: brings the pages of every tile, K and V of a block in turn, each to the converter whose turn
// it is, and q. Whole warp. It never waits for a page's place without looking after q: the
// consumers may need that q before they free anything.
__device__ __forceinline__ void load_fp8_tiles(const FinishParams& params, const CUtensorMap* q_map,
                                               const CUtensorMap* k_map, const CUtensorMap* v_map,
                                               Fp8TileStorage& shared) {
  const int lane = threadIdx.x % 32;
  RingPosition<kConverters> ring;
  uint32_t q_phase = 0;
  for_query_tiles(params, [&](int32_t index) {
    const Tile tile = load_tile(params, index);
    const TilePosition position = locate_tile(params, index, tile);
    const float scale_log2 = params.scale_log2 * scale_of(params.k_scale, tile.head);
    const TileBlock* list = list_of(params, index);
    uint32_t waiting = (1u << kConsumers) - 1;
    for (int32_t first = 0; first < tile.blocks; first += 32) {
      const int32_t count = min(32, tile.blocks - first);
      int32_t page = 0;
      TileBlock block{};
      if (lane < count) {
        block = list[first + lane];
        page = page_of(params.batch, position.request, block.block);
      }
      for (int32_t i = 0; i < 2 * count; ++i) {
        for (;;) {
          const bool free = barrier_test(&shared.page_empty[ring.stage], ring.phase ^ 1);
          waiting = load_free_q(params, q_map, shared, tile, waiting, q_phase);
          if (__shfl_sync(kAllLanes, free, 0)) break;
          __nanosleep(64);
        }
        const int32_t begin = __shfl_sync(kAllLanes, block.block, i / 2) * kBlock;
        const uint32_t tokens = __shfl_sync(kAllLanes, block.tokens, i / 2);
        const int32_t block_page = __shfl_sync(kAllLanes, page, i / 2);
        if (lane == 0) {
          shared.infos[ring.stage] = {{position.pos + 1 - begin, tokens, block_page, scale_log2},
                                      position.seq_len - begin};
          barrier_arrive_expect(&shared.page_full[ring.stage], kFp8PageBytes);
          copy_box(shared.pages[ring.stage], i % 2 == 0 ? k_map : v_map,
                   &shared.page_full[ring.stage], 0, 0, 0, tile.head, block_page);
        }
        ring.advance();
      }
    }
    while (waiting != 0) {
      waiting = load_free_q(params, q_map, shared, tile, waiting, q_phase);
      __nanosleep(64);
    }
    q_phase ^= 1;
  });
  for (int i = 0; i < kConverters; ++i) {
    barrier_wait(&shared.page_empty[ring.stage], ring.phase ^ 1);
    if (lane == 0) {
      shared.infos[ring.stage].written = kNoMorePages;
      barrier_arrive(&shared.page_full[ring.stage]);
    }
    ring.advance();
  }
}

// FP8: converts pages n = converter, converter + 3, ...: page n is of K where n is even, else of V,
// of the CTA's block n / 2. Whole warp.
__device__ __forceinline__ void convert_fp8_pages(Fp8TileStorage& shared, int converter) {
  const int lane = threadIdx.x % 32;
  const uint8_t* page = shared.pages[converter];
  const PageInfo& info = shared.infos[converter];
  for (uint32_t n = converter;; n += kConverters) {
    const uint32_t stage = n / 2 % kKVStages, empty_phase = (n / 2 / kKVStages & 1) ^ 1;
    barrier_wait(&shared.page_full[converter], n / kConverters & 1);
    if (info.written == kNoMorePages) return;
    if (n % 2 == 0) {
      barrier_wait(&shared.k_empty[stage], empty_phase);
      if (lane == 0) shared.blocks[n / 2 % (2 * kKVStages)] = info.block;
      convert_page<Converted::kFloat16>(page, shared.k[stage], false, 0, nullptr);
    } else {
      barrier_wait(&shared.v_empty[stage], empty_phase);
      if (lane < kBlock / 32) shared.wild[stage][lane] = 0;
      __syncwarp();
      convert_page<Converted::kFloat16>(page, shared.v[stage],
                                        is_seen_in_part(info.block.first_valid, info.block.tokens),
                                        info.written, shared.wild[stage]);
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(n % 2 == 0 ? &shared.k_full[stage] : &shared.v_full[stage]);
      barrier_arrive(&shared.page_empty[converter]);
    }
  }
}

}  // namespace msa::sparse_prefill::sm90
