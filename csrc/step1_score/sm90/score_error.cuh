// How far a score that Hopper's tensor cores sum of e4m3 products may be from the exact one.
//
// What m64n128k32 of e4m3 does, found by comparing bits (docs/kernels/select_blocks.md): a product
// q k is exact and has the exponent e = e(q) + e(k), that of a subnormal being -6. With m the
// largest exponent of the 32 products and of the sum so far, each of these 33 terms is cut, towards
// zero, to a multiple of u = 2^(m - 13); they are added exactly; the sum is cut to 13 bits behind
// its leading one.
//
// So a step adds an error below 33 u for its terms (the largest is never cut, so 32 u and one to
// spare) and below 2^-13 |sum| for its result, which is
// at most the u of the next step, whose sum so far it is, or, after the last, 2^-13 |score|:
//
//   |error| < 33 u_1 + 34 (u_2 + u_3 + u_4) + 2^-13 |score|
//
// And 2^m is at most the larger of |q|max |k|max of the step and of |sum so far|, which by Cauchy
// and Schwarz is at most |q| |k| of the steps before (and the error so far, far below 1/32 of the
// same). With factors of a vector x
//
//   f_s(x) = max(largest |x_i| of steps up to s, but 2^-6 where it is less and not 0;
//                length of x in the steps before s)
//
// 2^m of step s is at most f_s(q) f_s(k), and being a power of two at most the one below that. The
// largest factors of the 128 keys of a block do for all of them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace msa::index_score::sm90 {

constexpr float kErrorScale = 1.0f / 8192;         // 2^-13
constexpr float kFactorMargin = 1.0f + 1.0f / 32;  // of sums so far (1/80), of the factors' own

__device__ __forceinline__ float power_of_two_below(float value) {
  return __uint_as_float(__float_as_uint(value) & 0x7f800000u);
}

// The bound but for 2^-13 |score|; 0 where the score is exact: of zeros.
__device__ __forceinline__ float score_error(const float4& row, const float4& block) {
  const float first = power_of_two_below(row.x * block.x);
  const float others = power_of_two_below(row.y * block.y) + power_of_two_below(row.z * block.z) +
                       power_of_two_below(row.w * block.w);
  return (33.01f * kErrorScale) * first + (34.01f * kErrorScale) * others;
}

// No exact score of the block is above this. `score` is no infinity. The thousandth covers the two
// roundings to float32 here, barely.
__device__ __forceinline__ float upper_bound(float score, float error) {
  return fmaf(fabsf(score), 1.001f * kErrorScale, score + error);
}

// The exact score of a block whose upper bound this is, is not below that. |score| <= |upper| +
// error.
__device__ __forceinline__ float lower_bound(float upper, float error) {
  return fmaf(fabsf(upper) + error, -2.01f * kErrorScale, fmaf(error, -2.0f, upper));
}

// Bounds are kept in 16 bits, rounded up: of their ordered integers (topk_row.cuh) the upper 18,
// without those between -2^-20 and 2^-20 but 0, and without those of numbers that no score is
// (9 bits behind the leading one are left). 0: none, 1: NaN, 2: -inf.
constexpr int32_t kCodeBits = 14, kCodeZero = 0x8000, kCodeGap = (107 << 9) - 1;
constexpr uint32_t kMinusInfinity = 0x007fffff;  // score_key() of it

// The least code that stands for no less than the key.
__device__ __forceinline__ uint32_t code_above(uint32_t key) {
  const int32_t steps = static_cast<int32_t>((key + ((1u << kCodeBits) - 1)) >> kCodeBits) -
                        (1 << (31 - kCodeBits));
  const int32_t code = steps > 0 ? max(steps - kCodeGap, 1) : min(steps + kCodeGap, 0);
  return key <= 1 ? key : static_cast<uint32_t>(max(code + kCodeZero, 2));
}

// What it stands for, as a key.
__device__ __forceinline__ uint32_t key_of_code(uint32_t code) {
  const int32_t steps = static_cast<int32_t>(code) - kCodeZero;
  const int32_t gap = steps > 0 ? kCodeGap : steps < 0 ? -kCodeGap : 0;
  const uint32_t key = static_cast<uint32_t>(steps + gap + (1 << (31 - kCodeBits))) << kCodeBits;
  return code > 2 ? key : code == 2 ? kMinusInfinity : code;
}

}  // namespace msa::index_score::sm90
