#include "bindings/launch_functions.h"
#include "checks/op_checks.h"
#include "host/launch.h"
#include "step0_write/write_cache_params.h"

namespace msa {

void launch_write_cache(const Tensor& k, const Tensor& v, const OptionalTensor& index_k,
                        const Tensor& slot_mapping, const Tensor& k_cache, const Tensor& v_cache,
                        const OptionalTensor& index_k_cache, const OptionalTensor& k_scale,
                        const OptionalTensor& v_scale) {
  const TensorInfo k_info = info("k", k), v_info = info("v", v);
  const TensorInfo index_k_info = info("index_k", index_k);
  const TensorInfo slots = info("slot_mapping", slot_mapping);
  const TensorInfo k_cache_info = info("k_cache", k_cache), v_cache_info = info("v_cache", v_cache);
  const TensorInfo index_cache_info = info("index_k_cache", index_k_cache);
  const TensorInfo k_scale_info = info("k_scale", k_scale), v_scale_info = info("v_scale", v_scale);
  check_write_cache(k_info, v_info, index_k_info, slots, k_cache_info, v_cache_info,
                    index_cache_info, k_scale_info, v_scale_info);
  if (k_info.size(0) == 0) return;

  WriteCacheParams params{};
  params.k = rows_view(k_info);
  params.v = rows_view(v_info);
  params.index_k = rows_view(index_k_info);
  params.slot_mapping = static_cast<const int64_t*>(slots.data);
  params.slot_stride = slots.stride(0);
  params.k_cache = paged_view(k_cache_info);
  params.v_cache = paged_view(v_cache_info);
  params.index_k_cache = paged_view(index_cache_info);
  params.k_scale = scale_view(k_scale_info);
  params.v_scale = scale_view(v_scale_info);
  params.num_tokens = k_info.size(0);
  params.num_kv_heads = k_info.size(1);
  run_write_cache(params, ExecScope("write_cache", k));
}

}  // namespace msa
