// Step 4, sparse_prefill, query-major: a tile of tokens walks the blocks that its tokens share, in
// one running softmax, then adds the partial results of its leftovers and writes its result.
//
//   for each shared block: s = scale * q . K^T, masked; m' = max(m, max s); p = exp(s - m');
//     l = l * exp(m - m') + sum p;  o = o * exp(m - m') + p V
//   for each leftover slot (m_s, l_s, o_s): the same with p V = o_s and sum p = l_s
//   out = o / l;  lse = m + log(l)
//
// clang-format off
// Grid      persistent, one CTA an SM; CTA i takes tiles (head, 3 * 64 / G tokens) i, i + gridDim,
//           ..., leaving out those that are not query-major.
// Roles     role           warps  registers  does
//           consumer 0..2  0-11   160        64 rows = 64 / G tokens; skips blocks that none shares
//           K producer     12     32         one box a block
//           V producer     13     32         the same: its own warp, or K's wait would hold V up
//           q producer     14     32         the tile's tokens, a box each
//           idle           15
// Shared    k  2 stages [half of d][128 tokens][64 d]            65,536   128-byte swizzle
//           v  2 stages, the same                                65,536
//           q  2 stages [24 row groups][half of d][8 rows][64 d] 98,304
// Barriers  name     arrivals                      who arrives            who waits
//           k_full   1 + bytes of a block          K producer             consumers
//           k_empty  12 = 3 consumers * 4 warps    each consumer warp     K producer
//           v_full, v_empty                        the same for V
//           q_full   1 + bytes of the tokens       q producer             consumers
//           q_empty  12                            each consumer warp     q producer
//           named 1  384                           all consumers, in masked blocks
//           A consumer that skips a block still waits for K and V before it releases them.
// Timeline  consumer: wait K, V | S = Q K^T | k_empty | softmax, o *= | o += P V | v_empty | next
//           the three consumers are out of step: one's softmax runs under another's products
// FP8       other producers, q in float16: prefill_query_block_fp8.cuh. The consumer waits for V
//           after the softmax, and does not shrink o before its weights would leave float16.
// Limits    bfloat16 q, D = 128, G 8 and 16; a tile's tokens belong to one request (the plan sees
//           to it).
// clang-format on
#pragma once

#include "step4_attend/sm90/prefill_query_block_fp8.cuh"
#include "step4_attend/sm90/prefill_query_block_tile.cuh"

namespace msa::sparse_prefill::sm90 {

// Brings the K or the V blocks of every tile; whole warp, its lanes look up 32 pages at a time.
// With V comes `wild`, cleared; null with K.
__device__ __forceinline__ void produce_blocks(const FinishParams& params, const CUtensorMap* map,
                                               uint8_t (*stages)[kPageBytes], uint64_t* full,
                                               uint64_t* empty, uint32_t (*wild)[kBlock / 32]) {
  const int lane = threadIdx.x % 32;
  RingPosition<kKVStages> ring;
  for_query_tiles(params, [&](int32_t index) {
    const Tile tile = load_tile(params, index);
    const int32_t request = find_position(params.batch, tile.first_token).request;
    const TileBlock* list = params.plan.tile_list + index * params.plan.tile_capacity;
    for (int32_t first = 0; first < tile.blocks; first += 32) {
      const int32_t count = min(32, tile.blocks - first);
      const int32_t page =
          lane < count ? page_of(params.batch, request, list[first + lane].block) : 0;
      for (int32_t i = 0; i < count; ++i) {
        const int32_t block_page = __shfl_sync(kAllLanes, page, i);
        if (lane == 0) {
          barrier_wait(&empty[ring.stage], ring.phase ^ 1);
          if (wild) {
            for (uint32_t& rows : wild[ring.stage]) rows = 0;
          }
          barrier_arrive_expect(&full[ring.stage], kPageBytes);
          copy_box(stages[ring.stage], map, &full[ring.stage], 0, 0, 0, tile.head, block_page);
        }
        ring.advance();
      }
    }
  });
}

__device__ __forceinline__ void produce_tile_q(const FinishParams& params, const CUtensorMap* map,
                                               TileSharedStorage<DType::kBFloat16>& shared) {
  const int lane = threadIdx.x % 32, group = 1 << params.log_group;
  RingPosition<kTileQStages<DType::kBFloat16>> ring;
  for_query_tiles(params, [&](int32_t index) {
    const Tile tile = load_tile(params, index);
    barrier_wait(&shared.q_empty[ring.stage], ring.phase ^ 1);
    if (lane == 0) {
      barrier_arrive_expect(&shared.q_full[ring.stage], tile.tokens * group * kHeadDim * 2);
    }
    __syncwarp();
    if (lane < tile.tokens) {
      copy_box(shared.q[ring.stage] + lane * group / 8 * 2048, map, &shared.q_full[ring.stage], 0,
               0, 0, tile.head * group / 8, tile.first_token + lane);
    }
    ring.advance();
  });
}

// As a row's maximum grows, its weights may grow to 2^7 times those of the first block before o and
// the sum are made smaller: few blocks need that, and o is 64 registers. FP8: weights are float16,
// whose largest is 2^15; they begin at 2^8, so that small ones are not lost.
template <DType kCache>
constexpr float kFirstWeight = kIsFp8<kCache> ? 8.0f : 0.0f;
constexpr float kWeightGrowth = 7.0f;

// What a consumer thread keeps of its two rows while it walks the blocks of a tile.
struct RunningRows {
  float maximum[2];  // log2 units, -inf: nothing yet
  float sum[2];
};

// s of one block -> p, the running maximum and sum, and the factors that o shrinks by. valid: keys
// that each row may see, 0 where its token does not share the block.
template <DType kCache>
__device__ __forceinline__ void running_softmax(Accumulator& s, const int32_t (&valid)[2],
                                                float (&scale_log2)[2], RunningRows& rows,
                                                uint32_t (&p)[32], float (&factor)[2]) {
  const int quad = threadIdx.x % 4;
  if (scale_log2[0] <= 0.0f) {  // so that the largest product is the largest logit, and -inf stays
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] *= scale_log2[i / 2 % 2];
    scale_log2[0] = scale_log2[1] = 1.0f;
  }
  if (valid[0] < kBlock || valid[1] < kBlock) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int column = i / 4 * 8 + quad * 2 + i % 2;
      if (column >= valid[i / 2 % 2]) s[i] = -INFINITY;
    }
  }
  float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int i = 0; i < 64; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], s[i]);
  float reference[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(kAllLanes, largest[r], 1));
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(kAllLanes, largest[r], 2));
    float maximum = largest[r] * scale_log2[r] - kFirstWeight<kCache>;
    if (!(maximum > rows.maximum[r] + kWeightGrowth)) maximum = rows.maximum[r];
    reference[r] = maximum == -INFINITY ? 0.0f : maximum;
    factor[r] = exp2_fast(rows.maximum[r] - reference[r]);
    rows.maximum[r] = maximum;
    rows.sum[r] *= factor[r];
  }
  float sum[2] = {};
#pragma unroll
  for (int i = 0; i < 64; i += 2) {
    const int r = i / 2 % 2;
    const float first = exp2_fast(fmaf(s[i], scale_log2[r], -reference[r]));
    const float second = exp2_fast(fmaf(s[i + 1], scale_log2[r], -reference[r]));
    sum[r] += first + second;
    p[i / 2] = pack_weights<kCache>(first, second);
  }
  rows.sum[0] += sum[0];  // each thread's own columns; the quad's are added at the end
  rows.sum[1] += sum[1];
}

// Adds the partial results of the rows' leftovers to o.
__device__ __forceinline__ void add_leftovers(const FinishParams& params, const int64_t (&unit)[2],
                                              const bool (&in_tile)[2], RunningRows& rows,
                                              Accumulator& o) {
  const int quad = threadIdx.x % 4, warp_row = threadIdx.x % 32 / 4;
  const int group = 1 << params.log_group, chunk_stride = min(group, 8) * 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t count = in_tile[r] ? static_cast<int32_t>(params.plan.leftovers[unit[r]]) : 0;
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

template <DType kCache>
__device__ __forceinline__ void store_rows(const FinishParams& params, const Tile& tile,
                                           const int32_t (&token)[2], const bool (&in_tile)[2],
                                           const RunningRows& rows, const Accumulator& o) {
  constexpr float kLn2 = 0.69314718055994530942f;
  const int quad = threadIdx.x % 4, warp_row = threadIdx.x % 32 / 4;
  const int group = 1 << params.log_group;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float normalise = normaliser<kCache>(params, tile.head, rows.sum[r]);
    const int64_t q_head = (tile.head << params.log_group) + ((warp_row + 8 * r) & (group - 1));
    __nv_bfloat16* out = static_cast<__nv_bfloat16*>(params.out.data) +
                         token[r] * params.out.token_stride + q_head * params.out.head_stride;
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
      uint32_t words[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int i = (chunk * 4 + n) * 4 + r * 2;
        const __nv_bfloat162 pair = __floats2bfloat162_rn(o[i] * normalise, o[i + 1] * normalise);
        words[n] = *reinterpret_cast<const uint32_t*>(&pair);
      }
      transpose_quad(words, quad);
      if (in_tile[r]) {
        *reinterpret_cast<uint4*>(out + chunk * 32 + quad * 8) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
    if (in_tile[r] && quad == 0 && params.lse.data != nullptr) {
      params.lse.data[token[r] * params.lse.token_stride + q_head * params.lse.head_stride] =
          rows.sum[r] == 0.0f ? -INFINITY : (rows.maximum[r] + log2f(rows.sum[r])) * kLn2;
    }
  }
}

template <DType kCache>
__device__ __forceinline__ void consume_tiles(const FinishParams& params,
                                              TileSharedStorage<kCache>& shared, int consumer) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int group_tokens = kTileRows >> params.log_group;
  const uint64_t q_base =
      make_descriptor(shared_address(shared.q[0] + consumer * kQTileBytes), 16, 2048);
  const uint64_t k_base = make_descriptor(shared_address(shared.k[0]), 16, 1024);
  const uint64_t v_base = make_descriptor(shared_address(shared.v[0]), kPageBytes / 2, 1024);
  // The thread's rows belong to these tokens of its group.
  const int member[2] = {(warp * 16 + lane / 4) >> params.log_group,
                         (warp * 16 + lane / 4 + 8) >> params.log_group};

  RingPosition<kKVStages> kv;
  RingPosition<kTileQStages<kCache>> ring;
  for_query_tiles(params, [&](int32_t index) {
    const Tile tile = load_tile(params, index);
    const int q_barrier = kIsFp8<kCache> ? consumer : ring.stage;  // FP8: the consumer's own
    TokenPosition first{};  // FP8: what follows from it comes with the blocks
    if constexpr (!kIsFp8<kCache>) first = find_position(params.batch, tile.first_token);
    const int32_t seq_len = kIsFp8<kCache> ? 0 : seq_len_of(params.batch, first.request);
    const TileBlock* list = params.plan.tile_list + index * params.plan.tile_capacity;
    const int group_shift = consumer * group_tokens;
    const int32_t pos[2] = {first.pos + group_shift + member[0],
                            first.pos + group_shift + member[1]};

    Accumulator o;
#pragma unroll
    for (float& value : o) value = 0.0f;
    RunningRows rows{{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
    barrier_wait(&shared.q_full[q_barrier], ring.phase);
    float q_factor[2] = {1.0f, 1.0f};
    if constexpr (kIsFp8<kCache>) {
      convert_q(shared.q[0] + consumer * kQTileBytes + warp * kQTileBytes / 4, q_factor);
      fence_async_proxy();
      named_barrier(1 + consumer, 128);
    }
    TileBlock next{};
    if constexpr (!kIsFp8<kCache>) next = list[0];
    for (int32_t i = 0; i < tile.blocks; ++i) {
      const TileBlock current = next;
      if constexpr (!kIsFp8<kCache>) {
        if (i + 1 < tile.blocks) next = list[i + 1];
      }
      const auto members_of = [&](uint32_t tokens) {
        return tokens >> group_shift & ((1u << group_tokens) - 1);
      };
      BlockInfo block{};  // FP8
      uint32_t members = members_of(current.tokens);
      barrier_wait(&shared.k_full[kv.stage], kv.phase);
      if constexpr (kIsFp8<kCache>) {
        block = shared.blocks[kv.stage + kv.phase * kKVStages];
        members = members_of(block.tokens);
      } else {
        barrier_wait(&shared.v_full[kv.stage], kv.phase);
      }
      // Does the tile's first token see all of the block? Then all of them do.
      const bool masked = kIsFp8<kCache> ? block.first_valid < kBlock
                                         : first.pos - current.block * kBlock < kBlock - 1;
      if constexpr (!kIsFp8<kCache>) {  // else the converter has cleaned V
        if (masked) {
          clean_values(shared.v[kv.stage], seq_len - current.block * kBlock, shared.wild[kv.stage]);
        }
      }
      const auto release_k = [&] {
        if (lane != 0) return;
        barrier_arrive(&shared.k_empty[kv.stage]);
        if constexpr (kIsFp8<kCache>) {  // q has one stage: the next one is needed soon
          if (i + 1 == tile.blocks) barrier_arrive(&shared.q_empty[q_barrier]);
        }
      };
      if (members != 0) {
        Accumulator s;
        multiply_q_k<kIsFp8<kCache>>(q_base, ring.stage * kTileQBytes, k_base,
                                     kv.stage * kPageBytes, s);
        release_k();

        int32_t valid[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int32_t seen =
              kIsFp8<kCache> ? pos[r] + block.first_valid : pos[r] - current.block * kBlock + 1;
          valid[r] = members >> member[r] & 1 ? min(kBlock, seen) : 0;
        }
        uint32_t p[32];
        float factor[2];
        float scale_log2[2] = {params.scale_log2, params.scale_log2};
        if constexpr (kIsFp8<kCache>) {
#pragma unroll
          for (int r = 0; r < 2; ++r) scale_log2[r] = block.scale_log2 * q_factor[r];
        }
        running_softmax<kCache>(s, valid, scale_log2, rows, p, factor);
        if (__any_sync(kAllLanes, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
          for (int j = 0; j < 64; ++j) o[j] *= factor[j / 2 % 2];
        }
        if constexpr (kIsFp8<kCache>) barrier_wait(&shared.v_full[kv.stage], kv.phase);
        multiply_p_v<kCache>(p, v_base, kv.stage * kPageBytes, o, true);
        if (masked) {
          const int32_t page =
              kIsFp8<kCache> ? block.page : page_of(params.batch, first.request, current.block);
          add_wild_values<kCache>(params.v_cache, page, tile.head, shared.wild[kv.stage], valid, o);
          __syncwarp();
        }
        if (lane == 0) barrier_arrive(&shared.v_empty[kv.stage]);
      } else {
        release_k();
        if constexpr (kIsFp8<kCache>) barrier_wait(&shared.v_full[kv.stage], kv.phase);
        if (lane == 0) barrier_arrive(&shared.v_empty[kv.stage]);
      }
      kv.advance();
    }
    if (!kIsFp8<kCache> && lane == 0) barrier_arrive(&shared.q_empty[q_barrier]);
    ring.advance();

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows.sum[r] += __shfl_xor_sync(kAllLanes, rows.sum[r], 1);
      rows.sum[r] += __shfl_xor_sync(kAllLanes, rows.sum[r], 2);
    }
    int64_t unit[2];
    int32_t token[2];
    bool in_tile[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      token[r] = tile.first_token + group_shift + member[r];
      in_tile[r] = group_shift + member[r] < tile.tokens;
      unit[r] = tile.head * params.plan.num_tokens + token[r];
    }
    add_leftovers(params, unit, in_tile, rows, o);
    store_rows<kCache>(params, tile, token, in_tile, rows, o);
  });
}

template <DType kCache>
__global__ void __launch_bounds__(kThreads, 1)
    msa_sparse_prefill_query_block_sm90_kernel(const __grid_constant__ FinishParams params,
                                               const __grid_constant__ CUtensorMap q_map,
                                               const __grid_constant__ CUtensorMap k_map,
                                               const __grid_constant__ CUtensorMap v_map) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  auto& shared = *reinterpret_cast<TileSharedStorage<kCache>*>(shared_memory);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kKVStages; ++stage) {
      barrier_init(&shared.k_full[stage], 1);
      barrier_init(&shared.v_full[stage], 1);
      barrier_init(&shared.k_empty[stage], kKVEmptyArrivals);
      barrier_init(&shared.v_empty[stage], kKVEmptyArrivals);
    }
    if constexpr (kIsFp8<kCache>) {
      for (int consumer = 0; consumer < kConsumers; ++consumer) {
        barrier_init(&shared.q_full[consumer], 1);
        barrier_init(&shared.q_empty[consumer], 4);
      }
      for (int converter = 0; converter < kConverters; ++converter) {
        barrier_init(&shared.page_full[converter], 1);
        barrier_init(&shared.page_empty[converter], 1);
      }
    } else {
      for (int stage = 0; stage < kTileQStages<kCache>; ++stage) {
        barrier_init(&shared.q_full[stage], 1);
        barrier_init(&shared.q_empty[stage], kConsumers * 4);
      }
    }
    fence_barrier_init();
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
      produce_blocks(params, &k_map, shared.k, shared.k_full, shared.k_empty, nullptr);
    } else if (warp == kConsumers * 4 + 1) {
      produce_blocks(params, &v_map, shared.v, shared.v_full, shared.v_empty, shared.wild);
    } else if (warp == kConsumers * 4 + 2) {
      produce_tile_q(params, &q_map, shared);
    }
  } else {
    raise_registers<kTileConsumerRegisters>();
    consume_tiles(params, shared, warp / 4);
  }
}

}  // namespace msa::sparse_prefill::sm90
