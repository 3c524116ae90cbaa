// Step 0, write_cache: the keys, values and index keys of new tokens into their slots.
//
//   cache[slot / 128, head, slot % 128] = k[t, head], v and index_k likewise; a slot outside the
//   cache skips its token. An FP8 cache stores round(k / scale), to nearest even, saturated at
//   +-448; any other cache has the dtype of its input and gets its bits.
//
// Portable: every GPU from sm_80 on. Bound by memory: every number is read once and written once.
//
// Grid      a CTA takes `group` consecutive tokens (chosen on the host: enough CTAs for a small
//           call, enough loads in flight for a large one).
// Roles     all threads alike. A unit is 16 bytes of one input row, a token has
//           2 * Hkv * kRowVectors of K and V and index_vectors of the index key.
// Registers kUnroll loads of a thread are under way before its first store, beside their slots.
// Next      the launch of the scores may set itself up beside this one (sm_90).
// Limits    two tokens with the same slot: either may win. 16-byte aligned rows (checked on the
//           host); 64-bit offsets.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "device/common.cuh"
#include "device/dependent_launch.cuh"
#include "device/vector_io.cuh"
#include "step0_write/write_cache_params.h"

namespace msa::write_cache::sm80 {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;

struct WriteGrid {
  int32_t group;          // tokens of a CTA
  int32_t token_vectors;  // units of a token
  int32_t index_vectors;  // of them, of the index key
  int32_t index_size;     // bytes of an element of index_k
  int32_t num_kv_heads;
};

// A pair of floats to two e4m3 bytes.
__device__ __forceinline__ uint32_t to_e4m3(float a, float b) {
  return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
}

template <typename Element>
__device__ __forceinline__ void store_e4m3(uint8_t* target, const uint4& bits, float scale) {
  constexpr int kElements = Vector16<Element>::kElements;
  float values[kElements];
  Vector16<Element>::to_float(bits, values);
  uint32_t words[kElements / 4];
#pragma unroll
  for (int word = 0; word < kElements / 4; ++word) {
    words[word] = to_e4m3(values[4 * word] / scale, values[4 * word + 1] / scale) |
                  to_e4m3(values[4 * word + 2] / scale, values[4 * word + 3] / scale) << 16;
  }
  if constexpr (kElements == 8) {
    *reinterpret_cast<uint2*>(target) = {words[0], words[1]};
  } else {
    *reinterpret_cast<uint32_t*>(target) = words[0];
  }
}

// Where a unit comes from and goes to. target is null where its token is skipped. What is loaded
// for it does not wait for its slot.
struct Unit {
  uint4 bits;
  uint8_t* target;
  float scale;
  bool index;
};

template <typename Element, bool kQuantise>
__device__ __forceinline__ Unit find_unit(const WriteCacheParams& params, const WriteGrid& grid,
                                          int64_t token, int32_t vector) {
  constexpr int kRowVectors = kHeadDim * int{sizeof(Element)} / 16;
  constexpr int kStoredSize = kQuantise ? 1 : int{sizeof(Element)};
  Unit unit{{}, nullptr, 1.0f, false};
  const int64_t slot = params.slot_mapping[token * params.slot_stride];
  const int32_t kv_vectors = grid.num_kv_heads * kRowVectors;
  unit.index = vector >= 2 * kv_vectors;
  const bool is_v = vector >= kv_vectors;
  const RowsView& rows = unit.index ? params.index_k : is_v ? params.v : params.k;
  const PagedView& cache = unit.index ? params.index_k_cache
                           : is_v     ? params.v_cache
                                      : params.k_cache;
  int32_t head = 0, column = vector - 2 * kv_vectors;
  if (!unit.index) {
    const int32_t within = is_v ? vector - kv_vectors : vector;
    head = within / kRowVectors;
    column = within % kRowVectors;
    if (kQuantise) unit.scale = scale_of(is_v ? params.v_scale : params.k_scale, head);
  }
  const int64_t size = unit.index ? grid.index_size : int{sizeof(Element)};
  const int64_t stored = unit.index ? grid.index_size : kStoredSize;
  unit.bits = *reinterpret_cast<const uint4*>(
      static_cast<const uint8_t*>(rows.data) +
      (token * rows.token_stride + head * rows.head_stride) * size + column * 16);
  if (slot < 0 || slot / kBlock >= params.k_cache.num_pages) return unit;
  unit.target = static_cast<uint8_t*>(cache.data) +
                (slot / kBlock * cache.page_stride + head * cache.head_stride +
                 slot % kBlock * cache.token_stride) *
                    stored +
                column * (16 * stored / size);
  return unit;
}

template <typename Element, bool kQuantise>
__global__ void __launch_bounds__(kThreads)
    msa_write_cache_sm80_kernel(const __grid_constant__ WriteCacheParams params,
                                const WriteGrid grid) {
  start_next_kernel();
  const int64_t first_token = static_cast<int64_t>(blockIdx.x) * grid.group;
  const int32_t tokens =
      static_cast<int32_t>(min(static_cast<int64_t>(grid.group), params.num_tokens - first_token));
  const int32_t units = tokens * grid.token_vectors;
  for (int32_t first = threadIdx.x; first < units; first += kThreads * kUnroll) {
    Unit unit[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int32_t place = first + i * kThreads;
      unit[i].target = nullptr;
      if (place < units) {
        unit[i] = find_unit<Element, kQuantise>(
            params, grid, first_token + place / grid.token_vectors, place % grid.token_vectors);
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (!unit[i].target) continue;
      if (!kQuantise || unit[i].index) {
        *reinterpret_cast<uint4*>(unit[i].target) = unit[i].bits;
      } else {
        store_e4m3<Element>(unit[i].target, unit[i].bits, unit[i].scale);
      }
    }
  }
}

}  // namespace msa::write_cache::sm80
