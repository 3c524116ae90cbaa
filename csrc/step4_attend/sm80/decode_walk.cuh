// Step 4, sparse_decode and paged_decode: the G query heads of one token and KV head attend to the
// blocks of their row, split over warps and CTAs. What sm80/ and sm90/ have in common: the walk
// over the keys, and how parts are merged and stored.
//
//   s = scale * q . K^T, tokens past pos masked;  m' = max(m, max s);  p = exp(s - m')
//   l = l * exp(m - m') + sum p;  o = o * exp(m - m') + p V;  out = o / l;  lse = m + log(l)
//
// Grid      (token, KV head) x splits; unit h * T + t, so that the tokens of a request, which share
//           most blocks, run side by side and find them in L2. A split's warps and those of the
//           other splits of its unit take turns at the row's slices: 16 tokens of a block (32 of an
//           FP8 cache), K and V.
// Roles     all 4 warps alike, each its own producer: no barrier but the one before the merge.
// Registers q as 16 rows (G heads, then 0); o of 16 x 128; what to fetch of the next 32 slices, one
//           a lane.
// Shared    ring    4 warps x 3 stages x (K 4096, V 4096)       98,304
//             K     rows of a token, 16-byte vector c of row r at c ^ 4 (r % 2)
//             V     bf16: c ^ r % 8;  FP8: c ^ 2 (r / 2 % 4)
//             both free of bank conflicts for the copies that write and the loads that read
//           o       4 warps x 16 rows x 136 floats, over each warp's own part of the ring
//           state   4 warps x 16 rows (m, l)                         512
//           valid   4 warps x 3 stages: tokens of the slice that count   48
// Barriers  __syncthreads once, between the last slice and the merge of the warps.
// Timeline  of a warp: wait K | S = Q K^T | fetch K of slice + 3 | softmax | wait V | O += P V |
//           fetch V of slice + 3. Two cp.async groups a slice, in this order.
// Unseen    tokens past pos, slices of blocks that do not count: zero-filled by the copy, which
// then
//           reads nothing, and masked. So no poison comes near a product.
// Order     slice i belongs to warp i % (4 splits) and is added in ascending order; warps and
// splits
//           are merged in ascending order: the same bits every time, wherever the token stands.
// Limits    q bfloat16, D = 128, G <= 16; caches bfloat16 or e4m3 (K to bfloat16, V to float16 in
//           registers, exactly; P in V's type). 97 KB of shared memory: one CTA an SM on sm_86, two
//           on sm_90. Splits merge by a second launch; sm90/ merges them in a cluster.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "device/dependent_launch.cuh"
#include "device/fp8.cuh"
#include "device/positions.cuh"
#include "device/sm80_async_copy.cuh"
#include "device/sm80_mma.cuh"
#include "step4_attend/decode_plan.h"

namespace msa::decode::sm80 {

constexpr int kStages = 3;
constexpr int kRows = 16;               // of a product: G query heads, the others 0
constexpr int kPartBytes = 4096;        // K or V of a slice
constexpr int kOStride = kHeadDim + 8;  // floats between rows of o in shared memory
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kLog2E = 1.44269504088896340736f, kLn2 = 0.69314718055994530942f;

template <typename Element>
struct Slice {
  static constexpr bool kFp8 = sizeof(Element) == 1;
  static constexpr int kRowBytes = kHeadDim * sizeof(Element);
  static constexpr int kVectors = kRowBytes / 16;
  static constexpr int kTokens = kPartBytes / kRowBytes;
  static constexpr int kPerBlock = kBlock / kTokens;
  static constexpr int kColumns = kTokens / 8;  // tiles of S
  static constexpr int kParts = kVectors / 4;   // of a row of K: a quad's 4 vectors each
};

template <int kWarpCount>
struct SharedStorage {
  static constexpr int kWarps = kWarpCount, kThreads = kWarps * 32;
  alignas(1024) uint8_t ring[kWarps][kStages][2][kPartBytes];
  float2 state[kWarps][kRows];
  int32_t valid[kWarps][kStages];
};
static_assert(kRows * kOStride * 4 <= kStages * 2 * kPartBytes, "o lies in the ring");

__device__ __forceinline__ float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float scale_of(const ScaleView& scale, int64_t head) {
  return scale.data != nullptr ? scale.data[head * scale.head_stride] : scale.value;
}

// 2^(m - reference) with a reference that keeps an empty row's weight at 0 instead of NaN.
__device__ __forceinline__ float reference_of(float maximum) {
  return maximum == -INFINITY ? 0.0f : maximum;
}

// The row of keys that a token walks.
struct KeyRow {
  int32_t request;
  int32_t pos;
  int32_t blocks;  // entries of ids, or pages of the table, that may count
};

template <bool kSparse>
__device__ __forceinline__ KeyRow find_row(const DecodeParams& params, int32_t token) {
  const BatchView& batch = params.attend.batch;
  TokenPosition where;
  if (kSparse || batch.cu_seqlens_q != nullptr) {
    where = find_position_by_warp(batch, token, params.tokens_each);
  } else {
    where = {token, seq_len_of(batch, token) - 1};
  }
  if (where.request < 0) return {0, -1, 0};
  if (!kSparse) {  // a row longer than its table ends where the table ends
    const int32_t length = seq_len_of(batch, where.request);
    const int64_t table_end = batch.max_pages * kBlock;
    if (length > table_end) where.pos -= length - static_cast<int32_t>(table_end);
  }
  const int32_t visible = visible_blocks(batch, where.pos);
  return {where.request, where.pos,
          kSparse ? min(visible, static_cast<int32_t>(params.ids.topk)) : visible};
}

// Of one slice: the block that it is part of, and the page of that; -1: it counts nothing.
struct SliceSource {
  int32_t block;
  int32_t page;
};

template <bool kSparse>
__device__ __forceinline__ SliceSource find_slice(const DecodeParams& params, const KeyRow& row,
                                                  int32_t slot, int64_t id) {
  if (slot >= row.blocks) return {0, -1};
  if (kSparse && (id < 0 || id >= visible_blocks(params.attend.batch, row.pos))) return {0, -1};
  const auto block = static_cast<int32_t>(kSparse ? id : slot);
  return {block, page_of(params.attend.batch, row.request, block)};
}

// The 16 rows of q in registers; of a lane rows g and g + 8. Beside an FP8 cache they are float16
// like K, each row times a power of two that brings its largest value under 2^15: what that rounds
// away of the small ones is 2^-39 of the largest.
template <typename Element>
struct Query {
  using S = Slice<Element>;
  uint4 words[2][4];  // row g + 8 r: the lane's shares of d, in the order of its share of K
  uint32_t a[8][4];   // the same as operands of the 8 products, after prepare()
  float scale[2];     // of the row's logits, log2 units

  __device__ __forceinline__ void load(const RowsView& view, int64_t token, int64_t first_head,
                                       int64_t group) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = lane / 4 + 8 * r;
      const char* row = static_cast<const char*>(view.data) +
                        2 * (token * view.token_stride + (first_head + head) * view.head_stride);
#pragma unroll
      for (int vector = 0; vector < 4; ++vector) {
        const int offset = S::kFp8 ? vector / 2 * 128 + lane % 4 * 32 + vector % 2 * 16
                                   : vector * 64 + lane % 4 * 16;
        words[r][vector] = make_uint4(0, 0, 0, 0);
        if (head < group) words[r][vector] = *reinterpret_cast<const uint4*>(row + offset);
      }
    }
  }

  // After load(), where its latency is over anyway.
  __device__ __forceinline__ void prepare(float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scale[r] = scale_log2;
      if constexpr (S::kFp8) {
        float largest = 0.0f;
        for_pairs(r, [&](uint32_t pair) {
          const float2 values = unpack(pair);
          largest = fmaxf(largest, fmaxf(fabsf(values.x), fabsf(values.y)));
          return pair;
        });
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
        const int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
        // 2^14 / 2^exponent, at most 2^100; 1 where the row holds Inf and the result is NaN anyway.
        const int factor = exponent == 255 ? 127 : min(127 + 100, 127 + 14 + 127 - exponent);
        const float multiplier = __uint_as_float(static_cast<uint32_t>(factor) << 23);
        scale[r] *= __uint_as_float(static_cast<uint32_t>(254 - factor) << 23);
        for_pairs(r, [&](uint32_t pair) {
          const float2 values = unpack(pair);
          const __half2 half = __floats2half2_rn(values.x * multiplier, values.y * multiplier);
          return *reinterpret_cast<const uint32_t*>(&half);
        });
      }
    }
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const uint4 &low = words[0][step / 2], &high = words[1][step / 2];
      a[step][0] = step % 2 ? low.z : low.x;
      a[step][1] = step % 2 ? high.z : high.x;
      a[step][2] = step % 2 ? low.w : low.y;
      a[step][3] = step % 2 ? high.w : high.y;
    }
  }

 private:
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }
  template <typename Change>
  __device__ __forceinline__ void for_pairs(int r, const Change& change) {
#pragma unroll
    for (int vector = 0; vector < 4; ++vector) {
      uint4& it = words[r][vector];
      it = make_uint4(change(it.x), change(it.y), change(it.z), change(it.w));
    }
  }
};

// Where the lane reads part 0 of row g of a slice's K; other parts: ^ part * 64, tile n: + 8 n
// rows.
template <typename Element>
__device__ __forceinline__ uint32_t key_address(uint32_t k) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  return k + row * Slice<Element>::kRowBytes + row % 2 * 64 + lane % 4 * 16;
}

// s = Q K^T of a slice; even and odd products in sums of their own, half as long a chain.
template <typename Element>
__device__ __forceinline__ void score(const Query<Element>& query, uint32_t k,
                                      float (&s)[Slice<Element>::kColumns][4]) {
  using S = Slice<Element>;
  const uint32_t address = key_address<Element>(k);
#pragma unroll
  for (int tile = 0; tile < S::kColumns; ++tile) {
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int part = 0; part < S::kParts; ++part) {
      const uint4 bits = load_shared_16((address ^ part * 64) + tile * 8 * S::kRowBytes);
      if constexpr (S::kFp8) {
        const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t b0, b1;
          fp8_to_f16(words[i], b0, b1);
          multiply_f16(i % 2 ? odd : even, query.a[part * 4 + i], b0, b1);
        }
      } else {
        multiply_bf16(even, query.a[part * 2], bits.x, bits.y);
        multiply_bf16(odd, query.a[part * 2 + 1], bits.z, bits.w);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) s[tile][i] = even[i] + odd[i];
  }
}

// The operands of O += P V that a lane takes from a slice's V: calls visit(n, b0, b1) for each tile
// n of o. Of tile n: bf16: d = 8 n + column; FP8: d = 16 column + n. step: of 16 tokens.
template <typename Element, typename Visit>
__device__ __forceinline__ void for_value_operands(uint32_t v, int step, const Visit& visit) {
  using S = Slice<Element>;
  const int lane = threadIdx.x % 32;
  if constexpr (S::kFp8) {
    const int column = lane / 4, quad = lane % 4;
    const uint32_t address = v + (step * 16 + quad * 2) * S::kRowBytes + (column ^ quad * 2) * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // of the lane's 16 bytes: registers are scarce
      uint2 words[4];                       // of tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9
#pragma unroll
      for (int token = 0; token < 4; ++token) {
        words[token] =
            load_shared_8(address + (token / 2 * 8 + token % 2) * S::kRowBytes + half * 8);
      }
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const uint32_t select = pair % 2 == 0 ? 0x5140 : 0x7362;  // of d and d + 1, token by token
        const auto word = [&](int token) { return pair < 2 ? words[token].x : words[token].y; };
        uint32_t b0[2], b1[2];
        fp8_to_f16(__byte_perm(word(0), word(1), select), b0[0], b0[1]);
        fp8_to_f16(__byte_perm(word(2), word(3), select), b1[0], b1[1]);
        visit(half * 8 + pair * 2, b0[0], b1[0]);
        visit(half * 8 + pair * 2 + 1, b0[1], b1[1]);
      }
    }
  } else {
    const int row = lane % 16, half = lane / 16;  // matrices: tokens 0-7, 8-15; then the next d
    const uint32_t address = v + row * S::kRowBytes + (half ^ row % 8) * 16;
#pragma unroll
    for (int n = 0; n < 16; n += 2) {
      uint32_t b[4];
      load_matrices_transposed(b, address ^ n * 16);
      visit(n, b[0], b[1]);
      visit(n + 1, b[2], b[3]);
    }
  }
}

// What a warp holds of 16 rows while it walks its slices; of a lane rows g and g + 8.
template <typename Element>
struct Rows {
  using S = Slice<Element>;
  using Weights = uint32_t[S::kColumns][2];
  float o[16][4];
  float maximum[2];  // log2 units
  float sum[2];      // of the lane's own columns

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& tile : o) {
#pragma unroll
      for (float& value : tile) value = 0.0f;
    }
    maximum[0] = maximum[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
  }

  // s -> p packed as the first operand of the next product, and what o must shrink by before it.
  __device__ __forceinline__ void softmax(float (&s)[S::kColumns][4], int valid,
                                          const float (&scale)[2], Weights& p, float (&factor)[2]) {
    const int quad = threadIdx.x % 4;
    float largest[2] = {-INFINITY, -INFINITY}, reference[2], added[2] = {};
#pragma unroll
    for (int tile = 0; tile < S::kColumns; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[tile][i] = tile * 8 + quad * 2 + i % 2 < valid ? s[tile][i] * scale[i / 2] : -INFINITY;
        largest[i / 2] = fmaxf(largest[i / 2], s[tile][i]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(kAllLanes, largest[r], 1));
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(kAllLanes, largest[r], 2));
      largest[r] = fmaxf(largest[r], maximum[r]);
      reference[r] = reference_of(largest[r]);
      factor[r] = exp2_fast(maximum[r] - reference[r]);
      maximum[r] = largest[r];
    }
#pragma unroll
    for (int tile = 0; tile < S::kColumns; ++tile) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float first = exp2_fast(s[tile][2 * r] - reference[r]);
        const float second = exp2_fast(s[tile][2 * r + 1] - reference[r]);
        added[r] += first + second;
        if constexpr (S::kFp8) {
          const __half2 pair = __floats2half2_rn(first, second);
          p[tile][r] = *reinterpret_cast<const uint32_t*>(&pair);
        } else {
          const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
          p[tile][r] = *reinterpret_cast<const uint32_t*>(&pair);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = sum[r] * factor[r] + added[r];
  }

  __device__ __forceinline__ void shrink(const float (&factor)[2]) {
#pragma unroll
    for (auto& tile : o) {
#pragma unroll
      for (int i = 0; i < 4; ++i) tile[i] *= factor[i / 2];
    }
  }

  __device__ __forceinline__ void multiply(const Weights& p, int step, int n, uint32_t b0,
                                           uint32_t b1) {
    const uint32_t a[4] = {p[2 * step][0], p[2 * step][1], p[2 * step + 1][0], p[2 * step + 1][1]};
    if constexpr (S::kFp8) {
      multiply_f16(o[n], a, b0, b1);
    } else {
      multiply_bf16(o[n], a, b0, b1);
    }
  }

  // o += P V.
  __device__ __forceinline__ void add_values(uint32_t v, const Weights& p) {
#pragma unroll
    for (int step = 0; step < S::kTokens / 16; ++step) {
      for_value_operands<Element>(
          v, step, [&](int n, uint32_t b0, uint32_t b1) { multiply(p, step, n, b0, b1); });
    }
  }

  // o, m and l of the warp to shared memory.
  __device__ __forceinline__ void store(float* shared_o, float2* shared_state) {
    const int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 1);
      sum[r] += __shfl_xor_sync(kAllLanes, sum[r], 2);
      float* out = shared_o + (row + 8 * r) * kOStride;
      if (quad == 0) shared_state[row + 8 * r] = make_float2(maximum[r], sum[r]);
      if constexpr (S::kFp8) {
#pragma unroll
        for (int n = 0; n < 16; n += 4) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            *reinterpret_cast<float4*>(out + quad * 32 + i * 16 + n) = make_float4(
                o[n][2 * r + i], o[n + 1][2 * r + i], o[n + 2][2 * r + i], o[n + 3][2 * r + i]);
          }
        }
      } else {
#pragma unroll
        for (int n = 0; n < 16; ++n) {
          *reinterpret_cast<float2*>(out + n * 8 + quad * 2) =
              make_float2(o[n][2 * r], o[n][2 * r + 1]);
        }
      }
    }
  }
};

// Whether any row's maximum grew: most slices leave them all as they are.
__device__ __forceinline__ bool any_shrinks(const float (&factor)[2]) {
  return factor[0] != 1.0f || factor[1] != 1.0f;
}

// How a lane copies K or V of a slice: 8 vectors, 32 / kVectors rows apart.
template <typename Element>
struct LaneCopy {
  using S = Slice<Element>;
  static constexpr int kStepRows = 32 / S::kVectors;
  const char* k;  // of the KV head, at the lane's vector of its first row
  const char* v;
  int64_t k_page, v_page, k_token, v_token;  // strides in bytes
  int row;
  uint32_t k_place, v_place;  // in a part

  __device__ __forceinline__ LaneCopy(const AttendParams& params, int64_t head) {
    const int lane = threadIdx.x % 32, vector = lane % S::kVectors;
    row = lane / S::kVectors;
    const auto bytes = [](int64_t stride) { return stride * int64_t{sizeof(Element)}; };
    k_page = bytes(params.k_cache.page_stride);
    v_page = bytes(params.v_cache.page_stride);
    k_token = bytes(params.k_cache.token_stride);
    v_token = bytes(params.v_cache.token_stride);
    k = static_cast<const char*>(params.k_cache.data) + bytes(head * params.k_cache.head_stride) +
        row * k_token + vector * 16;
    v = static_cast<const char*>(params.v_cache.data) + bytes(head * params.v_cache.head_stride) +
        row * v_token + vector * 16;
    k_place = row * S::kRowBytes + (vector ^ row % 2 * 4) * 16;
    v_place = row * S::kRowBytes + (vector ^ (S::kFp8 ? row / 2 * 2 : row)) * 16;
  }

  static __device__ __forceinline__ void copy_vector(uint32_t place, const char* source, bool whole,
                                                     bool there) {
    if (whole) {
      copy_async_16(place, source);
    } else {
      copy_async_16_or_zero(place, source, there);
    }
  }
  __device__ __forceinline__ void copy_k(uint32_t part, int32_t page, int first, int valid) const {
    if (valid <= 0) return commit_async_copies();  // nobody will look at it
    const char* source = k + page * k_page + first * k_token;
    const bool whole = valid == S::kTokens;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t place = part + k_place + i * 512;
      copy_vector(place, source, whole, row + i * kStepRows < valid);
      source += kStepRows * k_token;
    }
    commit_async_copies();
  }
  __device__ __forceinline__ void copy_v(uint32_t part, int32_t page, int first, int valid) const {
    if (valid <= 0) return commit_async_copies();  // nobody will look at it
    const char* source = v + page * v_page + first * v_token;
    const bool whole = valid == S::kTokens;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t turn = S::kFp8 ? i % 2 * 64 : i % 4 * 32;  // the rest of the row's swizzle
      copy_vector((part + v_place + i * 512) ^ turn, source, whole, row + i * kStepRows < valid);
      source += kStepRows * v_token;
    }
    commit_async_copies();
  }
};

// o / l of the G rows, and their LSE.
__device__ __forceinline__ void store_result(const AttendParams& params, int64_t token,
                                             int64_t head, int row, float4 o, float maximum,
                                             float sum, float v_scale) {
  const int lane = threadIdx.x % 32;
  const float normalise = sum == 0.0f ? 0.0f : v_scale / sum;  // a NaN stays one
  const int64_t q_head = head * params.group_size + row;
  const __nv_bfloat162 low = __floats2bfloat162_rn(o.x * normalise, o.y * normalise);
  const __nv_bfloat162 high = __floats2bfloat162_rn(o.z * normalise, o.w * normalise);
  auto* out = static_cast<__nv_bfloat16*>(params.out.data) + token * params.out.token_stride +
              q_head * params.out.head_stride;
  reinterpret_cast<uint2*>(out)[lane] = make_uint2(*reinterpret_cast<const uint32_t*>(&low),
                                                   *reinterpret_cast<const uint32_t*>(&high));
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

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
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
  const int32_t first_slice = split * kWarps + warp, turn = params.splits * kWarps;

  // Neither q nor the ids need the position: their latency lies beside that of the look-up.
  Query<Element> query;
  query.load(attend.q, token, head * attend.group_size, attend.group_size);
  const auto slot_of = [&](int32_t index) { return (first_slice + index * turn) / S::kPerBlock; };
  const auto id_of = [&](int32_t slot) {
    return kSparse && slot < params.ids.topk ? load_id(params.ids, head, token, slot) : -1;
  };
  const int32_t lane_slot = slot_of(lane);
  const int64_t lane_id = id_of(lane_slot);
  const KeyRow row = find_row<kSparse>(params, token);
  SliceSource ahead = find_slice<kSparse>(params, row, lane_slot, lane_id), after{0, -1};

  const LaneCopy<Element> copy(attend, head);
  const int32_t slices = row.blocks * S::kPerBlock;

  // What is to be copied for the slice after the last copied one.
  int32_t page = 0, first = 0, valid = 0;
  const auto next_source = [&](int32_t index) {
    if (index % 32 == 0) {
      if (index != 0) ahead = after;
      const int32_t slot = slot_of(index + 32 + lane);
      after = find_slice<kSparse>(params, row, slot, id_of(slot));
    }
    page = __shfl_sync(kAllLanes, ahead.page, index % 32);
    const int32_t block = __shfl_sync(kAllLanes, ahead.block, index % 32);
    const int32_t slice = first_slice + index * turn;
    first = slice % S::kPerBlock * S::kTokens;
    valid = min(S::kTokens, row.pos + 1 - block * kBlock - first);
    if (page < 0 || page >= attend.k_cache.num_pages || slice >= slices) page = valid = 0;
  };
  const uint32_t ring = shared_address(shared.ring[warp]);
  for (int stage = 0; stage < kStages; ++stage) {
    const uint32_t k = ring + stage * 2 * kPartBytes, v = k + kPartBytes;
    next_source(stage);
    if (lane == 0) shared.valid[warp][stage] = valid;
    copy.copy_k(k, page, first, valid);
    copy.copy_v(v, page, first, valid);
  }

  Rows<Element> rows;
  rows.clear();
  query.prepare(attend.scale * scale_of(attend.k_scale, head) * kLog2E);
  int stage = 0;
#pragma unroll 1
  for (int32_t index = 0; first_slice + index * turn < slices; ++index) {
    // Behind the group that a wait is for: V, K and V of 2 slices; or K and V of 2 slices, K.
    wait_async_copies<2 * kStages - 1>();
    __syncwarp();
    const int slice_valid = shared.valid[warp][stage];
    const uint32_t k = ring + stage * 2 * kPartBytes, v = k + kPartBytes;
    float s[S::kColumns][4];
    uint32_t p[S::kColumns][2];
    if (slice_valid > 0) score(query, k, s);
    __syncwarp();
    next_source(index + kStages);
    if (lane == 0) shared.valid[warp][stage] = valid;
    copy.copy_k(k, page, first, valid);
    if (slice_valid > 0) {
      float factor[2];
      rows.softmax(s, slice_valid, query.scale, p, factor);
      if (__any_sync(kAllLanes, any_shrinks(factor))) rows.shrink(factor);
    }
    wait_async_copies<2 * kStages - 1>();
    __syncwarp();
    if (slice_valid > 0) rows.add_values(v, p);
    __syncwarp();
    copy.copy_v(v, page, first, valid);
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
