// Step 4, sparse_prefill, last part of tiles that are not query-major: the partial results of each
// (token, head) -> its result.
//
//   M = max over its slots of m;  w = 2^(m - M);  out = sum w o / sum w l
//   lse = (M + log2(sum w l)) / log2(e)
//
// A batch of slots at a time, running: M grows, and the sums shrink with it. Bound by memory: every
// slot is read once. In short calls a token has K places for its slots, so that they are read
// beside its count, which says how many hold anything.
// Grid      persistent, a CTA 8 rows (token, g) of a tile and turn, a warp a chunk of 32 of their
//           columns, a lane a quarter of that of one row, in the order the partials were stored in:
//           16-byte loads, 512 contiguous bytes a warp. 8 slots in flight a warp and 6 CTAs an SM,
//           so that some warps load while others add.
#pragma once

#include <cuda_runtime.h>

#include "device/common.cuh"
#include "device/dependent_launch.cuh"
#include "device/positions.cuh"
#include "step4_attend/sm90/prefill_kv_block_kernel.cuh"

namespace msa::sparse_prefill::sm90 {

// What the kernels that write results take.
struct TileParams {
  BatchView batch;
  PagedView v_cache;
  RowsView out;  // [T, Hq, D] bfloat16
  LseView lse;
  float scale_log2;
  int64_t num_kv_heads;
  int32_t log_group;  // log2(G)
  ScaleView v_scale;  // of FP8 caches
};

struct FinishParams : TileParams {
  Partials partials;
  PrefillPlan plan;
  int32_t round;        // the tiles that this launch finishes
  ScaleView k_scale;    // of FP8 caches
  int32_t fixed_slots;  // places of each (head, token) in a short call, K of them; else 0
  int32_t kv_ctas;      // of the KV-block-major kernel beside which a short call merges; else 0
};

constexpr int kMergeWarps = 4;  // one a chunk of 32 columns
constexpr int kMergeCtas = 6;   // on an SM
constexpr int kMergeBatch = 8;  // slots whose loads are in flight together; shows in the bits
static_assert(kMergeWarps * 32 == kHeadDim);

// Of four lanes with four words each, lane q gets word q of all of them, in the order of the lanes.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int quad) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
#pragma unroll
    for (int low = 0; low < 4; ++low) {
      if (low & bit) continue;
      const bool upper = quad & bit;
      const uint32_t received =
          __shfl_xor_sync(0xffffffffu, upper ? words[low] : words[low + bit], bit);
      if (upper) {
        words[low] = received;
      } else {
        words[low + bit] = received;
      }
    }
  }
}

// Does this launch finish the tile?
__device__ __forceinline__ bool in_round(const FinishParams& params, int64_t tile) {
  return params.plan.tile_round[tile] == params.round;
}

// Calls visit(unit) for the units of work that pass, in order, of those that this CTA takes. Whole
// warps: their lanes look at 32 units at a time, since a launch may have few or none of them.
template <typename Passes, typename Visit>
__device__ __forceinline__ void for_units(int32_t num_units, const Passes& passes,
                                          const Visit& visit) {
  const int lane = threadIdx.x % 32;
  for (int32_t first = blockIdx.x; first < num_units; first += 32 * gridDim.x) {
    const int64_t mine = first + static_cast<int64_t>(lane) * gridDim.x;
    uint32_t left = __ballot_sync(0xffffffffu, mine < num_units && passes(mine));
    while (left != 0) {
      const int next = __ffs(left) - 1;
      left &= left - 1;
      visit(static_cast<int32_t>(first + next * gridDim.x));
    }
  }
}

// What a sum of weighted values is multiplied with to be a result. A sum of 0: nothing to attend
// to. NaN stays NaN.
template <DType kCache>
__device__ __forceinline__ float normaliser(const TileParams& params, int32_t head, float sum) {
  if constexpr (kIsFp8<kCache>) {
    return sum == 0.0f ? 0.0f : scale_of(params.v_scale, head) / sum;
  } else {
    return sum == 0.0f ? 0.0f : 1.0f / sum;
  }
}

// Eight rows of a head, the first of them `first_row`, and a chunk of their columns, by a warp;
// row = token * G + g.
template <DType kCache>
__device__ __forceinline__ void merge_rows(const FinishParams& params, int64_t head,
                                           int32_t first_row, int32_t chunk) {
  constexpr int kBatch = kMergeBatch;
  const PrefillPlan& plan = params.plan;
  const int lane = threadIdx.x % 32, quad = lane % 4, group = 1 << params.log_group;
  const int32_t row = first_row + lane / 4;
  const int32_t g = row & (group - 1);
  const int64_t token = row >> params.log_group;
  const bool mine = token < plan.num_tokens;
  const int64_t unit = head * plan.num_tokens + token;
  const int count = mine ? static_cast<int>(plan.leftovers[unit]) : 0;
  uint32_t first_slot = ~0u;
  int limit, most;  // slots that may be read
  if (params.fixed_slots > 0) {
    if (mine) first_slot = static_cast<uint32_t>(unit) * params.fixed_slots;
    limit = mine ? params.fixed_slots : 0;
    most = params.fixed_slots;
  } else {
    const uint32_t listed = mine ? plan.first_slot[unit] : 0;
    if (count > 0) first_slot = listed;
    limit = count;
    most = __reduce_max_sync(kAllLanes, count);
  }

  const float2* state = params.partials.state + (int64_t{first_slot} << params.log_group) + g;
  // Bytes from the warp's first slot: its rows are of one chunk, whose slots follow each other.
  const uint32_t slot_bytes = 2 * kHeadDim << params.log_group;
  const uint32_t warp_slot = __reduce_min_sync(kAllLanes, first_slot);
  const uint8_t* const slots =
      reinterpret_cast<const uint8_t*>(params.partials.out) + int64_t{warp_slot} * slot_bytes;
  const uint32_t chunk_bytes = min(group, 8) * 64;
  const uint32_t partial = (first_slot - warp_slot) * slot_bytes + g / 8 * (8 * 2 * kHeadDim) +
                           chunk * chunk_bytes + (g % 8 * 4 + quad) * 16;
  float largest = -INFINITY, reference = 0.0f, total = 0.0f;
  float sums[8] = {};
#pragma unroll 1
  for (int first = 0; first < most; first += kBatch) {
    uint4 bits[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < limit) {
        const uint32_t slot = partial + (first + i) * slot_bytes;
        bits[i] = __ldcs(reinterpret_cast<const uint4*>(slots + slot));
      }
    }
    const float before = largest;
    float2 states[kBatch / 4];
#pragma unroll
    for (int i = 0; i < kBatch / 4; ++i) {
      const int slot = first + 4 * i + quad;
      states[i] = make_float2(-INFINITY, 0.0f);
      if (slot < limit) states[i] = state[slot << params.log_group];
    }
#pragma unroll
    for (int i = 0; i < kBatch / 4; ++i) {
      if (first + 4 * i + quad >= count) states[i] = make_float2(-INFINITY, 0.0f);
      largest = fmaxf(largest, states[i].x);
    }
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
    // No logit above -inf: -inf - (-inf) would be NaN, so weigh against 0; all weights are 0.
    reference = largest == -INFINITY ? 0.0f : largest;
    if (first > 0) {
      const float factor = exp2_fast(before - reference);  // 0 as long as there was no logit
      total *= factor;
#pragma unroll
      for (float& sum : sums) sum *= factor;
    }
    float weights[kBatch / 4];
#pragma unroll
    for (int i = 0; i < kBatch / 4; ++i) {
      weights[i] = exp2_fast(states[i].x - reference);
      total = fmaf(weights[i], states[i].y, total);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float weight = __shfl_sync(kAllLanes, weights[i / 4], i % 4, 4);
      if (first + i >= count) continue;
      const uint32_t words[4] = {bits[i].x, bits[i].y, bits[i].z, bits[i].w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        sums[2 * n] += weight * __uint_as_float(words[n] << 16);
        sums[2 * n + 1] += weight * __uint_as_float(words[n] & 0xffff0000u);
      }
    }
  }
  total += __shfl_xor_sync(kAllLanes, total, 1);
  total += __shfl_xor_sync(kAllLanes, total, 2);

  const float normalise = normaliser<kCache>(params, static_cast<int32_t>(head), total);
  const int64_t q_head = (head << params.log_group) + g;
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(params.out.data) +
                       token * params.out.token_stride + q_head * params.out.head_stride;
  uint32_t words[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const __nv_bfloat162 pair =
        __floats2bfloat162_rn(sums[2 * n] * normalise, sums[2 * n + 1] * normalise);
    words[n] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  transpose_quad(words, quad);
  if (mine) {
    *reinterpret_cast<uint4*>(out + chunk * 32 + quad * 8) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
  if (mine && quad == 0 && chunk == 0 && params.lse.data != nullptr) {
    constexpr float kLn2 = 0.69314718055994530942f;
    params.lse.data[token * params.lse.token_stride + q_head * params.lse.head_stride] =
        total == 0.0f ? -INFINITY : (reference + log2f(total)) * kLn2;
  }
}

// Short calls: CTAs draw units, head after head, and wait until all partial results of a head are
// there. The KV-block-major kernel is still running, all of it, so the wait ends.
template <typename Merge>
__device__ __forceinline__ void merge_as_heads_end(const FinishParams& params, uint32_t head_units,
                                                   const Merge& merge) {
  __shared__ uint32_t units[2];
  const PrefillPlan& plan = params.plan;
  const uint32_t num_units = static_cast<uint32_t>(params.num_kv_heads) * head_units;
  uint32_t drawn = 0, ended = 0;  // heads that are known to have ended
  if (threadIdx.x == 0) drawn = fetch_and_increment(plan.merge_tickets);
  for (uint32_t turn = 0;; ++turn) {
    if (threadIdx.x == 0) {
      units[turn % 2] = drawn;
      if (drawn < num_units) {
        const uint32_t head = drawn / head_units;
        if (head >= ended) wait_for_count(plan.ended_heads + head, params.kv_ctas);
        ended = head + 1;
        drawn = fetch_and_increment(plan.merge_tickets);
      }
    }
    __syncthreads();
    const uint32_t unit = units[turn % 2];
    if (unit >= num_units) return;
    merge(unit);
  }
}

template <DType kCache>
__global__ void __launch_bounds__(kMergeWarps * 32, kMergeCtas)
    msa_sparse_prefill_merge_sm90_kernel(const __grid_constant__ FinishParams params) {
  constexpr uint32_t kRows = 8;  // of a unit
  const PrefillPlan& plan = params.plan;
  const auto tiles = static_cast<uint32_t>(plan.sizes.tiles);
  const auto tile_tokens = static_cast<uint32_t>(plan.sizes.tile_tokens);
  const uint32_t rows = tile_tokens << params.log_group;
  const uint32_t parts = (rows + kRows - 1) / kRows;  // of a tile
  const auto merge = [&](uint32_t unit) {
    const uint32_t tile = unit / parts;
    merge_rows<kCache>(params, tile / tiles, tile % tiles * rows + unit % parts * kRows,
                       static_cast<int32_t>(threadIdx.x / 32));
  };
  if (params.kv_ctas > 0) {
    merge_as_heads_end(params, tiles * parts, merge);
    wait_for_previous_kernel();  // so that this kernel's end is that of the one before, too
    return;
  }
  wait_for_previous_kernel();
  // Short calls have no tile arrays.
  const bool all_tiles = !plan.sizes.query_major && plan.sizes.rounds == 1;
  for_units(
      static_cast<int32_t>(params.num_kv_heads * tiles * parts),
      [&](uint32_t unit) {
        return all_tiles || (in_round(params, unit / parts) && plan.tile_blocks[unit / parts] == 0);
      },
      merge);
}

}  // namespace msa::sparse_prefill::sm90
