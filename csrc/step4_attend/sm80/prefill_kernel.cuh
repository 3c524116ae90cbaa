// Step 4, sparse_prefill, portable: a tile of tokens walks the blocks that any of its tokens
// selected, ascending, in one running softmax. One launch, no workspace, no atomics on results.
//
//   for each block of the tile and each of its rows whose token selected it:
//     s = scale * q . K^T, tokens past pos masked;  m' = max(m, max s);  p = exp(s - m')
//     l = l * exp(m - m') + sum p;  o = o * exp(m - m') + p V
//   out = o / l;  lse = m + log(l)
//
// Grid      one CTA a (KV head, tile of 64 / G consecutive tokens), tiles of a head together: its
//           K and V stay in L2 while they run.
// Roles     four warps alike, 16 rows = 16 / G tokens each. All of them copy and, where need be,
//           convert; a warp none of whose tokens selected a block leaves its products out. Each
//           warp walks the tile's ids for itself: lane i holds tokens i and i + 32, the next block
//           is the least of those that they stand at.
// Shared    name    layout                                                bytes
//           units   3 x [64 keys][128 d] bfloat16, see prefill_units.cuh  49,152
//                   (FP8 caches: 2 x the same and 2 x [64 keys][128 d] e4m3)
//           wild    3 x a bit for each row of a unit of V                     24
//           halves  3 x what each warp knows of its half block               144
//           heads, scale                                                      20
//           tokens  [64 / G] position and sorted ids                         140 each
//           In all 49,968 at G 16: two CTAs on an SM with 100 KB, three with 164 KB.
// Barriers  __syncthreads() once a unit. A thread waits for its own copies of the unit, and mends
//           or converts them; behind the barrier the unit is whole, and the one before it is free
//           for the copies of the unit after the next.
// Timeline  a turn is half a block, a unit of K and one of V; the last 64 keys are left out where
//           no token of the tile sees them
//             barrier  K0              V0        K1              V1
//             copies   K1              V1        K2              V2
//             warps    S = Q K0, soft- O += P V  S = Q K1, soft- O += P V
//                      max, O *=                 max, O *=
// Order     a row meets its own blocks alone, ascending, each in two halves: its bits depend
//           neither on the rest of the tile nor on the order of its ids. Of a block that a row's
//           token did not select but one of the same warp did (G < 16), its weights are 0, its
//           factor is 1, and 0 is added.
// Unseen    of K: masked columns are replaced before use. Of V: 0 * NaN is NaN, so where a row has
//           weights 0 that it did not choose (the block is seen in part, or by part of the tile's
//           tokens), NaN and Inf are taken out of the unit before its use and added to the rows
//           that do see them.
// Registers 168, the limit of three CTAs on an SM: what can be worked out again or lie in shared
//           memory is not kept across a turn; within_loop() keeps the compiler from doing so.
// Limits    bfloat16 q, D = 128, G in {1, 2, 4, 8, 16}, K up to 32, fewer than 2^24 blocks (any
//           int32 position).
#pragma once

#include <cuda_runtime.h>

#include "device/positions.cuh"
#include "step4_attend/attend_params.h"
#include "step4_attend/sm80/prefill_units.cuh"

namespace msa::sparse_prefill::sm80 {

constexpr int kTurns = 3;
constexpr int kWarpRows = 16;
constexpr int kTileRows = kWarps * kWarpRows;
constexpr unsigned kAllLanes = 0xffffffffu;
// A key is a block of one of the tile's requests: the index of the request's first token in the
// tile, above the block's 24 bits.
constexpr int kBlockBits = 24;
constexpr uint32_t kNoKey = 0xffffffffu;

struct TileToken {
  TokenPosition position;
  uint32_t keys[kMaxTopk + 1];  // ascending, then kNoKey, one at least
};

// Half a block, 64 keys: what the CTA attends to in one turn, as a warp sees it.
struct HalfBlock {
  static constexpr uint32_t kLast = 1u << 29;        // the block's last 64 keys, not its first
  static constexpr uint32_t kLastIsSeen = 1u << 30;  // some token of the tile sees its last 64 keys
  static constexpr uint32_t kLookForWild = 1u << 31;  // see Unseen

  int32_t block;  // -1: there are no more
  int32_t page;
  uint32_t flags;  // bit i: token i of this warp selected it; and the above

  __device__ __forceinline__ int half() const { return flags & kLast ? 1 : 0; }
  __device__ __forceinline__ bool ends_block() const {
    return (flags & (kLast | kLastIsSeen)) != kLastIsSeen;
  }
  __device__ __forceinline__ bool look_for_wild() const { return flags & kLookForWild; }
};

struct SharedStorage {
  alignas(kUnitRowBytes) uint8_t units[kRingBytes];
  WildRows wild[kTurns];
  const uint8_t* k_head;  // the KV head's part of the caches
  const uint8_t* v_head;
  HalfBlock halves[kTurns][kWarps];  // registers are short
  float scale_log2;                  // of q . k, times log2(e) and the scale of an FP8 cache
};
constexpr int shared_bytes(int tile_tokens) {
  return static_cast<int>(sizeof(SharedStorage)) +
         tile_tokens * static_cast<int>(sizeof(TileToken));
}
static_assert(2 * (shared_bytes(kTileRows / 16) + 1024) <= 100 * 1024, "two CTAs of G 16 an SM");
static_assert(shared_bytes(kTileRows) <= 99 * 1024, "one CTA on the smallest GPU");

// 2^x by the special-function unit alone; results under 2^-126 become 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ int32_t log_group_of(const SparseAttendParams& params) {
  return __ffs(static_cast<int>(within_loop(static_cast<uint32_t>(params.group_size)))) - 1;
}

// The ids of a token that count, ascending as keys; whole warp, lane i looks at entry i.
__device__ __forceinline__ void sort_ids(const SparseAttendParams& params, int32_t head,
                                         int32_t first_token, int32_t token, TileToken& sorted) {
  const int lane = threadIdx.x % 32;
  TokenPosition position{-1, -1};
  if (token < params.batch.num_tokens) position = find_position(params.batch, token);
  uint32_t key = kNoKey;
  if (position.request >= 0 && lane < params.ids.topk) {
    const int32_t block = selected_block(params.ids, params.batch, params.k_cache.num_pages,
                                         position, head, token, lane);
    const int32_t in_tile = max(0, first_token_of(params.batch, position.request) - first_token);
    if (block >= 0) key = static_cast<uint32_t>(in_tile) << kBlockBits | block;
  }
#pragma unroll
  for (int size = 2; size <= 32; size *= 2) {  // bitonic
#pragma unroll
    for (int stride = size / 2; stride > 0; stride /= 2) {
      const uint32_t other = __shfl_xor_sync(kAllLanes, key, stride);
      const bool keep_less = ((lane & size) == 0) == ((lane & stride) == 0);
      key = keep_less ? min(key, other) : max(key, other);
    }
  }
  sorted.keys[lane] = key;
  if (lane == 0) {
    sorted.keys[kMaxTopk] = kNoKey;
    sorted.position = position;
  }
}

// The blocks that the tile's tokens stand at; the same in all warps.
struct Walk {
  const TileToken* tokens;
  uint32_t next;  // entries that tokens lane (low half) and lane + 32 (high half) stand at

  __device__ __forceinline__ explicit Walk(const TileToken* tokens) : tokens(tokens), next(0) {}

  __device__ __forceinline__ HalfBlock take(const SparseAttendParams& params) {
    const int32_t log_group = log_group_of(params);
    const auto thread = static_cast<int32_t>(within_loop(threadIdx.x));
    const int32_t tile_tokens = kTileRows >> log_group, warp_tokens = kWarpRows >> log_group;
    uint32_t key[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = thread % 32 + 32 * i;
      key[i] = token < tile_tokens ? tokens[token].keys[next >> 16 * i & 0xffff] : kNoKey;
    }
    const uint32_t least = __reduce_min_sync(kAllLanes, min(key[0], key[1]));
    if (least == kNoKey) return {-1, 0, 0};
    HalfBlock result{static_cast<int32_t>(least & ((1u << kBlockBits) - 1)), 0, 0};
    const int32_t request = tokens[least >> kBlockBits].position.request;
    result.page = page_of(params.batch, request, result.block);
    const int32_t first_of_warp = thread / 32 * warp_tokens;
    bool second_half = false, look = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = thread % 32 + 32 * i;
      const bool member = key[i] == least;
      const uint32_t members = __ballot_sync(kAllLanes, member);
      if (first_of_warp / 32 == i) {
        result.flags = members >> first_of_warp % 32 & ((1u << warp_tokens) - 1);
      }
      if (member) {
        const int32_t seen = tokens[token].position.pos - result.block * kBlock;
        second_half |= seen >= kUnitKeys;
        look |= seen < kBlock - 1;
        next += 1u << 16 * i;
      } else {
        // With G = 16 a warp's rows are one token's; else rows of other tokens have weights 0.
        look |= log_group < 4 && token < tile_tokens;
      }
    }
    result.flags |= __any_sync(kAllLanes, second_half) ? HalfBlock::kLastIsSeen : 0;
    result.flags |= __any_sync(kAllLanes, look) ? HalfBlock::kLookForWild : 0;
    return result;
  }
};

// s = Q K^T: 16 rows by the 64 keys of a unit, 8 keys an s[n].
__device__ __forceinline__ void multiply_q_k(const uint32_t (&q)[kHeadDim / 16][4], uint32_t unit,
                                             float (&s)[kUnitKeys / 8][4]) {
  const uint32_t lane = within_loop(threadIdx.x) % 32;
  const uint32_t first =
      (unit + (lane % 8 + lane / 16 * 8) * kUnitRowBytes + (lane / 8 % 2 ^ lane % 8) * 16);
#pragma unroll
  for (auto& values : s) {
#pragma unroll
    for (float& value : values) value = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
    for (int pair = 0; pair < kUnitKeys / 16; ++pair) {
      uint32_t k[4];
      load_matrices(k, (first ^ step * 32) + pair * 16 * kUnitRowBytes);
      multiply_bf16(s[2 * pair], q[step], k[0], k[1]);
      multiply_bf16(s[2 * pair + 1], q[step], k[2], k[3]);
    }
  }
}

// o += P V: 16 rows by 128 d, 8 d an o[n]; a few columns after the other, so that few addresses are
// held at a time.
__device__ __forceinline__ void multiply_p_v(const uint32_t (&p)[kUnitKeys / 16][4], uint32_t unit,
                                             float (&o)[kHeadDim / 8][4]) {
  const uint32_t lane = within_loop(threadIdx.x) % 32;
  constexpr int kPairs = 2;
  const uint32_t first = (unit + lane % 16 * kUnitRowBytes + (lane / 16 ^ lane % 8) * 16);
#pragma unroll
  for (int group = 0; group < kHeadDim / 16; group += kPairs) {
#pragma unroll
    for (int step = 0; step < kUnitKeys / 16; ++step) {
#pragma unroll
      for (int pair = group; pair < group + kPairs; ++pair) {
        uint32_t v[4];
        load_matrices_transposed(v, (first ^ pair * 32) + step * 16 * kUnitRowBytes);
        multiply_bf16(o[2 * pair], p[step], v[0], v[1]);
        multiply_bf16(o[2 * pair + 1], p[step], v[2], v[3]);
      }
    }
  }
}

// What a thread keeps of its two rows, row and row + 8 of its warp's 16.
struct RunningRows {
  float maximum[2];  // log2 units, -inf: nothing yet
  float sum[2];      // of this thread's own columns
};

// s of a unit -> p, the running maximum and sum, and the factors that o shrinks by. valid: keys of
// the unit that each row may see, 0 or fewer where its token did not select the block.
__device__ __forceinline__ void running_softmax(float (&s)[kUnitKeys / 8][4],
                                                const int32_t (&valid)[2], float scale_log2,
                                                RunningRows& rows, uint32_t (&p)[kUnitKeys / 16][4],
                                                float (&factor)[2]) {
  const int quad = static_cast<int>(within_loop(threadIdx.x) % 4);
  if (scale_log2 <= 0.0f) {  // so that the largest product is the largest logit, and -inf stays
#pragma unroll
    for (auto& values : s) {
#pragma unroll
      for (float& value : values) value *= scale_log2;
    }
    scale_log2 = 1.0f;
  }
  if (valid[0] < kUnitKeys || valid[1] < kUnitKeys) {
#pragma unroll
    for (int n = 0; n < kUnitKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (n * 8 + quad * 2 + i % 2 >= valid[i / 2]) s[n][i] = -INFINITY;
      }
    }
  }
  float largest[2] = {-INFINITY, -INFINITY}, reference[2], sum[2] = {};
#pragma unroll
  for (const auto& values : s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) largest[i / 2] = fmaxf(largest[i / 2], values[i]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(kAllLanes, largest[r], 1));
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(kAllLanes, largest[r], 2));
    const float maximum = fmaxf(rows.maximum[r], largest[r] * scale_log2);
    // No logit above -inf: -inf - (-inf) would be NaN, so weigh against 0; all weights are 0.
    reference[r] = maximum == -INFINITY ? 0.0f : maximum;
    factor[r] = exp2_fast(rows.maximum[r] - reference[r]);
    rows.maximum[r] = maximum;
  }
#pragma unroll
  for (int n = 0; n < kUnitKeys / 8; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float first = exp2_fast(fmaf(s[n][2 * r], scale_log2, -reference[r]));
      const float second = exp2_fast(fmaf(s[n][2 * r + 1], scale_log2, -reference[r]));
      sum[r] += first + second;
      const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
      p[n / 2][n % 2 * 2 + r] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) rows.sum[r] = rows.sum[r] * factor[r] + sum[r];
}

__device__ __forceinline__ void store_row(const SparseAttendParams& params, int64_t token,
                                          int64_t q_head, float maximum, float sum, float v_scale,
                                          const float (&o)[kHeadDim / 8][4], int r) {
  constexpr float kLn2 = 0.69314718055994530942f;
  const int quad = threadIdx.x % 4;
  const float normalise = sum == 0.0f ? 0.0f : v_scale / sum;  // NaN stays NaN
  __nv_bfloat16* out = static_cast<__nv_bfloat16*>(params.out.data) +
                       token * params.out.token_stride + q_head * params.out.head_stride;
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n) {
    *reinterpret_cast<__nv_bfloat162*>(out + n * 8 + quad * 2) =
        __floats2bfloat162_rn(o[n][2 * r] * normalise, o[n][2 * r + 1] * normalise);
  }
  if (quad == 0 && params.lse.data != nullptr) {
    params.lse.data[token * params.lse.token_stride + q_head * params.lse.head_stride] =
        sum == 0.0f ? -INFINITY : (maximum + log2f(sum)) * kLn2;
  }
}

// The rows of a CTA: 16 a warp, G a token.
struct Tile {
  int32_t log_group, head, first_token;

  __device__ __forceinline__ explicit Tile(const SparseAttendParams& params) {
    log_group = log_group_of(params);
    const uint32_t cta = within_loop(blockIdx.x);
    const int32_t tile_tokens = kTileRows >> log_group;
    const auto num_tokens = static_cast<uint32_t>(params.batch.num_tokens);
    const uint32_t tiles = (num_tokens + tile_tokens - 1) / tile_tokens;
    head = static_cast<int32_t>(cta / tiles);
    first_token = static_cast<int32_t>(cta % tiles * tile_tokens);
  }
  // Of this thread's row r, 0 or 1.
  static __device__ __forceinline__ int row(int r) {
    const uint32_t thread = within_loop(threadIdx.x);
    return static_cast<int>(thread / 32 * kWarpRows + thread % 32 / 4 + 8 * r);
  }
  __device__ __forceinline__ int64_t token(int r) const {
    return first_token + (row(r) >> log_group);
  }
  __device__ __forceinline__ int64_t q_head(int r) const {
    return (head << log_group) + (row(r) & ((1 << log_group) - 1));
  }
};

// Keys of half a block that this thread's rows may see, 0 or fewer for those of tokens that did not
// select it.
__device__ __forceinline__ void count_valid(const TileToken* tokens,
                                            const SparseAttendParams& params, const HalfBlock& half,
                                            int32_t (&valid)[2]) {
  const int32_t log_group = log_group_of(params);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int in_warp = Tile::row(r) % kWarpRows >> log_group;
    const int32_t pos = tokens[Tile::row(r) >> log_group].position.pos;
    const int32_t seen = pos - half.block * kBlock - half.half() * kUnitKeys + 1;
    valid[r] = half.flags >> in_warp & 1 ? min(kUnitKeys, seen) : 0;
  }
}

// Adds the wild numbers of a unit of V, read again from the cache, to the rows that see them: their
// result is NaN or Inf, as it should be. first_row(page): the unit's first row.
template <DType kCache, typename FirstRow>
__device__ __forceinline__ void add_wild_numbers(const SparseAttendParams& params,
                                                 const TokenPosition& position, int32_t block,
                                                 WildRows wild, int32_t valid, int r,
                                                 const FirstRow& first_row,
                                                 float (&o)[kHeadDim / 8][4]) {
  if (valid <= 0) return;
  constexpr int kElementBytes = UnitRing<kCache>::kElementBytes;
  const uint8_t* first = first_row(page_of(params.batch, position.request, block));
  for (WildRows left = wild; left != 0; left &= left - 1) {
    const int row = __ffsll(static_cast<long long>(left)) - 1;
    if (row >= valid) break;
    const uint8_t* numbers = first + row * params.v_cache.token_stride * kElementBytes +
                             within_loop(threadIdx.x) % 4 * 2 * kElementBytes;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      o[n][2 * r] += wild_number<kCache>(numbers + n * 8 * kElementBytes);
      o[n][2 * r + 1] += wild_number<kCache>(numbers + (n * 8 + 1) * kElementBytes);
    }
  }
}

__device__ __forceinline__ float scale_of(const ScaleView& scale, int32_t head) {
  return scale.data ? scale.data[head * scale.head_stride] : scale.value;
}

template <DType kCache>
__global__ void __launch_bounds__(kThreads, 3)
    msa_sparse_prefill_sm80_kernel(const __grid_constant__ SparseAttendParams params) {
  using Ring = UnitRing<kCache>;
  constexpr bool kScaled = kCache == DType::kFloat8E4M3;
  extern __shared__ __align__(kUnitRowBytes) uint8_t shared_memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_memory);
  TileToken* const tokens = reinterpret_cast<TileToken*>(shared_memory + sizeof(SharedStorage));
  const Tile tile(params);

  for (int i = threadIdx.x / 32; i < kTileRows >> tile.log_group; i += kWarps) {
    sort_ids(params, tile.head, tile.first_token, tile.first_token + i, tokens[i]);
  }
  if (threadIdx.x == 0) {
    shared.wild[0] = 0;
    const PagedView &k = params.k_cache, &v = params.v_cache;
    shared.scale_log2 = params.scale * 1.44269504088896340736f;
    if (kScaled) shared.scale_log2 *= scale_of(params.k_scale, tile.head);
    shared.k_head =
        static_cast<const uint8_t*>(k.data) + tile.head * k.head_stride * Ring::kElementBytes;
    shared.v_head =
        static_cast<const uint8_t*>(v.data) + tile.head * v.head_stride * Ring::kElementBytes;
  }
  __syncthreads();

  uint32_t q[kHeadDim / 16][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const auto* source = static_cast<const __nv_bfloat16*>(params.q.data) +
                         tile.token(r) * params.q.token_stride +
                         tile.q_head(r) * params.q.head_stride + threadIdx.x % 4 * 2;
    const bool there = tile.token(r) < params.batch.num_tokens;
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      q[i / 2][i % 2 * 2 + r] = there ? *reinterpret_cast<const uint32_t*>(source + i * 8) : 0;
    }
  }
  const Ring ring{shared_address(shared.units)};
  const auto first_row = [&](const PagedView& cache, const uint8_t* head, int32_t page, int half) {
    return head +
           (page * cache.page_stride + half * kUnitKeys * cache.token_stride) * Ring::kElementBytes;
  };
  const auto copy = [&](const PagedView& cache, const uint8_t* head, const HalfBlock& half,
                        int stage) {
    if (half.block >= 0) {
      ring.copy(stage, first_row(cache, head, half.page, half.half()),
                cache.token_stride * Ring::kElementBytes);
    }
    commit_async_copies();
  };

  Walk walk(tokens);
  const auto half_of = [&](int turn) -> HalfBlock& {
    return shared.halves[within_loop(turn)][within_loop(threadIdx.x) / 32];
  };
  half_of(0) = walk.take(params);
  RunningRows rows{{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
  float o[kHeadDim / 8][4] = {};
  int turn = 0;
  copy(params.k_cache, shared.k_head, half_of(0), Ring::k_stage(0));
  copy(params.v_cache, shared.v_head, half_of(0), Ring::v_stage(0));
  while (half_of(turn).block >= 0) {
    const int next_turn = turn == kTurns - 1 ? 0 : turn + 1;
    if (half_of(turn).ends_block()) {
      half_of(next_turn) = walk.take(params);
    } else {
      const HalfBlock& first = half_of(turn);
      half_of(next_turn) = {first.block, first.page, first.flags | HalfBlock::kLast};
    }

    // K: of this thread's copies, all but the latest are there.
    wait_async_copies<1>();
    ring.finish_keys(Ring::k_stage(turn));
    __syncthreads();
    copy(params.k_cache, shared.k_head, half_of(next_turn), Ring::k_stage(next_turn));
    int32_t valid[2];
    count_valid(tokens, params, half_of(turn), valid);
    const bool taking_part = __any_sync(kAllLanes, valid[0] > 0 || valid[1] > 0);
    uint32_t p[kUnitKeys / 16][4];
    if (taking_part) {
      float s[kUnitKeys / 8][4], factor[2];
      multiply_q_k(q, ring.unit(Ring::k_stage(turn)), s);
      running_softmax(s, valid, shared.scale_log2, rows, p, factor);
      if (__any_sync(kAllLanes, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
        for (auto& values : o) {
#pragma unroll
          for (int i = 0; i < 4; ++i) values[i] *= factor[i / 2];
        }
      }
    }

    // V, the same.
    wait_async_copies<1>();
    const bool found =
        ring.finish_values(Ring::v_stage(turn), half_of(turn).look_for_wild(), shared.wild[turn]);
    const bool found_wild = __syncthreads_or(found);
    if (threadIdx.x == 0) shared.wild[next_turn] = 0;
    copy(params.v_cache, shared.v_head, half_of(next_turn), Ring::v_stage(next_turn));
    if (taking_part) {
      multiply_p_v(p, ring.unit(Ring::v_stage(turn)), o);
      if (found_wild) {
        count_valid(tokens, params, half_of(turn), valid);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          add_wild_numbers<kCache>(
              params, tokens[Tile::row(r) >> log_group_of(params)].position, half_of(turn).block,
              shared.wild[turn], valid[r], r,
              [&](int32_t page) {
                return first_row(params.v_cache, shared.v_head, page, half_of(turn).half());
              },
              o);
        }
      }
    }
    turn = next_turn;
  }
  wait_async_copies<0>();

  const Tile same_tile(params);
  const float v_scale = kScaled ? scale_of(params.v_scale, same_tile.head) : 1.0f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.sum[r] += __shfl_xor_sync(kAllLanes, rows.sum[r], 1);
    rows.sum[r] += __shfl_xor_sync(kAllLanes, rows.sum[r], 2);
    if (same_tile.token(r) < params.batch.num_tokens) {
      store_row(params, same_tile.token(r), same_tile.q_head(r), rows.maximum[r], rows.sum[r],
                v_scale, o, r);
    }
  }
}

}  // namespace msa::sparse_prefill::sm80
