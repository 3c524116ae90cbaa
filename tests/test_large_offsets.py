"""Pools of more than 2^31 elements: every offset is 64-bit.

The pool is address space: only the pages that are used take memory.
"""

import pytest
import torch

import msa_kernels

PAGE_STRIDE = 2**30  # elements; page 3 begins past 3 * 2^30
POOL = 3 * PAGE_STRIDE + 2 * 128 * 128


def far_and_near(shape, dtype, head_stride):
    """(cache whose page 3 lies past 2^31 elements, the same as a small contiguous cache)."""
    try:
        pool = torch.empty(POOL, dtype=dtype)
    except RuntimeError as error:
        pytest.skip(f"{POOL} elements of address space are not to be had: {error}")
    strides = (PAGE_STRIDE, head_stride, 128, 1) if len(shape) == 4 else (PAGE_STRIDE, 128, 1)
    return pool.as_strided(shape, strides), torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("heads", [1, 2])
def test_every_operator_that_reads_or_writes_pages(heads):
    torch.manual_seed(0)
    tokens, dtype = 128, torch.bfloat16
    far_k, near_k = far_and_near((4, heads, 128, 128), dtype, 128 * 128)
    far_v, near_v = far_and_near((4, heads, 128, 128), dtype, 128 * 128)
    far_i, near_i = far_and_near((4, 128, 128), dtype, 0)
    q, k, v = (torch.randn(tokens, h, 128).to(dtype) for h in (4 * heads, heads, heads))
    index_q, index_k = torch.randn(tokens, heads, 128).to(dtype), torch.randn(tokens, 128).to(dtype)
    slots = 3 * 128 + torch.arange(tokens)
    table = torch.tensor([[3]], dtype=torch.int32)
    lengths = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens]).int()
    found = []
    for cache in ((far_k, far_v, far_i), (near_k, near_v, near_i)):
        msa_kernels.write_cache(k, v, index_k, slots, *cache)
        assert torch.equal(cache[0][3].transpose(0, 1), k)
        assert torch.equal(cache[2][3], index_k)
        scores = msa_kernels.index_score(index_q, cache[2], table, *lengths)
        ids = msa_kernels.select_blocks(index_q, cache[2], table, *lengths)
        out = msa_kernels.sparse_prefill(q, *cache[:2], ids, table, *lengths)
        dense = msa_kernels.paged_decode(q, *cache[:2], table, lengths[1], cu_seqlens_q=lengths[0])
        view = msa_kernels.decode_view(ids, table, *lengths, *cache[:2])
        by_view = msa_kernels.paged_decode(
            q.view(tokens * heads, 4, 128), view.k_view, view.v_view, view.page_table, view.kv_lens
        )
        found.append((scores, ids, out, dense, by_view))
    for far, near in zip(*found, strict=True):
        assert torch.equal(far, near)
