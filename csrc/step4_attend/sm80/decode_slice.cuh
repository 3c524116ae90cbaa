// Step 4, decode: what a warp computes of one slice, 16 tokens of a block (32 of an FP8 cache), for
// the 16 rows of a token and KV head. Which slices, and how they come to shared memory:
// decode_walk.cuh.
//
//   score()          s = Q K^T           K from shared memory, 16 bytes a lane and row
//   Rows::softmax()  s -> p, m, l        in registers; rows g and g + 8 of a lane's quad
//   Rows::multiply() o += P V            for_value_operands() brings V
//
// Shared    K of a slice: row r of a token, 16-byte vector c at c ^ 4 (r % 2). A quad's lanes
//           read 4 vectors side by side; the order of d that this gives to the products is the
//           one in which q lies in registers.
//           V: bf16 c ^ r % 8, read transposed by ldmatrix; FP8 c ^ 2 (r / 2 % 4), paired token
//           by token by byte permutes. Of FP8 the columns of o come out in another order, see
//           there. No bank conflicts, but of the FP8 reads 8 bytes wide.
// Boxes     how Hopper's bulk copies bring a slice of FP8 (kBoxes): rows of 128 bytes, vector c of
//           row r at c ^ r % 8. Columns 2 t and 2 t + 1 of a tile of S are its tokens t and t + 4,
//           whose vectors lie in different banks; V is read by ldmatrix, its rows in the order of
//           S's columns.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "common/views.h"
#include "device/common.cuh"
#include "device/fp8.cuh"
#include "device/shared_memory.cuh"
#include "device/sm80_async_copy.cuh"
#include "device/sm80_mma.cuh"

namespace msa::decode::sm80 {

constexpr int kStages = 3;
constexpr int kRows = 16;               // of a product: G query heads, the last one repeated
constexpr int kPartBytes = 4096;        // K or V of a slice
constexpr int kQueryVectors = 16;       // of a row of q, 16 bytes each
constexpr int kOStride = kHeadDim + 8;  // floats between rows of o in shared memory
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

// Boxes: the token of a tile of 8 that is column `column` of S.
__device__ __forceinline__ int token_of_column(int column) { return column / 2 + column % 2 * 4; }

// 2^(m - reference) with a reference that keeps an empty row's weight at 0 instead of NaN.
__device__ __forceinline__ float reference_of(float maximum) {
  return maximum == -INFINITY ? 0.0f : maximum;
}

// Two weights as an operand: float16 beside an FP8 cache.
template <typename Element>
__device__ __forceinline__ uint32_t pack_weights(float first, float second) {
  if constexpr (Slice<Element>::kFp8) {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
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
      // Past the group its last head again, which nobody looks at: a choice between a load and 0
      // would wait for the load.
      const int64_t head = min(static_cast<int64_t>(lane / 4 + 8 * r), group - 1);
      const char* row = static_cast<const char*>(view.data) +
                        2 * (token * view.token_stride + (first_head + head) * view.head_stride);
#pragma unroll
      for (int vector = 0; vector < 4; ++vector) {
        const int offset = S::kFp8 ? vector / 2 * 128 + lane % 4 * 32 + vector % 2 * 16
                                   : vector * 64 + lane % 4 * 16;
        words[r][vector] = *reinterpret_cast<const uint4*>(row + offset);
      }
    }
  }

  // Begins to bring the rows to shared memory, 4096 bytes, as a group of copies; by kThreads threads,
  // this one of them number `thread`. 16-byte vector c of row r goes to c ^ 4 (r % 2), as in a slice of K.
  template <int kThreads>
  static __device__ __forceinline__ void fetch(uint4* rows, const RowsView& view, int64_t token,
                                               int64_t first_head, int32_t group,
                                               uint32_t thread = threadIdx.x) {
    const char* const heads = static_cast<const char*>(view.data) +
                              2 * (token * view.token_stride + first_head * view.head_stride);
#pragma unroll
    for (int first = 0; first < kRows * kQueryVectors; first += kThreads) {
      const int row = (first + thread) / kQueryVectors, vector = thread % kQueryVectors;
      copy_async_16(shared_address(rows + row * kQueryVectors + (vector ^ row % 2 * 4)),
                    heads + 2 * min(row, group - 1) * view.head_stride + vector * 16);
    }
    commit_async_copies();
  }

  // load() of what fetch() brought. Plain loads: behind those of shared_memory.cuh, which it must
  // not move, the compiler computes addresses anew in the loop, 80 instructions a round.
  __device__ __forceinline__ void load_fetched(const uint4* rows) {
    const int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int vector = S::kFp8 ? i / 2 * 8 + quad * 2 + i % 2 : i * 4 + quad;
        words[r][i] = rows[(row + 8 * r) * kQueryVectors + (vector ^ row % 2 * 4)];
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

// The same of a box, for column g of S.
__device__ __forceinline__ uint32_t box_key_address(uint32_t k) {
  const int lane = threadIdx.x % 32, row = token_of_column(lane / 4);
  return k + row * Slice<__nv_fp8_e4m3>::kRowBytes + (lane % 4 ^ row) * 16;
}

// s = Q K^T of a slice; even and odd products in sums of their own, half as long a chain.
template <typename Element, bool kBoxes = false>
__device__ __forceinline__ void score(const Query<Element>& query, uint32_t k,
                                      float (&s)[Slice<Element>::kColumns][4]) {
  using S = Slice<Element>;
  const uint32_t address = kBoxes ? box_key_address(k) : key_address<Element>(k);
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

// Of two tokens side by side, d and d + 1 each: d of both, then d + 1 of both.
__device__ __forceinline__ void convert_values(uint32_t word, uint32_t& first, uint32_t& second) {
  fp8_to_f16(__byte_perm(word, 0, 0x3120), first, second);
}

// for_value_operands() of a box, both steps: calls visit(step, n, b0, b1). Tile n has
// d = 16 (n / 2) + 2 column + n % 2.
template <typename Visit>
__device__ __forceinline__ void for_box_value_operands(uint32_t v, const Visit& visit) {
  using S = Slice<__nv_fp8_e4m3>;
  const int lane = threadIdx.x % 32, row = token_of_column(lane % 8);
  // Matrices: 8 tokens each, of one vector.
  const uint32_t address = v + (lane / 8 * 8 + row) * S::kRowBytes + row * 16;
#pragma unroll
  for (int vector = 0; vector < S::kVectors; ++vector) {
    uint32_t b[4];
    load_matrices_transposed(b, address ^ vector * 16);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t first[2], second[2];
      convert_values(b[2 * step], first[0], second[0]);
      convert_values(b[2 * step + 1], first[1], second[1]);
      visit(step, 2 * vector, first[0], first[1]);
      visit(step, 2 * vector + 1, second[0], second[1]);
    }
  }
}

// s -> logits in log2 units, those past `valid` -inf, and the largest of rows g and g + 8.
template <bool kBoxes = false, int kColumns>
__device__ __forceinline__ void scale_logits(float (&s)[kColumns][4], int valid,
                                             const float (&scale)[2], float (&largest)[2]) {
  const int quad = threadIdx.x % 4;
  largest[0] = largest[1] = -INFINITY;
#pragma unroll
  for (auto& tile : s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) tile[i] *= scale[i / 2];
  }
  if (valid < kColumns * 8) {  // but for the last slice that a token sees, all or nothing counts
#pragma unroll
    for (int tile = 0; tile < kColumns; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = tile * 8 + (kBoxes ? quad + i % 2 * 4 : quad * 2 + i % 2);
        if (token >= valid) s[tile][i] = -INFINITY;
      }
    }
  }
#pragma unroll
  for (const auto& tile : s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) largest[i / 2] = fmaxf(largest[i / 2], tile[i]);
  }
#pragma unroll
  for (float& value : largest) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
  }
}

// What a warp holds of 16 rows while it walks its slices; of a lane rows g and g + 8.
template <typename Element, bool kBoxes = false>
struct Rows {
  using S = Slice<Element>;
  static_assert(S::kFp8 || !kBoxes, "boxes are of FP8");
  using Weights = uint32_t[S::kColumns][2];
  // The largest weight is 2^12 where weights are float16: that of the smallest normal one is then
  // 2^-26 of it, and 2^12 * 448 is far from the largest float32. o, sum and maximum carry it along.
  static constexpr float kFirstWeight = S::kFp8 ? 12.0f : 0.0f;
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
    float largest[2], reference[2], added[2] = {};
    scale_logits<kBoxes>(s, valid, scale, largest);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = fmaxf(largest[r] - kFirstWeight, maximum[r]);
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
        p[tile][r] = pack_weights<Element>(first, second);
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
    if constexpr (kBoxes) {
      for_box_value_operands(
          v, [&](int step, int n, uint32_t b0, uint32_t b1) { multiply(p, step, n, b0, b1); });
    } else {
#pragma unroll
      for (int step = 0; step < S::kTokens / 16; ++step) {
        for_value_operands<Element>(
            v, step, [&](int n, uint32_t b0, uint32_t b1) { multiply(p, step, n, b0, b1); });
      }
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
      if constexpr (kBoxes) {
#pragma unroll
        for (int n = 0; n < 16; n += 2) {
          *reinterpret_cast<float4*>(out + n * 8 + quad * 4) =
              make_float4(o[n][2 * r], o[n + 1][2 * r], o[n][2 * r + 1], o[n + 1][2 * r + 1]);
        }
      } else if constexpr (S::kFp8) {
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

}  // namespace msa::decode::sm80
