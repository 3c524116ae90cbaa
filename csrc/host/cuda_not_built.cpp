// CUDA side of the operators whose kernels are not written yet: a clear refusal. A kernel that
// comes takes its run_<op>() out of here and adds its lines to configs/built_configs.h.
#include "configs/built_configs.h"
#include "step3_view/decode_view_params.h"
#include "step4_attend/attend_params.h"

namespace msa {

void run_decode_view(const DecodeViewParams& params, const ExecContext& context) {
  throw_not_built(context.op, params.ids.dtype);
}
void run_sparse_decode(const SparseAttendParams& params, const ExecContext& context) {
  throw_not_built(context.op, params.q.dtype, params.k_cache.dtype);
}
void run_paged_decode(const AttendParams& params, const ExecContext& context) {
  throw_not_built(context.op, params.q.dtype, params.k_cache.dtype);
}

}  // namespace msa
