// The inner loops of scoring, attention and normalising, compiled once for each instruction set and
// chosen at run time. Whatever rows are passed together, the bits of each depend on that row alone.
#pragma once

#include <cstdint>

#include "common/views.h"

namespace msa {

constexpr int kRowGroup = 4;   // query rows that the kernels below take at once
constexpr int kRowBatch = 32;  // query rows whose logits of one page stay in the L1 cache
constexpr int kRowFloats = kHeadDim;
constexpr int kPageFloats = kBlock * kHeadDim;

// The softmax of one query row over the pages it has seen so far.
struct SoftmaxState {
  float max;
  float sum;  // of exp(logit - max)
};

struct SimdKernels {
  const char* name;

  // count rows of kHeadDim elements, `stride` elements apart -> rows of float32 [count][kHeadDim].
  void (*convert_rows)(const void* rows, DType dtype, int64_t stride, int count, float* out);

  // The first `count` keys of a page -> float32 panels, [d][token] within each; the keys after them
  // read as 0.
  void (*pack_keys)(const void* page, DType dtype, int64_t token_stride, int count, float* panels);

  // logits[r][j] = queries[r] . key j for every key j < count. num_rows must be a multiple of
  // kRowGroup. Sums run over d ascending.
  void (*dot_rows)(const float* const* queries, int num_rows, const float* panels, int count,
                   float* logits);

  // Largest of logits[0, count), NaN if one of them is NaN. Overwrites logits[count, kBlock).
  float (*max_logit)(float* logits, int count);

  // logits[j] -> exp(scale * logits[j] - max) for j < count, 0 behind; updates the state and
  // returns the factor by which earlier sums shrink.
  float (*softmax_step)(float* logits, int count, float scale, SoftmaxState* state);

  // sums[r] = sums[r] * factors[r] + sum over j < count, ascending, of weights[r][j] * value j.
  // Values at or past `count` are not read.
  void (*add_values)(const float* const weights[kRowGroup], int count, const float* values,
                     int64_t value_stride, const float factors[kRowGroup],
                     float* const sums[kRowGroup]);

  // out[i] = (pixels[i] - mean) / stddev in float32, rounded to `dtype` (float32 or bfloat16).
  void (*normalize_pixels)(const uint8_t* pixels, int64_t count, float mean, float stddev,
                           DType dtype, void* out);
};

const SimdKernels& simd();

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MSA_CPU_X86_KERNELS 1
extern const SimdKernels kAvx2Kernels;
extern const SimdKernels kAvx512Kernels;
#endif

}  // namespace msa
