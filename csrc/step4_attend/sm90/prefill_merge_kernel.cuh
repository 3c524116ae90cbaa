// Step 4, sparse_prefill, last part of tiles that are not query-major: the partial results of each
// (token, head) -> its result.
//
//   M = max over its slots of m;  w = 2^(m - M);  out = sum w o / sum w l
//   lse = (M + log2(sum w l)) / log2(e)
//
// A batch of slots at a time, running: M grows, and the sums shrink with it. Bound by memory: every
// slot is read once. In short calls a token has K places for its slots, so that they are read
// beside its count, which says how many hold anything.
// Grid      persistent, a CTA 8 or 16 rows (token, g) of a tile and turn, a warp 1 or 2 chunks of
//           32 columns of 8 rows, a lane a quarter of that of one, in the order the partials were
//           stored in: 16-byte loads, 512 contiguous bytes a warp.
#pragma once

#include <cuda_runtime.h>

#include "device/common.cuh"
#include "device/dependent_launch.cuh"
#include "device/positions.cuh"
#include "step4_attend/sm90/prefill_kv_block_kernel.cuh"
#include "step4_attend/sm90/prefill_merge_rows.cuh"

namespace msa::sparse_prefill::sm90 {

constexpr int kMergeWarps = 4;
constexpr int kMergeCtas = 4;  // on an SM

// Does this launch finish the tile?
__device__ __forceinline__ bool in_round(const FinishParams& params, int64_t tile) {
  return params.plan.tile_round[tile] == params.round;
}

// Calls visit(unit) for the units of work that pass, in order, of those that this CTA takes. Whole
// warps: their lanes look at 32 units at a time, since a launch may have few or none of them.
template <typename Passes, typename Visit>
__device__ __forceinline__ void for_units(int32_t cta, int32_t num_units, const Passes& passes,
                                          const Visit& visit) {
  const int lane = threadIdx.x % 32;
  for (int32_t first = cta; first < num_units; first += 32 * gridDim.x) {
    const int64_t mine = first + static_cast<int64_t>(lane) * gridDim.x;
    uint32_t left = __ballot_sync(0xffffffffu, mine < num_units && passes(mine));
    while (left != 0) {
      const int next = __ffs(left) - 1;
      left &= left - 1;
      visit(static_cast<int32_t>(first + next * gridDim.x));
    }
  }
}

// Calls merge(head, first row, which of the warps that share it) for the units of this launch.
template <int kSharing, typename Merge>
__device__ __forceinline__ void for_merge_rows(const FinishParams& params, const Merge& merge) {
  constexpr uint32_t kRows = kMergeWarps / kSharing * 8;
  const PrefillPlan& plan = params.plan;
  const auto tiles = static_cast<uint32_t>(plan.sizes.tiles);
  const auto tile_tokens = static_cast<uint32_t>(plan.sizes.tile_tokens);
  const uint32_t rows = tile_tokens << params.log_group;
  const uint32_t parts = (rows + kRows - 1) / kRows;  // of a tile
  const uint32_t warp = threadIdx.x / 32;
  // Short calls have no tile arrays.
  const bool all_tiles = !plan.sizes.query_major && plan.sizes.rounds == 1;
  const uint32_t cta = params.dealt > 0 ? blockIdx.x % params.dealt * (gridDim.x / params.dealt) +
                                              blockIdx.x / params.dealt
                                        : blockIdx.x;
  uint32_t first_head = 0;
  if (params.first_heads > 0 && plan.first_part[1] > 0) first_head = params.first_heads;
  for_units(
      cta, static_cast<int32_t>(params.num_kv_heads * tiles * parts),
      [&](uint32_t unit) {
        return all_tiles || (in_round(params, unit / parts) && plan.tile_blocks[unit / parts] == 0);
      },
      [&](uint32_t unit) {
        const uint32_t tile = unit / parts;
        const uint32_t row = unit % parts * kRows + warp / kSharing * 8;
        if (tile / tiles < first_head) return;
        if (row < rows) merge(tile / tiles, tile % tiles * rows + row, warp % kSharing);
      });
}

template <DType kCache>
__global__ void __launch_bounds__(kMergeWarps * 32, kMergeCtas)
    msa_sparse_prefill_merge_sm90_kernel(const __grid_constant__ FinishParams params) {
  wait_for_previous_kernel();
  // Short calls gain by more loads of fewer columns in flight. How many slots are summed at a time
  // shows in the bits: not where these must be those of a long call.
  if (params.fixed_slots > 0 && !params.batch_invariant) {
    for_merge_rows<4>(params, [&](uint32_t head, uint32_t row, uint32_t part) {
      merge_rows<kCache, 1, 16>(params, head, row, part);
    });
  } else {
    for_merge_rows<2>(params, [&](uint32_t head, uint32_t row, uint32_t part) {
      merge_rows<kCache, 2, 8>(params, head, row, part * 2);
    });
  }
}

}  // namespace msa::sparse_prefill::sm90
