// Step 4, sparse_prefill, query-major: a tile of tokens walks the blocks that its tokens share, in
// one running softmax (query_tile.cuh), then adds the partial results of its leftovers and writes
// its result.
//
//   for each leftover slot (m_s, l_s, o_s) of a token: as a block, with p V = o_s and sum p = l_s
//
// clang-format off
// Grid      persistent, one CTA an SM; CTA i takes tiles (head, 3 * 64 / G tokens) i, i + gridDim,
//           ..., leaving out those that are not query-major.
// Roles     role           warps  registers
//           consumer 0..2  0-11   160
//           K producer     12     32           FP8: roles of warps 12 to 15 in
//           V producer     13     32           prefill_query_block_fp8.cuh
//           q producer     14     32
//           cleaner        15     32
// Shared    k  2 stages    65,536
//           v  2 stages    65,536
//           q  2 stages    98,304
// Barriers  those of query_tile.cuh. After the last block the V producer completes a phase of
//           v_full without one, and says so in `written`.
// Limits    a tile's tokens belong to one request (the plan sees to it).
// clang-format on
#pragma once

#include "step4_attend/sm90/prefill_query_block_fp8.cuh"
#include "step4_attend/sm90/prefill_query_block_tile.cuh"

namespace msa::sparse_prefill::sm90 {

using BFloat16TileStorage = PrefillTileStorage<DType::kBFloat16>;

__device__ __forceinline__ void produce_k(const FinishParams& params, const CUtensorMap* map,
                                          BFloat16TileStorage& shared) {
  RingPosition<kKVStages> ring;
  for_query_tiles(params, [&](int32_t index) {
    const Tile tile = load_tile(params, index);
    produce_blocks(params.batch, map, tile, locate_tile(params, index, tile),
                   list_of(params, index), shared.k, shared.k_full, shared.k_empty, nullptr, ring);
  });
}

__device__ __forceinline__ void produce_v(const FinishParams& params, const CUtensorMap* map,
                                          BFloat16TileStorage& shared) {
  RingPosition<kKVStages> ring;
  for_query_tiles(params, [&](int32_t index) {
    const Tile tile = load_tile(params, index);
    produce_blocks(params.batch, map, tile, locate_tile(params, index, tile),
                   list_of(params, index), shared.v, shared.v_full, shared.v_empty, shared.written,
                   ring);
  });
  if (threadIdx.x % 32 == 0) {
    barrier_wait(&shared.v_empty[ring.stage], ring.phase ^ 1);
    shared.written[ring.stage] = kNoMoreBlocks;
    barrier_arrive(&shared.v_full[ring.stage]);
  }
}

__device__ __forceinline__ void produce_q(const FinishParams& params, const CUtensorMap* map,
                                          BFloat16TileStorage& shared) {
  RingPosition<BFloat16TileStorage::kQStages> ring;
  for_query_tiles(params, [&](int32_t index) {
    produce_tile_q(map, shared, load_tile(params, index), params.log_group,
                   kTileRows >> params.log_group, ring);
  });
}

// Adds the partial results of the rows' leftovers to o.
__device__ __forceinline__ void add_leftovers(const FinishParams& params, const int64_t (&unit)[2],
                                              const bool (&in_tile)[2], RunningRows& rows,
                                              Accumulator& o) {
  const int quad = threadIdx.x % 4, warp_row = threadIdx.x % 32 / 4;
  const int group = 1 << params.log_group, chunk_stride = min(group, 8) * 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool may_have = in_tile[r] && !params.plan.sizes.by_request;
    const int32_t count = may_have ? static_cast<int32_t>(params.plan.leftovers[unit[r]]) : 0;
    const int64_t first_slot = count > 0 ? params.plan.first_slot[unit[r]] : 0;
    const int row = (warp_row + 8 * r) & (group - 1);
    for (int32_t i = 0; i < count; ++i) {
      const int64_t slot = first_slot + i;
      const __nv_bfloat16* partial = params.partials.out + slot * group * kHeadDim +
                                     row / 8 * 8 * kHeadDim + (row % 8 * 4 + quad) * 8;
      uint4 bits[4];
#pragma unroll
      for (int chunk = 0; chunk < 4; ++chunk) {
        bits[chunk] = __ldcs(reinterpret_cast<const uint4*>(partial + chunk * chunk_stride));
      }
      const float2 state = params.partials.state[slot * group + row];
      const float maximum = fmaxf(rows.maximum[r], state.x);
      const float reference = maximum == -INFINITY ? 0.0f : maximum;
      const float factor = exp2_fast(rows.maximum[r] - reference);
      const float weight = exp2_fast(state.x - reference);
      rows.maximum[r] = maximum;
      rows.sum[r] = rows.sum[r] * factor + weight * state.y;
#pragma unroll
      for (int chunk = 0; chunk < 4; ++chunk) {
        const uint32_t words[4] = {bits[chunk].x, bits[chunk].y, bits[chunk].z, bits[chunk].w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int index = (chunk * 4 + n) * 4 + r * 2;
          o[index] = o[index] * factor + weight * __uint_as_float(words[n] << 16);
          o[index + 1] = o[index + 1] * factor + weight * __uint_as_float(words[n] & 0xffff0000u);
        }
      }
    }
  }
}

template <typename Storage>
__device__ __forceinline__ void consume_tiles(const FinishParams& params, Storage& shared,
                                              int consumer) {
  RingPosition<Storage::kKVStages> kv;
  RingPosition<Storage::kQStages> ring;
  for_query_tiles(params, [&](int32_t index) {
    const Tile tile = load_tile(params, index);
    TilePosition first{};  // FP8: what follows from it comes with the blocks
    if constexpr (!kIsFp8<Storage::kCache>) first = locate_tile(params, index, tile);
    attend_tile(params, shared, tile, first, list_of(params, index), consumer,
                kTileRows >> params.log_group, kv, ring,
                [&](const int32_t (&token)[2], const bool (&in_tile)[2], RunningRows& rows,
                    Accumulator& o) {
                  const int64_t unit[2] = {tile.head * params.plan.num_tokens + token[0],
                                           tile.head * params.plan.num_tokens + token[1]};
                  add_leftovers(params, unit, in_tile, rows, o);
                });
  });
}

template <DType kCache>
__global__ void __launch_bounds__(kThreads, 1)
    msa_sparse_prefill_query_block_sm90_kernel(const __grid_constant__ FinishParams params,
                                               const __grid_constant__ CUtensorMap q_map,
                                               const __grid_constant__ CUtensorMap k_map,
                                               const __grid_constant__ CUtensorMap v_map) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  auto& shared = *reinterpret_cast<PrefillTileStorage<kCache>*>(shared_memory);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&q_map);
    prefetch_tensor_map(&k_map);
    prefetch_tensor_map(&v_map);
    shared.init_barriers();
  }
  __syncthreads();
  wait_for_previous_kernel();

  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0);
  if (warp >= kConsumers * 4) {
    lower_registers<kTileProducerRegisters>();
    if constexpr (kIsFp8<kCache>) {
      if (warp < kConsumers * 4 + kConverters) {
        convert_fp8_pages(shared, warp - kConsumers * 4);
      } else {
        load_fp8_tiles(params, &q_map, &k_map, &v_map, shared);
      }
    } else if (warp == kConsumers * 4) {
      produce_k(params, &k_map, shared);
    } else if (warp == kConsumers * 4 + 1) {
      produce_v(params, &v_map, shared);
    } else if (warp == kConsumers * 4 + 2) {
      produce_q(params, &q_map, shared);
    } else {
      RingPosition<kKVStages> ring;
      while (clean_next_block(shared, ring)) {
      }
    }
  } else {
    raise_registers<kTileConsumerRegisters>();
    consume_tiles(params, shared, warp / 4);
  }
}

}  // namespace msa::sparse_prefill::sm90
