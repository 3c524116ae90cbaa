// Step 4, sparse_prefill, KV-block-major: each K/V block moves to shared memory once a work item,
// and the tokens that selected it stream past.
//
//   for the G rows of each (token, k) of the item's block and KV head:
//     s = scale * q . K^T, tokens past pos masked
//     m = max s;  p = exp(s - m);  l = sum p;  o = p V
//   o (not normalised, bfloat16) and (m, l) go to the entry's slot; whoever finishes the token (the
//   query-major kernel or the merge) weighs and adds its slots, so L2 gives them up last, and K and
//   V of bfloat16 first, unless a long call's slots are more than it holds. No running softmax, no
//   atomics: a slot's bits do not depend on the tile it was computed in.
//
// clang-format off
// Grid      persistent, one CTA an SM; CTA i takes work item i, then draws: of short calls the
//           largest come first (split_short_kernel.cuh)
// Roles     role            warps   registers  does
//           consumer 0..2   0-11    152        every third tile, 64 / G tokens each: the tiles of
//                                              the CTA's items, one after another, by turns
//           K/V producer    12      56         draws items; one box a K block, one a V block
//           q producers     13-15   56         warp 13 + w gathers tiles of consumer w, a box a
//                                              token
// Shared    name      layout                                              bytes
//           k         2 stages [half of d][128 tokens][64 d]              65,536   128-byte swizzle
//           v         2 stages, the same                                  65,536
//           q         2 stages a consumer [row group][half of d][8 rows][64 d]  98,304
//           items     4 places                                            128
// Barriers  name      arrivals                   who arrives            who waits
//           item_full 1                          K/V producer           consumers, q producers
//           item_empty 3                         q producers            K/V producer
//           first_tiles 3                        q producers, once      K/V producer, of bfloat16:
//                                                the first tiles' copies go before the second
//                                                item's
//           k_full    1 + bytes of a block       K/V producer           consumers
//           v_full    1 + bytes of a block       K/V producer           consumers
//           k_empty   12 = 3 consumers * 4 warps each consumer warp     K/V producer
//           v_empty                              the same for V
//           q_full    1 + bytes of the tokens    q producer w           consumer w
//           q_empty   4 = warps of consumer w    each of its warps      q producer w
//           named 1   384                        all consumers, in masked blocks
//           A consumer waits for every k_full and v_full in turn, also of items that leave it no
//           tile: a parity wait tolerates a lag of one phase.
// Timeline  consumer: wait K, q | S = Q K^T | q_empty, k_empty | softmax | wait V | O = P V |
//           v_empty | store | next tile; k_empty and v_empty after its last tile of the item
//           the three consumers are out of step, in two items at a time: one's softmax runs under
//           another's products
// FP8       the K/V producer brings the pages into their own blocks (prefill_fp8_page.cuh), and
//           each of the four producers converts a quarter of both: k_landed and v_landed (1 + bytes
//           of a page) say that a page is there, k_full and v_full (4) that it is a block. Weights
//           are float16, as V is.
// Unseen    of K: masked columns are replaced before use. Of V: 0 * NaN is NaN, so in blocks that
//           some token sees in part only, rows at or past the request's length, and NaN and Inf,
//           become 0 before the block's first use, by the consumers (FP8: the producers); NaN and
//           Inf are added back, from the cache, to the rows that do see them.
// Limits    bfloat16 q, D = 128, G in {1, 2, 4, 8, 16}.
// clang-format on
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "device/common.cuh"
#include "device/dependent_launch.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"
#include "step4_attend/sm90/prefill_kv_block_producers.cuh"
#include "step4_attend/sm90/prefill_kv_block_tile.h"

namespace msa::sparse_prefill::sm90 {

// A consumer thread's two rows of a tile: row and row + 8 of its warp's 16.
struct Row {
  int32_t slot;   // of the partial result, -1: no such token
  int32_t valid;  // keys of the block that the token may see, 1 to 128
};

// A weight that float16 holds stands for 2^-15 of it: its smallest ones, 2^-24 (the largest is 1),
// would cut weights off that bfloat16 keeps. Sums and maxima carry the factor along.
template <DType kCache>
constexpr float kWeightExponent = kIsFp8<kCache> ? 15.0f : 0.0f;

// Two weights as the next product takes them: in the type that V has in shared memory.
template <DType kCache>
__device__ __forceinline__ uint32_t pack_weights(float first, float second) {
  if constexpr (kIsFp8<kCache>) {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// Softmax of one block for the rows of this thread: s becomes p, in registers in the order of the
// next product's first operand.
template <DType kCache>
__device__ __forceinline__ void softmax(Accumulator& s, const Row (&rows)[2], float scale_log2,
                                        uint32_t (&p)[32], float (&maximum)[2], float (&sum)[2]) {
  const int quad = threadIdx.x % 4;
  if (scale_log2 <= 0.0f) {  // so that the largest product is the largest logit, and -inf stays
#pragma unroll
    for (float& value : s) value *= scale_log2;
    scale_log2 = 1.0f;
  }
  if (rows[0].valid < kBlock || rows[1].valid < kBlock) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int column = i / 4 * 8 + quad * 2 + i % 2;
      if (column >= rows[i / 2 % 2].valid) s[i] = -INFINITY;
    }
  }
  float largest[2] = {-INFINITY, -INFINITY}, reference[2];
#pragma unroll
  for (int i = 0; i < 64; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], s[i]);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(kAllLanes, largest[r], 1));
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(kAllLanes, largest[r], 2));
    maximum[r] = largest[r] * scale_log2;
    if constexpr (kIsFp8<kCache>) maximum[r] -= kWeightExponent<kCache>;
    reference[r] = maximum[r] == -INFINITY ? 0.0f : maximum[r];
    sum[r] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < 64; i += 2) {
    const int r = i / 2 % 2;
    const float first = exp2_fast(fmaf(s[i], scale_log2, -reference[r]));
    const float second = exp2_fast(fmaf(s[i + 1], scale_log2, -reference[r]));
    sum[r] += first + second;
    p[i / 2] = pack_weights<kCache>(first, second);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 1);
    sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 2);
  }
}

__device__ __forceinline__ void store_partial(const KVBlockParams& params, const Row (&rows)[2],
                                              const Accumulator& o, const float (&maximum)[2],
                                              const float (&sum)[2]) {
  const uint64_t policy = evict_last_policy();  // they are read again, K and V are not
  const int quad = threadIdx.x % 4, warp_row = threadIdx.x % 32 / 4;
  const int group = 1 << params.log_group, chunk_stride = min(group, 8) * 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (rows[r].slot < 0) continue;
    const int row = (warp_row + 8 * r) & (group - 1);
    const int64_t slot = rows[r].slot;
    __nv_bfloat16* out = params.partials.out + (slot << params.log_group) * kHeadDim +
                         row / 8 * 8 * kHeadDim + (row % 8 * 4 + quad) * 8;
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
      uint32_t words[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int i = (chunk * 4 + n) * 4 + r * 2;
        const __nv_bfloat162 pair = __floats2bfloat162_rn(o[i], o[i + 1]);
        words[n] = *reinterpret_cast<const uint32_t*>(&pair);
      }
      store_16(out + chunk * chunk_stride, make_uint4(words[0], words[1], words[2], words[3]),
               policy);
    }
    if (quad == 0) {
      params.partials.state[(slot << params.log_group) + row] = make_float2(maximum[r], sum[r]);
    }
  }
}

__device__ __forceinline__ bool is_wild(uint32_t pair) {  // NaN or Inf in one of two bfloat16
  return (pair & 0x7f80u) == 0x7f80u || (pair & 0x7f800000u) == 0x7f800000u;
}

__device__ __forceinline__ uint32_t without_wild(uint32_t pair) {  // NaN and Inf as 0
  if ((pair & 0x7f80u) == 0x7f80u) pair &= 0xffff0000u;
  if ((pair & 0x7f800000u) == 0x7f800000u) pair &= 0xffffu;
  return pair;
}

// Zeroes what of V must not meet a weight of 0: rows at or past `written`, and NaN and Inf, whose
// rows it notes in `wild`. By all consumers.
__device__ __forceinline__ void clean_values(uint8_t* v, int32_t written, uint32_t* wild) {
  constexpr int kRowVectors = 8;  // 16-byte vectors of half a row
  for (int i = threadIdx.x; i < kBlock * kRowVectors * 2; i += kConsumers * 128) {
    const int half = i / (kBlock * kRowVectors), row = i / kRowVectors % kBlock;
    uint4* vector = reinterpret_cast<uint4*>(v + half * (kPageBytes / 2) + row * 128) + i % 8;
    const uint4 bits = *vector;
    if (row >= written) {
      *vector = make_uint4(0, 0, 0, 0);
    } else if (is_wild(bits.x) || is_wild(bits.y) || is_wild(bits.z) || is_wild(bits.w)) {
      atomicOr(&wild[row / 32], 1u << row % 32);
      *vector = make_uint4(without_wild(bits.x), without_wild(bits.y), without_wild(bits.z),
                           without_wild(bits.w));
    }
  }
  fence_async_proxy();
  named_barrier(1, kConsumers * 128);
}

// Adds what clean_values took out to the rows that see it: their result is NaN or Inf, as it should
// be.
template <DType kCache>
__device__ __forceinline__ void add_wild_values(const PagedView& v_cache, int32_t page,
                                                int32_t head, const uint32_t* wild,
                                                const int32_t (&valid)[2], Accumulator& o) {
  const int quad = threadIdx.x % 4;
  for (int word = 0; word < kBlock / 32; ++word) {
    for (uint32_t left = wild[word]; left != 0; left &= left - 1) {
      const int row = word * 32 + __ffs(left) - 1;
      using Element = std::conditional_t<kIsFp8<kCache>, __nv_fp8_e4m3, __nv_bfloat16>;
      const Element* values = static_cast<const Element*>(v_cache.data) +
                              page * v_cache.page_stride + head * v_cache.head_stride +
                              row * v_cache.token_stride + quad * 2;
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        const int r = i / 2 % 2;
        if (row < valid[r]) {
          const float value = static_cast<float>(values[i / 4 * 8 + i % 2]);
          if (!isfinite(value)) o[i] += value;
        }
      }
    }
  }
}

// s = Q K^T: 64 query rows by the 128 keys of a page, both in shared memory as two halves of D; q
// and k are bytes from the bases. Added to a base before the call, they cost other registers.
template <bool kFloat16 = false>
__device__ __forceinline__ void multiply_q_k(uint64_t q_base, uint32_t q, uint64_t k_base,
                                             uint32_t k, Accumulator& s) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int half = step / 4, within = step % 4 * 32;
    const uint64_t a = advance(q_base, q + half * 1024 + within);
    const uint64_t b = advance(k_base, k + half * (kPageBytes / 2) + within);
    if constexpr (kFloat16) {
      multiply_ss_float16(a, b, s, step > 0);
    } else {
      multiply_ss(a, b, s, step > 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  hold(s);
}

// o = P V, or o += P V with `add`: the softmax's weights, packed in the order of the accumulator,
// by the 128 values of a page.
template <DType kCache>
__device__ __forceinline__ void multiply_p_v(const uint32_t (&p)[32], uint64_t v_base, uint32_t v,
                                             Accumulator& o, bool add) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kBlock / 16; ++step) {
    const uint32_t a[4] = {p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3]};
    if constexpr (kIsFp8<kCache>) {
      multiply_rs_float16(a, advance(v_base, v + step * 2048), o, add || step > 0);
    } else {
      multiply_rs(a, advance(v_base, v + step * 2048), o, add || step > 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  hold(o);
}

// Short calls, by each consumer warp: its partial results of heads [first, end) are written.
template <DType kCache>
__device__ __forceinline__ void end_heads(const KVBlockParams& params,
                                          SharedStorage<kCache>& shared, int32_t first,
                                          int32_t end) {
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  __threadfence_block();
  for (int32_t head = first; head < end; ++head) {
    if (atomicAdd(&shared.warps_done[head], 1u) + 1 < kConsumers * 4) continue;
    fence_gpu();
    atomicAdd(params.ended_heads + head, 1u);
  }
}

template <DType kCache>
__device__ __forceinline__ void consume(const KVBlockParams& params, SharedStorage<kCache>& shared,
                                        int consumer) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int first_stage = consumer * kQStagesPerConsumer;
  // Swizzled tiles of 64 d: 8 rows are 1024 bytes, both halves of 8 rows of q 2048.
  const uint64_t q_base = make_descriptor(shared_address(shared.q[first_stage]), 16, 2048);
  const uint64_t k_base = make_descriptor(shared_address(shared.k[0]), 16, 1024);
  const uint64_t v_base = make_descriptor(shared_address(shared.v[0]), kPageBytes / 2, 1024);

  RingPosition<kItemPlaces> place;
  RingPosition<kKVStages> kv;
  RingPosition<kQStagesPerConsumer> ring;
  uint32_t first = consumer;  // first_tile() of the item
  int32_t head = 0;           // those before have ended
  while (true) {
    barrier_wait(&shared.item_full[place.stage], place.phase);
    const WorkItem item = shared.items[place.stage];
    if (params.ended_heads != nullptr) {
      int32_t end = head;
      if (is_last(item)) {
        end = params.num_heads;
      } else if (item.by_head) {
        end = item.head;
      }
      if (head < end) end_heads(params, shared, head, end);
      head = end;
    }
    if (is_last(item)) return;
    place.advance();
    const uint32_t tiles = count_tiles(params, item);
    barrier_wait(&shared.k_full[kv.stage], kv.phase);
    float scale_log2 = params.scale_log2;
    if constexpr (kIsFp8<kCache>) {  // V is cleaned where it is converted
      scale_log2 = shared.conversion.scale_log2[kv.stage];
    } else if (item.masked) {
      barrier_wait(&shared.v_full[kv.stage], kv.phase);
      clean_values(shared.v[kv.stage], item.written, shared.wild[kv.stage]);
    }

    for (uint32_t tile = first; tile < tiles; tile += kConsumers) {
      const bool releases = lane == 0 && tile + kConsumers >= tiles;
      const int stage = first_stage + ring.stage;
      barrier_wait(&shared.q_full[stage], ring.phase);
      Row rows[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int token = (warp * 16 + lane / 4 + 8 * r) >> params.log_group;
        rows[r] = {shared.slots[stage][token], shared.valid[stage][token]};
      }

      Accumulator s;
      multiply_q_k(q_base, ring.stage * kQTileBytes, k_base, kv.stage * kPageBytes, s);
      if (lane == 0) barrier_arrive(&shared.q_empty[stage]);
      if (releases) barrier_arrive(&shared.k_empty[kv.stage]);
      ring.advance();

      uint32_t p[32];
      float maximum[2], sum[2];
      softmax<kCache>(s, rows, scale_log2, p, maximum, sum);
      barrier_wait(&shared.v_full[kv.stage], kv.phase);

      Accumulator o;
      multiply_p_v<kCache>(p, v_base, kv.stage * kPageBytes, o, false);
      if (item.masked) {
        const int32_t valid[2] = {rows[0].valid, rows[1].valid};
        add_wild_values<kCache>(params.v_cache, item.page, item.head, shared.wild[kv.stage], valid,
                                o);
        __syncwarp();
      }
      if (releases) barrier_arrive(&shared.v_empty[kv.stage]);
      store_partial(params, rows, o, maximum, sum);
    }
    if (first >= tiles) {  // no tile, but every phase
      barrier_arrive_warp(&shared.k_empty[kv.stage]);
      barrier_wait(&shared.v_full[kv.stage], kv.phase);
      barrier_arrive_warp(&shared.v_empty[kv.stage]);
    }
    first = first_tile(first, tiles);
    kv.advance();
  }
}

template <DType kCache>
__global__ void __launch_bounds__(kThreads, 1)
    msa_sparse_prefill_kv_block_sm90_kernel(const __grid_constant__ KVBlockParams params,
                                            const __grid_constant__ CUtensorMap q_map,
                                            const __grid_constant__ CUtensorMap k_map,
                                            const __grid_constant__ CUtensorMap v_map) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<kCache>*>(shared_memory);
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&q_map);
    prefetch_tensor_map(&k_map);
    prefetch_tensor_map(&v_map);
    for (int place = 0; place < kItemPlaces; ++place) {
      barrier_init(&shared.item_full[place], 1);
      barrier_init(&shared.item_empty[place], kConsumers);
    }
    barrier_init(&shared.first_tiles, kConsumers);
    for (uint32_t& warps : shared.warps_done) warps = 0;
    for (int stage = 0; stage < kKVStages; ++stage) {
      barrier_init(&shared.k_full[stage], kKVFullArrivals<kCache>);
      barrier_init(&shared.v_full[stage], kKVFullArrivals<kCache>);
      barrier_init(&shared.k_empty[stage], kKVEmptyArrivals);
      barrier_init(&shared.v_empty[stage], kKVEmptyArrivals);
    }
    for (int stage = 0; stage < kQStages; ++stage) {
      barrier_init(&shared.q_full[stage], 1);
      barrier_init(&shared.q_empty[stage], kQEmptyArrivals);
    }
    if constexpr (kIsFp8<kCache>) {
      for (int stage = 0; stage < kKVStages; ++stage) {
        barrier_init(&shared.conversion.k_landed[stage], 1);
        barrier_init(&shared.conversion.v_landed[stage], 1);
      }
    }
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_kernel();
  if (params.ended_heads != nullptr) start_next_kernel();  // where CTAs have left

  // A warp's index through a shuffle, so that the compiler knows it is the same in all its lanes.
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0);
  if (warp >= kConsumers * 4) {
    lower_registers<kProducerRegisters>();
    if (warp == kConsumers * 4) {
      produce_kv(params, &k_map, &v_map, shared);
    } else {
      produce_q(params, &q_map, shared, warp - kConsumers * 4 - 1);
    }
  } else {
    raise_registers<kConsumerRegisters>();
    consume(params, shared, warp / 4);
  }
}

}  // namespace msa::sparse_prefill::sm90
