// cache[slot / 128, head, slot % 128] = k[t, head] for every token with a slot of the pool; v and
// index_k likewise. An FP8 cache stores round(k / scale), to nearest even, saturated at +-448; any
// other cache has the dtype of its input and gets its bits.
//
// Threads: one unit is one head of one cache over all tokens in order, so that of two tokens with
// the same slot the later one wins, whatever the number of threads.
// Limits: no more than 2 * Hkv + 1 threads have work.
#include <cstring>

#include "cpu/convert.h"
#include "cpu/element.h"
#include "host/parallel.h"
#include "step0_write/write_cache_params.h"

namespace msa {
namespace {

constexpr int64_t kTokensPerTask = 256;  // fewer are written sooner than a thread wakes up

struct Lane {
  const RowsView& rows;
  const PagedView& cache;
  int64_t head;
  float scale;
};

float value_at(const char* row, DType dtype, int d) {
  if (dtype == DType::kFloat32) return reinterpret_cast<const float*>(row)[d];
  return bf16_to_float(reinterpret_cast<const uint16_t*>(row)[d]);
}

void store_e4m3(const char* row, DType dtype, float scale, char* slot) {
  float scaled[kHeadDim];
  for (int d = 0; d < kHeadDim; ++d) scaled[d] = value_at(row, dtype, d) / scale;
  auto* stored = reinterpret_cast<uint8_t*>(slot);
#pragma omp simd
  for (int d = 0; d < kHeadDim; ++d) stored[d] = float_to_e4m3(scaled[d]);
}

void write_lane(const WriteCacheParams& params, const Lane& lane) {
  const PagedView& cache = lane.cache;
  const int64_t size = element_size(cache.dtype);
  for (int64_t token = 0; token < params.num_tokens; ++token) {
    const int64_t slot = params.slot_mapping[token * params.slot_stride];
    if (slot < 0 || slot / kBlock >= cache.num_pages) continue;
    const char* row = row_at(lane.rows, token, lane.head);
    char* target =
        page_at(cache, slot / kBlock, lane.head) + slot % kBlock * cache.token_stride * size;
    if (cache.dtype == lane.rows.dtype) {
      std::memcpy(target, row, static_cast<size_t>(kHeadDim * size));
    } else {
      store_e4m3(row, lane.rows.dtype, lane.scale, target);
    }
  }
}

}  // namespace

void run_write_cache(const WriteCacheParams& params, const ExecContext&) {
  const int64_t heads = params.num_kv_heads;
  const int64_t units = 2 * heads + (params.index_k.data ? 1 : 0);
  const int64_t grain = 1 + kTokensPerTask / params.num_tokens;
  parallel_for(units, grain, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      if (unit < heads) {
        write_lane(params, {params.k, params.k_cache, unit, scale_of(params.k_scale, unit)});
      } else if (unit < 2 * heads) {
        const int64_t head = unit - heads;
        write_lane(params, {params.v, params.v_cache, head, scale_of(params.v_scale, head)});
      } else {
        write_lane(params, {params.index_k, params.index_k_cache, 0, 1.0f});
      }
    }
  });
}

}  // namespace msa
