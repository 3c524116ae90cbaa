// Every operator of the library: the only place where schemas are declared.
//
// Letters are those of docs/glossary.md. Shapes below are [logical axes]; strides are free wherever
// the public docstring (msa_kernels/ops/) says so. Optional integers are host hints: they may
// choose a kernel or size a grid, never a result. Written arguments are not called `out`:
// torch.compile refuses a strided tensor under that name.
//
//   index_q       [T, Hi, Di]           q        [T, Hq, D]
//   index_k_cache [pages, 128, Di]      k_cache  [pages, Hkv, 128, D]   v_cache likewise
//   block_table   [B, max_pages] i32    cu_seqlens_q [B+1] i32          seq_lens [B] i32
//   ids           [Hi, T, K] i32|i64    k_scale, v_scale: f32, 1 element or [Hkv]
//
// This file needs g++ and torch's stable headers, nothing of CUDA.
#include "host/torch_stable.h"

STABLE_TORCH_LIBRARY(msa, m) {
  // step 0, write: k, v, index_k of new tokens -> their slots in the three caches.
  m.def(
      "write_cache(Tensor k, Tensor v, Tensor? index_k, Tensor slot_mapping, "
      "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? index_k_cache, *, "
      "Tensor? k_scale=None, Tensor? v_scale=None) -> ()");

  // step 1, score: -> f32 [Hi, T, max_pages], -inf where a block is not visible.
  m.def(
      "index_score(Tensor index_q, Tensor index_k_cache, Tensor block_table, Tensor cu_seqlens_q, "
      "Tensor seq_lens, *, int? max_seqlen_q=None, int? max_seqlen_k=None) -> Tensor");
  m.def(
      "index_score.out(Tensor index_q, Tensor index_k_cache, Tensor block_table, "
      "Tensor cu_seqlens_q, Tensor seq_lens, *, int? max_seqlen_q=None, int? max_seqlen_k=None, "
      "Tensor(a!) scores) -> ()");

  // step 2, select: scores [Hi, T, blocks] and visible_blocks [T] -> ids; or both steps at once.
  m.def(
      "topk_blocks(Tensor scores, Tensor visible_blocks, int topk=16, *, int init_blocks=0, "
      "int local_blocks=1) -> Tensor");
  m.def(
      "topk_blocks.out(Tensor scores, Tensor visible_blocks, int topk=16, *, int init_blocks=0, "
      "int local_blocks=1, Tensor(a!) ids) -> ()");
  m.def(
      "select_blocks(Tensor index_q, Tensor index_k_cache, Tensor block_table, "
      "Tensor cu_seqlens_q, Tensor seq_lens, int topk=16, *, int init_blocks=0, "
      "int local_blocks=1, int? max_seqlen_q=None, int? max_seqlen_k=None) -> Tensor");
  m.def(
      "select_blocks.out(Tensor index_q, Tensor index_k_cache, Tensor block_table, "
      "Tensor cu_seqlens_q, Tensor seq_lens, int topk=16, *, int init_blocks=0, "
      "int local_blocks=1, int? max_seqlen_q=None, int? max_seqlen_k=None, "
      "Tensor(a!) ids) -> ()");

  // step 3, prefill, remap: ids {q -> blocks} -> {block -> q}:
  // (row_ptr [Hkv*B*max_blocks + 1], pairs [Hkv*T*K], work_items [W, 3], num_work_items [1]), i32.
  m.def(
      "kv_block_schedule(Tensor ids, Tensor cu_seqlens_q, Tensor seq_lens, int max_blocks, "
      "int max_queries_per_item=64) -> (Tensor, Tensor, Tensor, Tensor)");

  // step 3, decode, view: ids -> (page_table [T*Hkv, K] i32, kv_lens [T*Hkv] i32) over the cache
  // seen as per-head pages: view page = page * page_step + head * head_step.
  m.def(
      "decode_view(Tensor ids, Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens, "
      "int num_pages, int page_step, int head_step) -> (Tensor, Tensor)");
  m.def(
      "decode_view.out(Tensor ids, Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens, "
      "int num_pages, int page_step, int head_step, *, Tensor(a!) page_table, "
      "Tensor(b!) kv_lens) -> ()");

  // step 4, attend: -> (out [T, Hq, D] in q's dtype, lse f32 [T, Hq], or [0] unless asked for).
  m.def(
      "sparse_prefill(Tensor q, Tensor k_cache, Tensor v_cache, Tensor ids, Tensor block_table, "
      "Tensor cu_seqlens_q, Tensor seq_lens, *, float? scale=None, Tensor? k_scale=None, "
      "Tensor? v_scale=None, bool return_lse=False, int? max_seqlen_q=None, "
      "int? max_seqlen_k=None, bool batch_invariant=False) -> (Tensor, Tensor)");
  m.def(
      "sparse_prefill.out(Tensor q, Tensor k_cache, Tensor v_cache, Tensor ids, "
      "Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens, *, float? scale=None, "
      "Tensor? k_scale=None, Tensor? v_scale=None, int? max_seqlen_q=None, "
      "int? max_seqlen_k=None, bool batch_invariant=False, Tensor(a!) output, Tensor(b!)? "
      "lse=None) -> ()");
  m.def(
      "sparse_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor ids, Tensor block_table, "
      "Tensor cu_seqlens_q, Tensor seq_lens, *, float? scale=None, Tensor? k_scale=None, "
      "Tensor? v_scale=None, bool return_lse=False, int? max_seqlen_q=None, "
      "int? max_seqlen_k=None) -> (Tensor, Tensor)");
  m.def(
      "sparse_decode.out(Tensor q, Tensor k_cache, Tensor v_cache, Tensor ids, "
      "Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens, *, float? scale=None, "
      "Tensor? k_scale=None, Tensor? v_scale=None, int? max_seqlen_q=None, "
      "int? max_seqlen_k=None, Tensor(a!) output, Tensor(b!)? lse=None) -> ()");
  // page_table [R, pages] i32, kv_lens [R] i32: a row is one token (no cu_seqlens_q), or one
  // request.
  m.def(
      "paged_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor kv_lens, "
      "*, "
      "Tensor? cu_seqlens_q=None, float? scale=None, Tensor? k_scale=None, Tensor? v_scale=None, "
      "bool return_lse=False, int? max_seqlen_q=None, int? max_seqlen_k=None) "
      "-> (Tensor, Tensor)");
  m.def(
      "paged_decode.out(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, "
      "Tensor kv_lens, *, Tensor? cu_seqlens_q=None, float? scale=None, Tensor? k_scale=None, "
      "Tensor? v_scale=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
      "Tensor(a!) output, Tensor(b!)? lse=None) -> ()");

  // step 5, merge: outs [P, T, H, D], lses f32 [P, T, H] -> (out [T, H, D], lse f32 [T, H]).
  m.def("merge_lse(Tensor outs, Tensor lses) -> (Tensor, Tensor)");
  m.def("merge_lse.out(Tensor outs, Tensor lses, *, Tensor(a!) output, Tensor(b!) lse) -> ()");
  // The same for parts that do not lie in one tensor: P times [T, H, D] and [T, H].
  m.def("merge_lse.parts(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)");

  // media: uint8 pixels [rows, 3 * frames * patch^2] -> [rows, 3 * temporal * patch^2] of `dtype`.
  m.def(
      "normalize_patches(Tensor patches, float[] mean, float[] std, *, int patch=14, "
      "int temporal=2, ScalarType dtype) -> Tensor");
  m.def(
      "normalize_patches.out(Tensor patches, float[] mean, float[] std, *, int patch=14, "
      "int temporal=2, Tensor(a!) output) -> ()");

  // What this build contains, as JSON: build_info speaks for this library, cuda_build_info for the
  // library with the CUDA kernels (which implements it; absent without one).
  m.def("build_info() -> str");
  m.def("cuda_build_info() -> str");
}
