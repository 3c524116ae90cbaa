// Operator -> launch function: the only place of registration, compiled into both libraries, for
// the dispatch key that each of them serves (MSA_DISPATCH_KEY: CPU or CUDA).
#include "bindings/box.h"
#include "bindings/launch_functions.h"
#include "host/build_info.h"

// The macro's key argument must be expanded before the registration macro turns it into a string.
#define MSA_LIBRARY_IMPL(key, m) STABLE_TORCH_LIBRARY_IMPL(msa, key, m)

MSA_LIBRARY_IMPL(MSA_DISPATCH_KEY, m) {
  using namespace msa;
  m.impl("write_cache", MSA_BOX(launch_write_cache));
  m.impl("index_score", MSA_BOX(launch_index_score));
  m.impl("index_score.out", MSA_BOX(launch_index_score_out));
  m.impl("topk_blocks", MSA_BOX(launch_topk_blocks));
  m.impl("topk_blocks.out", MSA_BOX(launch_topk_blocks_out));
  m.impl("select_blocks", MSA_BOX(launch_select_blocks));
  m.impl("select_blocks.out", MSA_BOX(launch_select_blocks_out));
  m.impl("kv_block_schedule", MSA_BOX(launch_kv_block_schedule));
  m.impl("decode_view", MSA_BOX(launch_decode_view));
  m.impl("decode_view.out", MSA_BOX(launch_decode_view_out));
  m.impl("sparse_prefill", MSA_BOX(launch_sparse_prefill));
  m.impl("sparse_prefill.out", MSA_BOX(launch_sparse_prefill_out));
  m.impl("sparse_decode", MSA_BOX(launch_sparse_decode));
  m.impl("sparse_decode.out", MSA_BOX(launch_sparse_decode_out));
  m.impl("paged_decode", MSA_BOX(launch_paged_decode));
  m.impl("paged_decode.out", MSA_BOX(launch_paged_decode_out));
  m.impl("merge_lse", MSA_BOX(launch_merge_lse));
  m.impl("merge_lse.out", MSA_BOX(launch_merge_lse_out));
  m.impl("merge_lse.parts", MSA_BOX(launch_merge_lse_parts));
  m.impl("normalize_patches", MSA_BOX(launch_normalize_patches));
  m.impl("normalize_patches.out", MSA_BOX(launch_normalize_patches_out));
}

// Takes no tensors, so no backend key can find it.
STABLE_TORCH_LIBRARY_IMPL(msa, CompositeExplicitAutograd, m) {
#ifdef MSA_BACKEND_CUDA
  m.impl("cuda_build_info", MSA_BOX(msa::build_info));
#else
  m.impl("build_info", MSA_BOX(msa::build_info));
#endif
}
