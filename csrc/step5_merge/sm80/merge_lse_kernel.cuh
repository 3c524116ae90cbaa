// Step 5, merge_lse: P attention results over disjoint keys -> the result over all of them.
//
//   m   = max over p of lse[p]
//   w_p = exp(lse[p] - m)            0 where lse[p] = -inf: that part is left out, and not read
//   out = sum over p of w_p * outs[p] / sum over p of w_p,   lse = m + log(sum over p of w_p)
//
// Portable: every GPU from sm_80 on. Bound by memory: each part is read once, nothing is reused.
//
// Grid      persistent. Rows (token, head) in memory order of out; a tile of rows a warp and turn,
//           tiles dealt round robin.
// Roles     all warps alike. A group of D / kElements lanes holds one row, 16 bytes a lane:
//           16 lanes of bfloat16, two groups a warp; 32 lanes of float32, one group. A group takes
//           kEntries = 16 entries at a time, an entry being one part of one row: 16 / kSegment
//           rows of up to kSegment parts, or, where P > 16, 16 parts of one row.
// Registers lane e (mod 16) of a group holds LSE, weight and addresses of the group's entry e.
// Shared    kStages x [entry][lane] 16 bytes a warp (8 KiB a stage). A lane reads only what it
//           copied itself, so no barrier is needed, and no bank conflicts arise.
// Barriers  none; each lane waits for its own cp.async groups, one a stage.
// Timeline  unit = 16 entries:   LSEs of u + 2 -> registers
//                                entries of u + 1 -> shared memory (those with keys)
//                                wait for u; max, weights, sum by shuffles; add; store
//           so both latencies, the LSEs' and the entries', lie under another unit's work.
// Order     fixed by P alone, so the result is the same bits every time.
// Limits    D = kHeadDim, 16-byte aligned rows (checked on the host), fewer than 2^31 rows; 64-bit
//           offsets.
#pragma once

#include <cuda_runtime.h>

#include "device/common.cuh"
#include "device/sm80_async_copy.cuh"
#include "device/vector_io.cuh"
#include "step5_merge/merge_lse_params.h"

namespace msa::merge_lse::sm80 {

constexpr int kWarps = 4;
constexpr int kEntries = 16;
constexpr int kStages = 2;  // 128 KiB in flight an SM at two CTAs; docs/kernels/merge_lse.md
constexpr int kSharedBytes = kWarps * kStages * kEntries * 32 * 16;
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

template <typename T>
__device__ __forceinline__ T* shuffle_pointer(T* pointer, int entry) {
  return reinterpret_cast<T*>(
      __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(pointer), entry, kEntries));
}

// What a lane knows of its entry.
template <typename Element>
struct Entry {
  float lse;          // -inf: no keys, or no such row or part
  const Element* in;  // the part's row
  Element* out;       // the result's row, null past the last row
  float* out_lse;
};

template <typename Element, int kSegment>
struct MergeWarp {
  using Vector = Vector16<Element>;
  static constexpr int kElements = Vector::kElements;
  static constexpr int kGroups = 32 * kElements / kHeadDim;
  static constexpr int kRows = kEntries / kSegment;  // rows of a group and unit
  static constexpr int kTileRows = kGroups * kRows;

  const MergeLseParams& params;
  uint32_t shared;  // this lane's 16 bytes of entry 0, stage 0
  int lane, group, entry, column;

  __device__ __forceinline__ Entry<Element> load_entry(uint32_t tile, int64_t chunk) const {
    const uint32_t num_heads = static_cast<uint32_t>(params.num_heads);
    const uint32_t num_rows = static_cast<uint32_t>(params.num_tokens) * num_heads;
    const uint32_t row = tile * kTileRows + entry / kSegment * kGroups + group;
    const int64_t part = chunk * kEntries + entry % kSegment;
    Entry<Element> result{-INFINITY, nullptr, nullptr, nullptr};
    if (row >= num_rows) return result;
    const int64_t token = row / num_heads, head = row % num_heads;
    result.out = static_cast<Element*>(params.out.data) + token * params.out.token_stride +
                 head * params.out.head_stride;
    result.out_lse =
        params.lse.data + token * params.lse.token_stride + head * params.lse.head_stride;
    if (part >= params.num_parts) return result;
    const MergePart& view = params.parts[params.stacked ? 0 : part];
    const int64_t stacked_part = params.stacked ? part : 0;
    result.in = static_cast<const Element*>(view.out) + token * view.out_token_stride +
                head * view.out_head_stride + stacked_part * params.out_part_stride;
    result.lse = view.lse[token * view.lse_token_stride + head * view.lse_head_stride +
                          stacked_part * params.lse_part_stride];
    return result;
  }

  __device__ __forceinline__ void copy_entries(const Entry<Element>& mine, int stage) const {
    const Element* source = mine.lse == -INFINITY ? nullptr : mine.in;
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      const Element* row = shuffle_pointer(source, e);
      if (row) copy_async_16(shared + (stage * kEntries + e) * 32 * 16, row + column);
    }
    commit_async_copies();
  }

  __device__ __forceinline__ void add_entry(int stage, int e, float weight,
                                            float (&sums)[kElements]) const {
    uint4 bits;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "r"(shared + (stage * kEntries + e) * 32 * 16));
    float values[kElements];
    Vector::to_float(bits, values);
#pragma unroll
    for (int i = 0; i < kElements; ++i) sums[i] += weight * values[i];
  }

  __device__ __forceinline__ void run() const {
    const uint32_t num_rows = static_cast<uint32_t>(params.num_tokens * params.num_heads);
    const uint32_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
    const int64_t num_chunks =
        kSegment < kEntries ? 1 : (params.num_parts + kEntries - 1) / kEntries;
    const uint32_t first = blockIdx.x * kWarps + threadIdx.x / 32, step = gridDim.x * kWarps;

    // A unit is (tile, chunk); past the last tile its entries are empty.
    uint32_t tile = first, ahead_tile = first;
    int64_t chunk = 0, ahead_chunk = 0;
    const auto load_ahead = [&] {
      const Entry<Element> loaded = load_entry(min(ahead_tile, num_tiles), ahead_chunk);
      if (++ahead_chunk == num_chunks) ahead_chunk = 0, ahead_tile += step;
      return loaded;
    };
    Entry<Element> current = load_ahead();
    Entry<Element> next = load_ahead();
    copy_entries(current, 0);

    float running_max = -INFINITY, running_sum = 0.0f;
    float sums[kElements] = {};
    int stage = 0;
    while (tile < num_tiles) {
      const Entry<Element> after_next = load_ahead();
      copy_entries(next, stage ^ 1);

      float new_max = max_or_nan(running_max, current.lse);
#pragma unroll
      for (int distance = kSegment / 2; distance > 0; distance /= 2) {
        new_max = max_or_nan(new_max, __shfl_xor_sync(kAllLanes, new_max, distance));
      }
      // No keys so far: -inf - (-inf) would be NaN, so weigh against 0: all weights are 0.
      const float reference = new_max == -INFINITY ? 0.0f : new_max;
      const float weight = exp2f((current.lse - reference) * kLog2E);
      const float rescale = exp2f((running_max - reference) * kLog2E);
      float sum = weight;
#pragma unroll
      for (int distance = kSegment / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, distance);
      }
      running_max = new_max;
      running_sum = running_sum * rescale + sum;
      const bool last_chunk = chunk + 1 == num_chunks;
      const float normalise =
          running_sum > 0.0f || running_sum != running_sum ? 1.0f / running_sum : 0.0f;

      wait_async_copies<kStages - 1>();
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (kSegment == kEntries) {
          const float row_rescale = __shfl_sync(kAllLanes, rescale, 0, kEntries);
#pragma unroll
          for (int i = 0; i < kElements; ++i) sums[i] *= row_rescale;
        }
#pragma unroll
        for (int e = r * kSegment; e < (r + 1) * kSegment; ++e) {
          const float entry_weight = __shfl_sync(kAllLanes, weight, e, kEntries);
          if (entry_weight != 0.0f) add_entry(stage, e, entry_weight, sums);
        }
        Element* out = shuffle_pointer(current.out, r * kSegment);
        const float row_normalise = __shfl_sync(kAllLanes, normalise, r * kSegment, kEntries);
        if (last_chunk) {
#pragma unroll
          for (int i = 0; i < kElements; ++i) sums[i] *= row_normalise;
          if (out) *reinterpret_cast<uint4*>(out + column) = Vector::from_float(sums);
#pragma unroll
          for (int i = 0; i < kElements; ++i) sums[i] = 0.0f;
        }
      }
      if (last_chunk) {
        if (entry % kSegment == 0 && lane % (32 / kGroups) < kEntries && current.out) {
          *current.out_lse = new_max == -INFINITY ? -INFINITY : new_max + log2f(running_sum) * kLn2;
        }
        running_max = -INFINITY;
        running_sum = 0.0f;
      }

      current = next;
      next = after_next;
      stage ^= 1;
      if (++chunk == num_chunks) chunk = 0, tile += step;
    }
    wait_async_copies<0>();
  }
};

template <typename Element, int kSegment>
__global__ void __launch_bounds__(kWarps * 32)
    msa_merge_lse_sm80_kernel(const __grid_constant__ MergeLseParams params) {
  using Warp = MergeWarp<Element, kSegment>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  constexpr int kRowLanes = 32 / Warp::kGroups;
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory)) +
                      (warp * kStages * kEntries * 32 + lane) * 16;
  Warp{params, shared, lane, lane / kRowLanes, lane % kEntries, lane % kRowLanes * Warp::kElements}
      .run();
}

}  // namespace msa::merge_lse::sm80
