"""A `seq_lens` entry below 0 is one of 0, also where positions counted back from it would wrap: the
request's tokens see nothing, and every other request keeps its own."""

import functools

import pytest
import torch

import msa_kernels
from tests.inputs import BLOCK, FP8, dtype_name, make_case, same_bits
from tests.tolerance import assert_attention, assert_ids, assert_scores

LENGTHS = [-1, -(2**31), -(2**31) + 2]
CACHES = [torch.bfloat16, FP8]
BATCHES = {
    "prefill": [(40, 6 * BLOCK + 70), (5, 900), (20, 20)],
    "drafts": [(4, 6 * BLOCK + 2), (4, 300), (3, 500)],
    "decode": [(1, 6 * BLOCK + 2), (1, 300), (1, 500)],
    "many": [(1, 3 * BLOCK)] * 150,
}
"""name -> (query tokens, length) of each request"""

pytestmark = pytest.mark.parametrize("length", LENGTHS)


def make(batch, device, cache=torch.bfloat16):
    dtypes = dict(dtype=torch.bfloat16, cache_dtype=cache, index_dtype=cache)
    return make_case(BATCHES[batch], hq=16, hkv=2, device=device, **dtypes)


def without_a_request(case, length):
    """The case with that length of its second request, and with a length of 0."""
    cases = []
    for value in (length, 0):
        lengths = case.seq_lens.clone()
        lengths[1] = value
        cases.append(case.with_(seq_lens=lengths))
    return cases


@pytest.mark.parametrize("cache", CACHES, ids=dtype_name)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("op", ["sparse_prefill", "sparse_decode"])
def test_attention(device, require, op, batch, cache, length):
    require(op, torch.bfloat16, cache)
    case, empty = without_a_request(make(batch, device, cache), length)
    out, lse = getattr(msa_kernels, op)(*case.attend_args, **case.scales, return_lse=True)
    assert_attention(empty, out, lse)
    first, end = case.cu_seqlens_q[1:3].tolist()
    assert not bool(out[first:end].any())


@pytest.mark.parametrize("cache", CACHES, ids=dtype_name)
@pytest.mark.parametrize("batch", ["drafts", "decode", "many"])
def test_paged_decode(device, require, batch, cache, length):
    require("paged_decode", torch.bfloat16, cache)
    case, empty = without_a_request(make(batch, device, cache), length)

    paged = (case.q, case.k_cache, case.v_cache, case.block_table)
    starts = dict(cu_seqlens_q=case.cu_seqlens_q)
    call = functools.partial(msa_kernels.paged_decode, *paged, **case.scales, **starts)
    out, lse = call(case.seq_lens, return_lse=True)
    for mine, other in zip((out, lse), call(empty.seq_lens, return_lse=True), strict=True):
        assert same_bits(mine, other)
    first, end = case.cu_seqlens_q[1:3].tolist()
    assert not bool(out[first:end].any())


@pytest.mark.parametrize("cache", CACHES, ids=dtype_name)
@pytest.mark.parametrize("batch", BATCHES)
def test_index(device, require, batch, cache, length):
    require("index_score", cache, cache)
    case, empty = without_a_request(make(batch, device, cache), length)
    assert_scores(msa_kernels.index_score(*case.index_args), empty)
    ids = msa_kernels.select_blocks(*case.index_args)
    first, end = case.cu_seqlens_q[1:3].tolist()
    assert bool((ids[:, first:end] == -1).all())
    assert_ids(ids, msa_kernels.select_blocks(*empty.index_args))


@pytest.mark.parametrize("batch", BATCHES)
def test_plans(device, require, batch, length):
    require("kv_block_schedule")
    case, empty = without_a_request(make(batch, device), length)

    def counts(case):
        lengths = (case.cu_seqlens_q, case.seq_lens, case.block_table.size(1))
        return msa_kernels.kv_block_schedule(case.ids, *lengths).row_ptr

    assert torch.equal(counts(case), counts(empty))
    views = [msa_kernels.decode_view(x.ids, *x.batch, x.k_cache, x.v_cache) for x in (case, empty)]
    for name in ("page_table", "kv_lens"):
        assert torch.equal(*(getattr(view, name) for view in views))
