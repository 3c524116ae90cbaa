"""Tensors of more than 2^31 elements: every offset is 64-bit.

On a CPU a pool is address space: only the pages that are used take memory. On a GPU it is memory,
of which one allocation serves all three caches.
"""

import pytest
import torch

import msa_kernels
from tests.conftest import no_gpu_reason
from tests.inputs import BLOCK, FP8, D, dtype_name, each_alone, make_case, same_bits
from tests.tolerance import assert_attention

PAGE_STRIDE = 2**30  # elements
FAR, NEAR = 4, 0
"""pages: one begins past 2^32 elements, where 32 bits wrap to the other, signed or not"""
TOPK = 5


@pytest.fixture(autouse=True)
def return_memory():
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # other processes test beside this one


def far_caches(heads: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """(K, V, index) caches of 5 pages, side by side in one pool, page after page far apart."""
    page = heads * BLOCK * D
    try:
        pool = torch.empty(FAR * PAGE_STRIDE + 3 * page, dtype=dtype, device=device)
    except RuntimeError as error:
        if device != "cpu":
            raise
        pytest.skip(f"a pool of {FAR * PAGE_STRIDE} elements is not to be had: {error}")
    shape, strides = (FAR + 1, heads, BLOCK, D), (PAGE_STRIDE, BLOCK * D, D, 1)
    caches = [pool.as_strided(shape, strides, i * page) for i in range(3)]
    return [*caches[:2], caches[2][:, 0]]


def near_caches(heads: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    k, v = (torch.zeros(FAR + 1, heads, BLOCK, D, device=device).to(dtype) for _ in range(2))
    return [k, v, k[:, 0].clone()]


@pytest.mark.parametrize(
    "requests,tokens,blocks",
    [
        # Hopper: few tokens; tiles of drafts; as many rows as clusters do not take; chunks with a
        # short and a long plan; a table no wider than a selection. The long table is for the parts
        # of paged_decode.
        (1, 1, 70),
        (32, 8, 20),
        (300, 1, 7),
        (1, 128, 7),
        (1, 600, 20),
        (2, 300, TOPK),
    ],
)
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=dtype_name)
def test_every_operator_that_reads_or_writes_pages(
    device, require, dtype, heads, requests, tokens, blocks
):
    """As over small caches, bit for bit, on every kind of call."""
    require("write_cache", torch.bfloat16, dtype)
    group = 16
    if device == "cpu":  # which has one kernel of each operator
        group, requests, tokens = 2, min(requests, 2), min(tokens, 40)
    rng = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(device, torch.bfloat16)

    # Blocks stand on the two pages in turn, the last one on the far one.
    table = torch.tensor([NEAR, FAR]).repeat(blocks)[-blocks:].expand(requests, -1)
    table = table.int().contiguous().to(device)
    starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * tokens
    seq_lens = torch.full((requests,), blocks * BLOCK, dtype=torch.int32, device=device)
    batch = (table, starts, seq_lens)
    q, index_q = (draw(requests * tokens, h, D) for h in (group * heads, heads))
    k, v, index_k = draw(2 * BLOCK, heads, D), draw(2 * BLOCK, heads, D), draw(2 * BLOCK, D)
    slots = torch.tensor([NEAR, FAR])[:, None] * BLOCK + torch.arange(BLOCK)
    slots = slots.flatten().to(device)
    index_q, index_k = index_q.to(dtype), index_k.to(dtype)
    scales = {"k_scale": 0.5, "v_scale": 0.25} if dtype == FP8 else {}

    found = []
    for caches in (f(heads, dtype, device) for f in (far_caches, near_caches)):
        msa_kernels.write_cache(k, v, index_k, slots, *caches, **scales)
        scores = msa_kernels.index_score(index_q, caches[2], *batch)
        ids = msa_kernels.select_blocks(index_q, caches[2], *batch, TOPK)
        attend = (q, *caches[:2], ids, *batch)
        prefill = msa_kernels.sparse_prefill(*attend, **scales, return_lse=True)
        decode = msa_kernels.sparse_decode(*attend, **scales, return_lse=True)
        paged = msa_kernels.paged_decode(
            q, *caches[:2], table, seq_lens, cu_seqlens_q=starts, **scales
        )
        view = msa_kernels.decode_view(ids, *batch, *caches[:2])
        by_view = msa_kernels.paged_decode(
            q.view(-1, group, D), view.k_view, view.v_view, view.page_table, view.kv_lens, **scales
        )
        pages = [cache[[NEAR, FAR]].view(torch.uint8) for cache in caches]
        found.append((*pages, scores, ids, *prefill, *decode, paged, view.kv_lens, by_view))
        del caches, attend, view
    assert bool(found[0][5].isfinite().all()) and bool(found[0][4].max() > 0)
    for index, (far, near) in enumerate(zip(*found, strict=True)):
        assert same_bits(far, near), f"result {index}"


@pytest.mark.gpu
@pytest.mark.parametrize("operator", ["sparse_prefill", "sparse_decode", "paged_decode"])
def test_more_than_2_31_elements_of_queries(operator):
    """q and out past 2^31 elements: some rows and the last, by the policy."""
    if reason := no_gpu_reason():
        pytest.skip(reason)
    each = 2**18 + 640 if operator == "sparse_prefill" else 64  # query tokens of a request
    requests, hq, hkv = (2**18 + 640) // each, 64, 4
    tokens = requests * each
    few = make_case([(16, 1280)], hq=hq, hkv=hkv, selection="none", padding_rows=0, device="cuda")
    rng = torch.Generator("cuda").manual_seed(0)
    draw = {"generator": rng, "device": "cuda"}
    q = torch.empty(tokens, hq, D, dtype=torch.bfloat16, device="cuda").normal_(generator=rng)
    # One request of as many tokens as that, or many of up to 10 blocks; over the same 10 pages.
    lens = torch.full((1,), tokens, device="cuda")
    if requests > 1:
        lens = torch.randint(each, 1281, (requests,), **draw)
    table = few.block_table[:, torch.arange(int(lens.max() - 1) // BLOCK + 1, device="cuda") % 10]
    table = table.expand(requests, -1)
    pos = (lens[:, None] - each + torch.arange(each, device="cuda")).flatten()
    visible = pos // BLOCK + 1
    # Half of the tokens select alone, half 16 neighbours together: 15 blocks and their own.
    first = torch.rand(hkv, tokens, **draw)
    together = torch.arange(0, tokens, device="cuda") // 16 * 16
    first = first.where(torch.arange(tokens, device="cuda") % 4096 < 2048, first[:, together])
    first = (first * (visible - 16).clamp(min=0)).int()
    ids = first[..., None] + torch.arange(16, dtype=torch.int32, device="cuda")
    ids[..., 15] = torch.where(visible > 16, visible - 1, 15)
    case = few.with_(
        lengths=[(each, length) for length in lens.tolist()],
        q=q,
        ids=ids,
        block_table=table,
        cu_seqlens_q=torch.arange(requests + 1, dtype=torch.int32, device="cuda") * each,
        seq_lens=lens.int(),
    )
    rows = torch.randint(tokens, (24,), generator=torch.Generator().manual_seed(1))
    rows = torch.cat([rows, torch.arange(2**18 - 4, 2**18 + 4), torch.arange(tokens - 8, tokens)])
    rows = rows.unique().to(q.device)
    if operator == "paged_decode":
        args = (q, case.k_cache, case.v_cache, table, case.seq_lens)
        out, lse = msa_kernels.paged_decode(*args, cu_seqlens_q=case.cu_seqlens_q, return_lse=True)
        every = torch.arange(16, dtype=torch.int32, device="cuda")
        case = case.with_(ids=every.expand(hkv, tokens, 16))
    else:
        out, lse = getattr(msa_kernels, operator)(*case.attend_args, return_lse=True)
    assert out.numel() > 2**31
    assert_attention(each_alone(case, rows), out[rows], lse[rows], None, operator)
