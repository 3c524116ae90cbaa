"""The operators as engines see them: names, schemas, fakes."""

import torch

import msa_kernels
from msa_kernels import _fakes

# The contract with engines. A change here is a change of the public interface.
SCHEMAS = """
build_info() -> str
cuda_build_info() -> str
decode_view(Tensor ids, Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens, int num_pages, int page_step, int head_step) -> (Tensor, Tensor)
decode_view.out(Tensor ids, Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens, int num_pages, int page_step, int head_step, *, Tensor(a!) page_table, Tensor(b!) kv_lens) -> ()
index_score(Tensor index_q, Tensor index_k_cache, Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens, *, int? max_seqlen_q=None, int? max_seqlen_k=None) -> Tensor
index_score.out(Tensor index_q, Tensor index_k_cache, Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens, *, int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor(a!) scores) -> ()
kv_block_schedule(Tensor ids, Tensor cu_seqlens_q, Tensor seq_lens, int max_blocks, int max_queries_per_item=64) -> (Tensor, Tensor, Tensor, Tensor)
merge_lse(Tensor outs, Tensor lses) -> (Tensor, Tensor)
merge_lse.out(Tensor outs, Tensor lses, *, Tensor(a!) output, Tensor(b!) lse) -> ()
merge_lse.parts(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)
normalize_patches(Tensor patches, float[] mean, float[] std, *, int patch=14, int temporal=2, ScalarType dtype) -> Tensor
normalize_patches.out(Tensor patches, float[] mean, float[] std, *, int patch=14, int temporal=2, Tensor(a!) output) -> ()
paged_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor kv_lens, *, Tensor? cu_seqlens_q=None, float? scale=None, Tensor? k_scale=None, Tensor? v_scale=None, bool return_lse=False, int? max_seqlen_q=None, int? max_seqlen_k=None) -> (Tensor, Tensor)
paged_decode.out(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor kv_lens, *, Tensor? cu_seqlens_q=None, float? scale=None, Tensor? k_scale=None, Tensor? v_scale=None, int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor(a!) output, Tensor(b!)? lse=None) -> ()
select_blocks(Tensor index_q, Tensor index_k_cache, Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens, int topk=16, *, int init_blocks=0, int local_blocks=1, int? max_seqlen_q=None, int? max_seqlen_k=None) -> Tensor
select_blocks.out(Tensor index_q, Tensor index_k_cache, Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens, int topk=16, *, int init_blocks=0, int local_blocks=1, int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor(a!) ids) -> ()
sparse_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor ids, Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens, *, float? scale=None, Tensor? k_scale=None, Tensor? v_scale=None, bool return_lse=False, int? max_seqlen_q=None, int? max_seqlen_k=None) -> (Tensor, Tensor)
sparse_decode.out(Tensor q, Tensor k_cache, Tensor v_cache, Tensor ids, Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens, *, float? scale=None, Tensor? k_scale=None, Tensor? v_scale=None, int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor(a!) output, Tensor(b!)? lse=None) -> ()
sparse_prefill(Tensor q, Tensor k_cache, Tensor v_cache, Tensor ids, Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens, *, float? scale=None, Tensor? k_scale=None, Tensor? v_scale=None, bool return_lse=False, int? max_seqlen_q=None, int? max_seqlen_k=None, bool batch_invariant=False) -> (Tensor, Tensor)
sparse_prefill.out(Tensor q, Tensor k_cache, Tensor v_cache, Tensor ids, Tensor block_table, Tensor cu_seqlens_q, Tensor seq_lens, *, float? scale=None, Tensor? k_scale=None, Tensor? v_scale=None, int? max_seqlen_q=None, int? max_seqlen_k=None, bool batch_invariant=False, Tensor(a!) output, Tensor(b!)? lse=None) -> ()
topk_blocks(Tensor scores, Tensor visible_blocks, int topk=16, *, int init_blocks=0, int local_blocks=1) -> Tensor
topk_blocks.out(Tensor scores, Tensor visible_blocks, int topk=16, *, int init_blocks=0, int local_blocks=1, Tensor(a!) ids) -> ()
write_cache(Tensor k, Tensor v, Tensor? index_k, Tensor slot_mapping, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? index_k_cache, *, Tensor? k_scale=None, Tensor? v_scale=None) -> ()
""".strip().splitlines()


def registered() -> list:
    schemas = torch._C._jit_get_all_schemas()
    return [schema for schema in schemas if schema.name.startswith("msa::")]


def test_schemas_are_the_contract():
    found = sorted(str(schema).removeprefix("msa::") for schema in registered())
    assert found == sorted(SCHEMAS)


def test_every_operator_has_a_cpu_kernel_and_a_fake():
    for schema in registered():
        if schema.name.endswith("build_info"):
            continue
        name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"), name
        assert name.removeprefix("msa::") in _fakes._FAKES, name


def test_every_operator_is_public_and_has_a_reference():
    for op in {schema.name.removeprefix("msa::") for schema in registered()}:
        if not op.endswith("build_info"):
            assert op in msa_kernels.__all__, op
            assert hasattr(msa_kernels.reference, op), op
