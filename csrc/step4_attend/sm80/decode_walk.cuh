// Step 4, sparse_decode and paged_decode: the G query heads of one token and KV head attend to the
// blocks of their row, split over warps and CTAs. What sm80/ and sm90/ have in common: the walk
// over the keys, and how parts are merged and stored.
//
//   s = scale * q . K^T, tokens past pos masked;  m' = max(m, max s);  p = exp(s - m')
//   l = l * exp(m - m') + sum p;  o = o * exp(m - m') + p V;  out = o / l;  lse = m + log(l)
//
// Grid      (token, KV head) x splits. The tokens of a request, which share most blocks, run side
//           by side and find them in L2. The warps of all splits of a unit take turns at the row's
//           slices: 16 tokens of a block (32 of an FP8 cache), K and V.
// Roles     all W warps alike (4), each its own producer: no barrier but the one before the merge.
//           Hopper's cluster kernel (sm90/decode_cluster_kernel.cuh) has a walk of its own.
// Registers q as 16 rows (G heads, the last one repeated); o of 16 x 128; page, first token and
//           number of tokens of the warp's next 32 slices, one a lane.
// Shared    ring    W warps x 3 stages x (K 4096, V 4096)   98,304 at W 4; layout: decode_slice.cuh
//           o       W warps x 16 rows x 136 floats, over each warp's own part of the ring
//           state   W warps x 16 rows (m, l)
//           valid   W warps x 3 stages: tokens of the slice that count
// Barriers  __syncthreads once, between the last slice and the merge of the warps.
// Timeline  position, ids and scales | pages and q | 3 slices fetched, then for each slice:
//           wait K | S = Q K^T | softmax | wait V | O += P V | fetch K and V of slice + 3. Two
//           cp.async groups a slice, in this order. K and V of a token, which lie side by side in
//           interleaved pools, are asked for together: apart, they would be two visits to a row of
//           the memory, of 128 bytes each of FP8.
// Unseen    tokens past pos and slices of blocks that do not count: zero-filled by the copy, which
//           then reads nothing, and masked, or not looked at. No poison comes near a product.
// Order     slice i belongs to warp i % (W * splits) of the unit, which adds its own in ascending
//           order; warps, then splits, are merged in ascending order: the same bits every time,
//           wherever the token stands.
// Limits    q bfloat16, D = 128, G <= 16; caches bfloat16, or e4m3 (to float16 in registers,
//           exactly; P is float16 then). At W 4 97 KB of shared memory: one CTA an SM on sm_86, two
//           on sm_90.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "device/common.cuh"
#include "device/dependent_launch.cuh"
#include "device/positions.cuh"
#include "device/shared_memory.cuh"
#include "device/sm80_async_copy.cuh"
#include "step4_attend/decode_plan.h"
#include "step4_attend/sm80/decode_slice.cuh"

namespace msa::decode::sm80 {

template <int kWarpCount>
struct SharedStorage {
  static constexpr int kWarps = kWarpCount, kThreads = kWarps * 32;
  alignas(1024) uint8_t ring[kWarps][kStages][2][kPartBytes];
  float2 state[kWarps][kRows];
  int32_t valid[kWarps][kStages];
};
static_assert(kRows * kOStride * 4 <= kStages * 2 * kPartBytes, "o lies in the ring");

// The row of keys that a token walks.
struct KeyRow {
  int32_t request;
  int32_t pos;
  int32_t visible;  // blocks
  int32_t blocks;   // entries of ids, or pages of the table, that may count
};

template <bool kSparse>
__device__ __forceinline__ PositionGuess guess_row(const DecodeParams& params, int32_t token) {
  const BatchView& batch = params.attend.batch;
  if (kSparse || batch.cu_seqlens_q != nullptr) {
    return guess_position(batch, guess_request(batch, token, params.tokens_each));
  }
  PositionGuess guess;  // a row is a request
  guess.request = token;
  load_if(true, batch.seq_lens + token * batch.seq_lens_stride, guess.length);
  return guess;
}

template <bool kSparse>
__device__ __forceinline__ KeyRow find_row(const DecodeParams& params, int32_t token,
                                           const PositionGuess& guess) {
  const BatchView& batch = params.attend.batch;
  TokenPosition where;
  if (kSparse || batch.cu_seqlens_q != nullptr) {
    where = find_position_by_warp(batch, token, guess);
  } else {
    where = {token, max(guess.length, 0) - 1};
  }
  if (where.request < 0) return {0, -1, 0, 0};
  if (!kSparse) {  // a row longer than its table ends where the table ends
    const int32_t length =
        where.request == guess.request ? max(guess.length, 0) : seq_len_of(batch, where.request);
    const int64_t table_end = batch.max_pages * kBlock;
    if (length > table_end) where.pos -= length - static_cast<int32_t>(table_end);
  }
  const int32_t visible = visible_blocks(batch, where.pos);
  return {where.request, where.pos, visible,
          kSparse ? min(visible, static_cast<int32_t>(params.ids.topk)) : visible};
}

template <bool kSparse>
__device__ __forceinline__ KeyRow find_row(const DecodeParams& params, int32_t token) {
  return find_row<kSparse>(params, token, guess_row<kSparse>(params, token));
}

// What to copy of a slice: its first `valid` tokens, the first of them token `first` of the page.
struct SliceTokens {
  int32_t page, first;
  int32_t valid;  // 0: nothing of the slice counts
};

// The slices of a warp: every `turn`-th of its unit's. Looked up 32 at a time, one a lane; kFew:
// there are no more.
template <typename Element, bool kSparse, bool kFew = false>
struct WarpSlices {
  using S = Slice<Element>;
  const DecodeParams& params;
  int64_t head;
  int32_t token, first_slice, turn;
  KeyRow row;
  int32_t count;  // of the unit
  // Of a lane's slice; `tokens`: SliceTokens' first and valid in one word.
  struct Source {
    int32_t page, tokens;
  };
  static constexpr int kValidBits = 8;
  static constexpr int32_t kValidMask = (1 << kValidBits) - 1;
  Source ahead, after;  // of the 32 at hand, and of the next 32

  __device__ __forceinline__ uint32_t slice_of(int32_t index) const {
    return static_cast<uint32_t>(first_slice + index * turn);
  }
  __device__ __forceinline__ int32_t slot_of(int32_t index) const {
    return static_cast<int32_t>(slice_of(index) / S::kPerBlock);
  }
  __device__ __forceinline__ bool has(int32_t index) const {
    return first_slice + index * turn < count;
  }
  __device__ __forceinline__ LoadingId id_of(int32_t slot) const {
    if (!kSparse) return {};
    const auto topk = static_cast<int32_t>(params.ids.topk);
    return start_load_id(params.ids, head, token, slot, slot < topk);
  }
  __device__ __forceinline__ int32_t block_of(int32_t index, const LoadingId& id) const {
    return kSparse ? id.low : slot_of(index);
  }

  // Where the row is; id_of() needs no position and may have been asked for beside it.
  __device__ __forceinline__ void find(const PositionGuess& guess) {
    row = find_row<kSparse>(params, token, guess);
    count = row.blocks * S::kPerBlock;
    after = {};
  }
  // Source::tokens of a slice whose block is on a page of the cache.
  __device__ __forceinline__ int32_t tokens_of(int32_t index, const LoadingId& id) const {
    const auto first = static_cast<int32_t>(slice_of(index) % S::kPerBlock) * S::kTokens;
    const bool counts = slot_of(index) < row.blocks && (!kSparse || is_visible(id, row.visible));
    // Without a sign: an id that does not count may be any number.
    const auto block = static_cast<uint32_t>(block_of(index, id));
    const auto left = static_cast<int32_t>(row.pos + 1 - block * kBlock - first);
    const int32_t valid = min(S::kTokens, left);
    return first << kValidBits | (counts ? max(valid, 0) : 0);
  }
  __device__ __forceinline__ int32_t page_of_counting(int32_t tokens, int32_t block) const {
    return (tokens & kValidMask) == 0 ? -1 : page_of(params.attend.batch, row.request, block);
  }
  __device__ __forceinline__ Source source_of(int32_t tokens, int32_t page) const {
    if (int64_t{static_cast<uint32_t>(page)} >= params.attend.k_cache.num_pages) return {};
    return {page, tokens};
  }
  __device__ __forceinline__ Source look_up(int32_t index, const LoadingId& id) const {
    const int32_t tokens = tokens_of(index, id);
    return source_of(tokens, page_of_counting(tokens, block_of(index, id)));
  }
  // The first 32; lane_id: id_of(slot_of(lane)).
  __device__ __forceinline__ void look_up(const LoadingId& lane_id, const PositionGuess& guess) {
    find(guess);
    ahead = look_up(threadIdx.x % 32, lane_id);
  }

  // Slice `index` of the warp; asked for one after the other.
  __device__ __forceinline__ SliceTokens get(int32_t index) {
    if (!kFew && index % 32 == 0) {
      if (index != 0) ahead = after;
      const int32_t next = index + 32 + threadIdx.x % 32;
      after = look_up(next, id_of(slot_of(next)));
    }
    const int32_t page = __shfl_sync(kAllLanes, ahead.page, index % 32);
    const int32_t tokens = __shfl_sync(kAllLanes, ahead.tokens, index % 32);
    return {page, tokens >> kValidBits, tokens & kValidMask};
  }
};

// How a lane copies K or V of a slice: 8 vectors, 32 / kVectors rows apart. kVForAll: V for all
// warps, which read it by ldmatrix whatever its type, and 0 in whole where nothing of it counts.
template <typename Element, bool kVForAll = false>
struct LaneCopy {
  using S = Slice<Element>;
  static constexpr int kStepRows = 32 / S::kVectors;
  const AttendParams& params;
  const Element* k;  // of the KV head, at the lane's vector of its first row
  const Element* v;
  int row;
  uint32_t k_place, v_place;  // in a part

  __device__ __forceinline__ LaneCopy(const AttendParams& params, int64_t head) : params(params) {
    const int lane = threadIdx.x % 32, vector = lane % S::kVectors;
    row = lane / S::kVectors;
    const auto first_of = [&](const PagedView& cache) {
      return static_cast<const Element*>(cache.data) + head * cache.head_stride +
             row * cache.token_stride + vector * (16 / static_cast<int>(sizeof(Element)));
    };
    k = first_of(params.k_cache);
    v = first_of(params.v_cache);
    k_place = row * S::kRowBytes + (vector ^ row % 2 * 4) * 16;
    v_place = row * S::kRowBytes + (vector ^ (S::kFp8 && !kVForAll ? row / 2 * 2 : row)) * 16;
  }

  // place(i): where vector i goes.
  template <typename Place>
  __device__ __forceinline__ void copy(const Element* first, const PagedView& cache,
                                       const SliceTokens& tokens, const Place& place) const {
    const auto page = static_cast<uint32_t>(tokens.page),
               row_of_page = static_cast<uint32_t>(tokens.first);
    const Element* source = first + (page * cache.page_stride + row_of_page * cache.token_stride);
    const int left = tokens.valid - row;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      copy_async_16_or_zero(place(i), source, i * kStepRows < left);
      source += kStepRows * cache.token_stride;
    }
    commit_async_copies();
  }
  __device__ __forceinline__ void copy_k(uint32_t part, const SliceTokens& tokens) const {
    if (tokens.valid <= 0) return commit_async_copies();  // nobody will look at it
    copy(k, params.k_cache, tokens, [&](int i) { return part + k_place + i * 512; });
  }
  __device__ __forceinline__ void copy_v(uint32_t part, const SliceTokens& tokens) const {
    if (!kVForAll && tokens.valid <= 0) return commit_async_copies();  // nobody will look at it
    copy(v, params.v_cache, tokens, [&](int i) {
      const uint32_t turn = S::kFp8 ? i % 2 * 64 : i % 4 * 32;  // the rest of the row's swizzle
      return (part + v_place + i * 512) ^ turn;
    });
  }
};

// o / l of the G rows, and their LSE. A lane's columns: 4 lane and on; kApart: 16 (lane / 4) +
// 2 (lane % 4), the next, and both again 8 further on.
template <bool kApart = false>
__device__ __forceinline__ void store_result(const AttendParams& params, int64_t token,
                                             int64_t head, int row, float4 o, float maximum,
                                             float sum, float v_scale) {
  const int lane = threadIdx.x % 32;
  const float normalise = sum == 0.0f ? 0.0f : __fdividef(v_scale, sum);  // a NaN stays one
  const int64_t q_head = head * params.group_size + row;
  const __nv_bfloat162 low = __floats2bfloat162_rn(o.x * normalise, o.y * normalise);
  const __nv_bfloat162 high = __floats2bfloat162_rn(o.z * normalise, o.w * normalise);
  auto* out = static_cast<__nv_bfloat16*>(params.out.data) + token * params.out.token_stride +
              q_head * params.out.head_stride;
  if constexpr (kApart) {
    auto* pairs = reinterpret_cast<__nv_bfloat162*>(out) + lane / 4 * 8 + lane % 4;
    pairs[0] = low;
    pairs[4] = high;
  } else {
    reinterpret_cast<uint2*>(out)[lane] = make_uint2(*reinterpret_cast<const uint32_t*>(&low),
                                                     *reinterpret_cast<const uint32_t*>(&high));
  }
  if (lane == 0 && params.lse.data != nullptr) {
    params.lse.data[token * params.lse.token_stride + q_head * params.lse.head_stride] =
        sum == 0.0f ? -INFINITY : (maximum + log2f(sum)) * kLn2;
  }
}

// Merges `count` parts of a row, at most kMost, ascending, by a warp: 4 columns of o a lane.
// state(part) gives (m, l), value(part) the lane's columns. All loads are under way together.
template <int kMost, typename State, typename Value>
__device__ __forceinline__ float4 merge_parts(int count, const State& state, const Value& value,
                                              float& maximum, float& sum) {
  float2 states[kMost];
  maximum = -INFINITY;
#pragma unroll
  for (int part = 0; part < kMost; ++part) {
    states[part] = part < count ? state(part) : make_float2(-INFINITY, 0.0f);
  }
#pragma unroll
  for (int part = 0; part < kMost; ++part) maximum = fmaxf(maximum, states[part].x);
  const float reference = reference_of(maximum);
  float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  sum = 0.0f;
#pragma unroll
  for (int part = 0; part < kMost; ++part) {
    const float weight = exp2_fast(states[part].x - reference);  // 0 past the last
    const float4 columns = part < count ? value(part) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    sum += weight * states[part].y;
    o.x += weight * columns.x;
    o.y += weight * columns.y;
    o.z += weight * columns.z;
    o.w += weight * columns.w;
  }
  return o;
}

// The walk of a warp over its slices; its result lies in shared memory afterwards.
template <typename Element, bool kSparse, int kWarps>
__device__ __forceinline__ void walk_slices(const DecodeParams& params,
                                            SharedStorage<kWarps>& shared, int64_t head,
                                            int32_t token, int32_t split) {
  using S = Slice<Element>;
  const AttendParams& attend = params.attend;
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0);
  // Position and ids do not wait for each other, nor do pages and q, which the compiler waits for
  // where they are loaded.
  const PositionGuess guess = guess_row<kSparse>(params, token);
  WarpSlices<Element, kSparse> slices{params, head, token, split * kWarps + warp,
                                      params.splits * kWarps};
  const LoadingId lane_id = slices.id_of(slices.slot_of(lane));
  const float k_scale = load_scale(attend.k_scale, head);
  slices.look_up(lane_id, guess);
  Query<Element> query;
  query.load(attend.q, token, head * attend.group_size, attend.group_size);

  const LaneCopy<Element> copy(attend, head);
  SliceTokens next;  // to be copied
  const uint32_t ring = shared_address(shared.ring[warp]);
  for (int stage = 0; stage < kStages; ++stage) {
    const uint32_t k = ring + stage * 2 * kPartBytes, v = k + kPartBytes;
    next = slices.get(stage);
    if (lane == 0) shared.valid[warp][stage] = next.valid;
    copy.copy_k(k, next);
    copy.copy_v(v, next);
  }

  Rows<Element> rows;
  rows.clear();
  query.prepare(attend.scale * k_scale * kLog2E);
  int stage = 0;
#pragma unroll 1
  for (int32_t index = 0; slices.has(index); ++index) {
    // Behind the group that a wait is for: V, K and V of 2 slices; or K and V of 2 slices.
    wait_async_copies<2 * kStages - 1>();
    __syncwarp();
    const int slice_valid = shared.valid[warp][stage];
    const uint32_t k = ring + stage * 2 * kPartBytes, v = k + kPartBytes;
    float s[S::kColumns][4];
    uint32_t p[S::kColumns][2];
    if (slice_valid > 0) {
      score(query, k, s);
      float factor[2];
      rows.softmax(s, slice_valid, query.scale, p, factor);
      if (__any_sync(kAllLanes, any_shrinks(factor))) rows.shrink(factor);
    }
    wait_async_copies<2 * kStages - 2>();
    __syncwarp();
    if (slice_valid > 0) rows.add_values(v, p);
    __syncwarp();
    next = slices.get(index + kStages);
    if (lane == 0) shared.valid[warp][stage] = next.valid;
    copy.copy_k(k, next);
    copy.copy_v(v, next);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  wait_async_copies<0>();
  __syncwarp();
  rows.store(reinterpret_cast<float*>(shared.ring[warp]), shared.state[warp]);
}

// Row `row` of what the CTA's warps found.
template <int kWarps>
__device__ __forceinline__ float4 merge_warps(const SharedStorage<kWarps>& shared, int row,
                                              float& maximum, float& sum) {
  const int lane = threadIdx.x % 32;
  return merge_parts<kWarps>(
      kWarps, [&](int part) { return shared.state[part][row]; },
      [&](int part) {
        const float* o = reinterpret_cast<const float*>(shared.ring[part]) + row * kOStride;
        return reinterpret_cast<const float4*>(o)[lane];
      },
      maximum, sum);
}

}  // namespace msa::decode::sm80
