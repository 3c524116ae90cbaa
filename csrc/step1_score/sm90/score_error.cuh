// How far a score that Hopper's tensor cores sum of e4m3 products may be from the exact one.
//
// What a product m64nNk32 of e4m3 does, found by comparing bits (docs/kernels/select_blocks.md): a
// product q k is exact and has the exponent e = e(q) + e(k), that of a subnormal being -6. With m
// the largest exponent of the 32 products and of the sum so far, each of these 33 terms is cut,
// towards zero, to a multiple of u = 2^(m - 13); they are added exactly; the sum is cut to 13 bits
// behind its leading one.
//
// 128 elements are four steps. The large sum so far is what costs bits, so steps 0, 1 and steps 2,
// 3 are summed apart, and added in float32. Of either pair (first, second step):
//
//   |error| < 33 u_first + 2^-13 |sum of first| + 33 u_second + 2^-13 |sum of both|
//
// By Cauchy and Schwarz |sum of a step| <= |q| |k| of its elements; the errors in sums so far are
// below a 200th of these. With factors of a vector x
//
//   f_first(x)  = largest |x_i| of the step, but 2^-6 where it is less and not 0
//   f_second(x) = the larger of the same of both steps and of the lengths of x in either
//
// 2^m is at most f(q) f(k) of the step, and being a power of two at most U, the one below that;
// |sum of first| < 2 U_second, |sum of both| < 4 U_second:
//
//   |error| < 2^-13 (33 U_first + 39 U_second), of both pairs together
//
// The largest factors of the 128 keys of a block do for all of them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace msa::index_score::sm90 {

constexpr float kErrorScale = 1.0f / 8192;         // 2^-13
constexpr float kFactorMargin = 1.0f + 1.0f / 64;  // errors in sums so far, and of the factors
constexpr float kRounding = 0x1p-20f;              // of float32, many times over

__device__ __forceinline__ float power_of_two_below(float value) {
  return __uint_as_float(__float_as_uint(value) & 0x7f800000u);
}

// 0 where the score is exact: of zeros.
__device__ __forceinline__ float score_error(const float4& row, const float4& block) {
  const float first = power_of_two_below(row.x * block.x) + power_of_two_below(row.z * block.z);
  const float second = power_of_two_below(row.y * block.y) + power_of_two_below(row.w * block.w);
  return (33.01f * kErrorScale) * first + (39.01f * kErrorScale) * second;
}

// No exact score of the block is above this. `score` is no infinity.
__device__ __forceinline__ float upper_bound(float score, float error) {
  return fmaf(fabsf(score), kRounding, score + error);
}

// The exact score of a block whose upper bound this is, is not below that.
__device__ __forceinline__ float lower_bound(float upper, float error) {
  return fmaf(fabsf(upper) + error, -4.0f * kRounding, fmaf(error, -2.0f, upper));
}

}  // namespace msa::index_score::sm90
