// Tensor maps of q and of the caches, as the sm90 kernels of step 4 copy them; for calls that
// fits_tensor_maps().
#pragma once

#include "device/sm90/tma.cuh"
#include "step4_attend/attend_params.h"

namespace msa {

// A box is the heads of one KV head of one token: rows of 64 d, half of d after half.
inline CUtensorMap make_q_map(const AttendParams& params, const ExecContext& context) {
  const uint64_t heads = params.num_kv_heads * params.group_size;
  const uint64_t tokens = params.batch.num_tokens;
  const uint64_t head_bytes = params.q.head_stride * 2, token_bytes = params.q.token_stride * 2;
  const uint32_t group = static_cast<uint32_t>(params.group_size);
  if (group >= 8) {
    return sm90::make_tensor_map<5>(context.op, params.q.data, {64, 8, 2, heads / 8, tokens},
                                    {head_bytes, 128, 8 * head_bytes, token_bytes},
                                    {64, 8, 2, group / 8, 1});
  }
  return sm90::make_tensor_map<5>(context.op, params.q.data, {64, heads, 2, 1, tokens},
                                  {head_bytes, 128, 16, token_bytes}, {64, group, 1, 1, 1});
}

// A box is a block of one KV head: half of d after half of bfloat16; of FP8 whole rows, of `tokens`
// of it.
inline CUtensorMap make_kv_map(const PagedView& cache, const AttendParams& params,
                               const ExecContext& context, uint32_t tokens = kBlock) {
  const auto heads = static_cast<uint64_t>(params.num_kv_heads);
  const auto pages = static_cast<uint64_t>(cache.num_pages);
  if (cache.dtype == DType::kFloat8E4M3) {
    return sm90::make_tensor_map<5>(
        context.op, cache.data, {kHeadDim, kBlock, 1, heads, pages},
        {static_cast<uint64_t>(cache.token_stride), 16, static_cast<uint64_t>(cache.head_stride),
         static_cast<uint64_t>(cache.page_stride)},
        {kHeadDim, tokens, 1, 1, 1}, CU_TENSOR_MAP_DATA_TYPE_UINT8);
  }
  return sm90::make_tensor_map<5>(
      context.op, cache.data, {64, kBlock, 2, heads, pages},
      {static_cast<uint64_t>(cache.token_stride) * 2, 128,
       static_cast<uint64_t>(cache.head_stride) * 2, static_cast<uint64_t>(cache.page_stride) * 2},
      {64, kBlock, 2, 1, 1});
}

}  // namespace msa
