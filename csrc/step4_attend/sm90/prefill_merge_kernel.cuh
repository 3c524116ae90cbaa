// Step 4, sparse_prefill, last part of tiles that are not query-major: the partial results of each
// (token, head) -> its result.
//
//   M = max over its slots of m;  w = 2^(m - M);  out = sum w o / sum w l
//   lse = (M + log2(sum w l)) / log2(e)
//
// Bound by memory: every slot is read once.
// Grid      persistent, a CTA 16 rows (token, g) of a tile and turn, a warp half the columns of
//           8 rows, a lane 16 columns of one, in the order the partials were stored in: 16-byte
//           loads, 512 contiguous bytes a warp.
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
  int32_t round;      // the tiles that this launch finishes
  ScaleView k_scale;  // of FP8 caches
};

constexpr int kMergeWarps = 4;
constexpr int kMergeCtas = 4;                // on an SM
constexpr int kMergeChunks = 2;              // of 32 columns, that a warp merges
constexpr int kMergeBatch = 8;               // slots whose loads are in flight together
constexpr int kRowWarps = 4 / kMergeChunks;  // that share rows

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

// Eight rows of a head, the first of them `first_row`, and kMergeChunks chunks of their columns, by
// a warp; row = token * G + g.
template <DType kCache>
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
  const int32_t first_slot = mine ? plan.first_slot[unit] : 0;
  const int most = __reduce_max_sync(kAllLanes, count);

  // The lanes of a row have its slots by turns.
  const float2* state = params.partials.state + (int64_t{first_slot} << params.log_group) + g;
  float largest = -INFINITY;
#pragma unroll 1
  for (int first = 0; first < most; first += 16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int slot = first + 4 * i + quad;
      if (slot < count) largest = fmaxf(largest, state[slot << params.log_group].x);
    }
  }
  largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
  // No logit above -inf: -inf - (-inf) would be NaN, so weigh against 0; all weights are 0.
  const float reference = largest == -INFINITY ? 0.0f : largest;

  // Bytes from the first slot's: partial results of a round are far fewer than 4 GiB.
  const uint32_t slot_bytes = 2 * kHeadDim << params.log_group;
  const uint32_t chunk_bytes = min(group, 8) * 64;
  const uint32_t partial = static_cast<uint32_t>(first_slot) * slot_bytes +
                           g / 8 * (8 * 2 * kHeadDim) + first_chunk * chunk_bytes +
                           (g % 8 * 4 + quad) * 16;
  float total = 0.0f;
  float sums[kMergeChunks * 8] = {};
#pragma unroll 1
  for (int first = 0; first < most; first += kMergeBatch) {
    uint4 bits[kMergeBatch][kMergeChunks];
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i) {
      if (first + i < count) {
        const uint32_t slot = partial + (first + i) * slot_bytes;
#pragma unroll
        for (int chunk = 0; chunk < kMergeChunks; ++chunk) {
          bits[i][chunk] = __ldcs(
              reinterpret_cast<const uint4*>(reinterpret_cast<const uint8_t*>(params.partials.out) +
                                             (slot + chunk * chunk_bytes)));
        }
      }
    }
    float weights[kMergeBatch / 4];
#pragma unroll
    for (int i = 0; i < kMergeBatch / 4; ++i) {
      const int slot = first + 4 * i + quad;
      const float2 max_sum =
          slot < count ? state[slot << params.log_group] : make_float2(-INFINITY, 0.0f);
      weights[i] = exp2_fast(max_sum.x - reference);
      total = fmaf(weights[i], max_sum.y, total);
    }
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i) {
      const float weight = __shfl_sync(kAllLanes, weights[i / 4], i % 4, 4);
      if (first + i >= count) continue;
#pragma unroll
      for (int chunk = 0; chunk < kMergeChunks; ++chunk) {
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
  for (int chunk = 0; chunk < kMergeChunks; ++chunk) {
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

template <DType kCache>
__global__ void __launch_bounds__(kMergeWarps * 32, kMergeCtas)
    msa_sparse_prefill_merge_sm90_kernel(const __grid_constant__ FinishParams params) {
  constexpr uint32_t kRows = kMergeWarps / kRowWarps * 8;
  wait_for_previous_kernel();
  const PrefillPlan& plan = params.plan;
  const auto tiles = static_cast<uint32_t>(plan.sizes.tiles);
  const auto tile_tokens = static_cast<uint32_t>(plan.sizes.tile_tokens);
  const uint32_t rows = tile_tokens << params.log_group;
  const uint32_t parts = (rows + kRows - 1) / kRows;  // of a tile
  const uint32_t warp = threadIdx.x / 32;
  // Short calls have no tile arrays.
  const bool all_tiles = !plan.sizes.query_major && plan.sizes.rounds == 1;
  for_units(
      static_cast<int32_t>(params.num_kv_heads * tiles * parts),
      [&](uint32_t unit) {
        return all_tiles || (in_round(params, unit / parts) && plan.tile_blocks[unit / parts] == 0);
      },
      [&](uint32_t unit) {
        const uint32_t tile = unit / parts;
        const uint32_t row = unit % parts * kRows + warp / kRowWarps * 8;
        if (row < rows) {
          merge_rows<kCache>(params, tile / tiles, tile % tiles * rows + row,
                             warp % kRowWarps * kMergeChunks);
        }
      });
}

}  // namespace msa::sparse_prefill::sm90
