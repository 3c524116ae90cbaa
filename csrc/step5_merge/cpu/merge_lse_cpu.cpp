// lse = log(sum over p of exp(lses[p])), out = sum over p of exp(lses[p] - lse) * outs[p]
//
// Per row (t, h): the largest LSE, then the weights relative to it, then the parts in their order.
// A part with LSE -inf holds no keys and its out is not read; with no part left out is 0 and the
// LSE -inf. A NaN LSE makes the row NaN.
//
// Threads: ranges of rows (t, h).
// Limits: float32 sums, parts ascending.
#include <cmath>
#include <limits>

#include "cpu/convert.h"
#include "cpu/element.h"
#include "host/parallel.h"
#include "step5_merge/merge_lse_params.h"

namespace msa {
namespace {

constexpr int64_t kRowsPerTask = 64;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

struct PartRow {
  float lse;
  const char* out;
};

PartRow part_row(const MergeLseParams& params, int64_t part, int64_t token, int64_t head) {
  const MergePart& view = params.parts[params.stacked ? 0 : part];
  const int64_t lse_offset = token * view.lse_token_stride + head * view.lse_head_stride +
                             (params.stacked ? part * params.lse_part_stride : 0);
  const int64_t out_offset = token * view.out_token_stride + head * view.out_head_stride +
                             (params.stacked ? part * params.out_part_stride : 0);
  return {view.lse[lse_offset],
          static_cast<const char*>(view.out) + out_offset * element_size(params.dtype)};
}

void add_part(float* sums, const char* out, DType dtype, float weight) {
  if (dtype == DType::kFloat32) {
    const auto* values = reinterpret_cast<const float*>(out);
    for (int d = 0; d < kHeadDim; ++d) sums[d] += weight * values[d];
  } else {
    const auto* values = reinterpret_cast<const uint16_t*>(out);
    for (int d = 0; d < kHeadDim; ++d) sums[d] += weight * bf16_to_float(values[d]);
  }
}

void merge_row(const MergeLseParams& params, int64_t token, int64_t head) {
  float largest = kNegInf;
  for (int64_t part = 0; part < params.num_parts; ++part) {
    const float lse = part_row(params, part, token, head).lse;
    if (lse > largest || std::isnan(lse)) largest = lse;
    if (std::isnan(largest)) break;
  }
  float sums[kHeadDim] = {};
  float total = 0.0f;
  for (int64_t part = 0; part < params.num_parts; ++part) {
    const PartRow row = part_row(params, part, token, head);
    if (row.lse == kNegInf) continue;
    const float weight = std::exp(row.lse - largest);
    total += weight;
    add_part(sums, row.out, params.dtype, weight);
  }
  if (largest != kNegInf) {
    for (float& sum : sums) sum /= total;
  }
  params.lse.data[token * params.lse.token_stride + head * params.lse.head_stride] =
      largest == kNegInf ? kNegInf : largest + std::log(total);
  char* out = row_at(params.out, token, head);
  for (int d = 0; d < kHeadDim; ++d) {
    if (params.dtype == DType::kFloat32) {
      reinterpret_cast<float*>(out)[d] = sums[d];
    } else {
      reinterpret_cast<uint16_t*>(out)[d] = float_to_bf16(sums[d]);
    }
  }
}

}  // namespace

void run_merge_lse(const MergeLseParams& params, const ExecContext&) {
  const int64_t rows = params.num_tokens * params.num_heads;
  parallel_for(rows, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      merge_row(params, row / params.num_heads, row % params.num_heads);
    }
  });
}

}  // namespace msa
