// CUDA side of the operators whose kernels are not written yet: a clear refusal. A kernel that
// comes takes its run_<op>() out of here and adds its lines to configs/built_configs.h.
#include "configs/built_configs.h"
#include "step0_write/write_cache_params.h"
#include "step1_score/index_score_params.h"
#include "step2_select/select_blocks_params.h"

namespace msa {

void run_write_cache(const WriteCacheParams& params, const ExecContext& context) {
  throw_not_built(context.op, params.k.dtype, params.k_cache.dtype);
}
void run_index_score(const IndexScoreParams& params, const ExecContext& context) {
  throw_not_built(context.op, params.index_q.dtype, params.index_k_cache.dtype);
}
void run_topk_blocks(const TopkBlocksParams&, const ExecContext& context) {
  throw_not_built(context.op, DType::kFloat32);
}
void run_select_blocks(const SelectBlocksParams& params, const ExecContext& context) {
  throw_not_built(context.op, params.index_q.dtype, params.index_k_cache.dtype);
}

}  // namespace msa
