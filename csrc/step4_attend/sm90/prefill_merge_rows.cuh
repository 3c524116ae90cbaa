// Step 4, sparse_prefill: eight rows' partial results become results, by a warp.
#pragma once

#include <cuda_runtime.h>

#include "device/common.cuh"
#include "device/positions.cuh"
#include "step4_attend/sm90/prefill_kv_block_tile.h"

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
  int32_t dealt, first_heads;
  int32_t fixed_slots;  // places of each (head, token) in a short call, K of them; else 0
  bool batch_invariant;
};

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

// Eight rows of a head, the first of them `first_row`, and kChunks chunks of their columns, by a
// warp; row = token * G + g. The loads of kBatch slots are in flight together.
template <DType kCache, int kChunks, int kBatch>
__device__ __forceinline__ void merge_rows(const FinishParams& params, int64_t head,
                                           int32_t first_row, int32_t first_chunk) {
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
                           first_chunk * chunk_bytes + (g % 8 * 4 + quad) * 16;
  float largest = -INFINITY, reference = 0.0f, total = 0.0f;
  float sums[kChunks * 8] = {};
#pragma unroll 1
  for (int first = 0; first < most; first += kBatch) {
    uint4 bits[kBatch][kChunks];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i < limit) {
        const uint32_t slot = partial + (first + i) * slot_bytes;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          bits[i][chunk] =
              __ldcs(reinterpret_cast<const uint4*>(slots + (slot + chunk * chunk_bytes)));
        }
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
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const uint32_t words[4] = {bits[i][chunk].x, bits[i][chunk].y, bits[i][chunk].z,
                                   bits[i][chunk].w};
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          sums[chunk * 8 + 2 * n] += weight * __uint_as_float(words[n] << 16);
          sums[chunk * 8 + 2 * n + 1] += weight * __uint_as_float(words[n] & 0xffff0000u);
        }
      }
    }
  }
  total += __shfl_xor_sync(kAllLanes, total, 1);
  total += __shfl_xor_sync(kAllLanes, total, 2);

  const float normalise = normaliser<kCache>(params, static_cast<int32_t>(head), total);
  const int64_t q_head = (head << params.log_group) + g;
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(params.out.data) +
                       token * params.out.token_stride + q_head * params.out.head_stride;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    uint32_t words[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(sums[chunk * 8 + 2 * n] * normalise,
                                                        sums[chunk * 8 + 2 * n + 1] * normalise);
      words[n] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    transpose_quad(words, quad);
    if (mine) {
      *reinterpret_cast<uint4*>(out + (first_chunk + chunk) * 32 + quad * 8) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
  if (mine && quad == 0 && first_chunk == 0 && params.lse.data != nullptr) {
    constexpr float kLn2 = 0.69314718055994530942f;
    params.lse.data[token * params.lse.token_stride + q_head * params.lse.head_stride] =
        total == 0.0f ? -INFINITY : (reference + log2f(total)) * kLn2;
  }
}

}  // namespace msa::sparse_prefill::sm90
