"""paged_decode against the reference: dense attention over any page table."""

import pytest
import torch

import msa_kernels
from msa_kernels import reference
from tests.inputs import (
    BATCHES,
    BLOCK,
    DTYPES,
    LAYOUTS,
    D,
    dtype_name,
    guarded,
    make_case,
    same_bits,
)
from tests.tolerance import (
    assert_close,
    assert_lse_close,
    attention_floor,
    attention_in_dtype,
    near,
)


def check(case, by_request=True, **options):
    """The operator on the case's whole table, by request (causal) or by row."""
    if by_request:
        table, lens, cu = case.block_table, case.seq_lens, case.cu_seqlens_q
    else:  # every row with a table and a length of its own
        where = reference.token_positions(case.cu_seqlens_q, case.seq_lens, case.num_tokens)
        table, lens, cu = case.block_table[where.request], (where.pos + 1).clamp(0).int(), None
    args = (case.q, case.k_cache, case.v_cache, table, lens)
    out, lse = msa_kernels.paged_decode(
        *args, cu_seqlens_q=cu, return_lse=True, **case.scales, **options
    )
    exact, exact_lse = reference.paged_decode(
        *args, cu_seqlens_q=cu, **case.scales, compute_dtype=torch.float64
    )
    # Dense attention is the selection of every block.
    width = max(1, case.block_table.size(1))
    every = torch.arange(width, dtype=torch.int32, device=case.q.device)
    dense = case.with_(ids=every.expand(case.k_cache.size(1), case.num_tokens, width))
    assert_close(out, exact, attention_in_dtype(dense), floor=attention_floor(exact, exact_lse))
    assert_lse_close(lse, exact_lse)
    return out, lse


@pytest.mark.parametrize(
    "batch,by_request",
    # A table of rows needs requests to take them from.
    [(b, True) for b in BATCHES] + [(b, False) for b in BATCHES if b != "no_requests"],
)
@pytest.mark.parametrize("dtypes", DTYPES, ids=dtype_name)
def test_batches(device, require, dtypes, batch, by_request):
    require("paged_decode", *dtypes)
    case = make_case(
        batch,
        dtype=dtypes[0],
        cache_dtype=dtypes[1],
        strided=by_request,
        hq=4,
        device=device,
    )
    check(case, by_request)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("hq,hkv", [(16, 1), (8, 4), (2, 2)])
def test_layouts_and_heads(device, require, layout, hq, hkv):
    require("paged_decode")
    lengths = [(3, 1007), (30, 414), (1, 1)]
    case = make_case(lengths, hq=hq, hkv=hkv, layout=layout, poison="inf", device=device)
    check(case)
    check(case, by_request=False)


@pytest.mark.parametrize("dtypes", [DTYPES[1], DTYPES[2]], ids=dtype_name)
@pytest.mark.parametrize("max_pages,hkv", [(64, 1), (65, 2), (200, 1), (1100, 1), (1100, 4)])
def test_wide_tables(device, require, dtypes, max_pages, hkv):
    """What a kernel cuts a row in may follow the table's width: short rows leave parts empty."""
    require("paged_decode", *dtypes)
    lengths = [(1, 5000), (1, 130), (2, 7999), (1, 1)]
    options = dict(dtype=dtypes[0], cache_dtype=dtypes[1], device=device)
    check(make_case(lengths, hq=4 * hkv, hkv=hkv, max_pages=max_pages, **options))


@pytest.mark.parametrize("dtypes", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("group", [1, 4, 16])
def test_a_million_tokens(device, require, dtypes, group):
    """8,192 live blocks, 8 pages again and again: every key 1,024 times is every key once."""
    require("paged_decode", *dtypes)
    group = group if device == "cuda" else min(group, 2)
    case = make_case(
        [(1, 8 * BLOCK), (1, 8 * BLOCK), (1, 3 * BLOCK)],
        hq=group,
        hkv=1,
        dtype=dtypes[0],
        cache_dtype=dtypes[1],
        max_pages=8,
        padding_rows=0,
        device=device,
    )
    times = torch.tensor([1024, 512, 1], device=device)
    table = case.block_table.repeat(1, 1024)
    args = (case.q, case.k_cache, case.v_cache, table, case.seq_lens * times.int())
    out, lse = msa_kernels.paged_decode(*args, **case.scales, return_lse=True)
    once = (*args[:3], case.block_table, case.seq_lens)
    exact, exact_lse = reference.paged_decode(*once, **case.scales, compute_dtype=torch.float64)
    every = torch.arange(8, dtype=torch.int32, device=device)
    dense = case.with_(ids=every.expand(1, case.num_tokens, 8))
    exact_lse += times[:, None].log()
    floor = 1024**0.5 * attention_floor(exact, exact_lse)  # so many more terms to sum in FP32
    assert_close(out, exact, attention_in_dtype(dense), floor=floor)
    assert_lse_close(lse, exact_lse)


def test_lengths_past_the_table(device, require):
    """A row longer than its table is taken as long as the table."""
    require("paged_decode")
    case = make_case([(1, 700), (1, 256), (2, 384)], max_pages=3, padding_rows=0, device=device)
    args = (case.q[:2], case.k_cache, case.v_cache, case.block_table[:2])
    lens = torch.tensor([2**31 - 1, -5], dtype=torch.int32, device=device)
    out, lse = msa_kernels.paged_decode(*args, lens, return_lse=True)
    full = torch.tensor([3 * BLOCK, 0], dtype=torch.int32, device=device)
    want, want_lse = msa_kernels.paged_decode(*args, full, return_lse=True)
    assert same_bits(out, want) and same_bits(lse, want_lse)
    assert not bool(out[1].any()) and bool((lse[1] == float("-inf")).all())


def test_pages_outside_the_cache_add_nothing(device, require):
    require("paged_decode")
    case = make_case("chunks", device=device)
    case.block_table[0, 3] = -1
    case.block_table[1, 17] = case.k_cache.size(0)
    case.block_table[1, 2] = 2**31 - 1
    case.block_table[2, 0] = -(2**31)
    args = (case.q, case.k_cache, case.v_cache, case.block_table, case.seq_lens)
    out, lse = msa_kernels.paged_decode(*args, cu_seqlens_q=case.cu_seqlens_q, return_lse=True)
    exact, exact_lse = reference.paged_decode(*args, cu_seqlens_q=case.cu_seqlens_q)
    torch.testing.assert_close(out.float(), exact, **near(out.dtype))
    torch.testing.assert_close(lse, exact_lse, rtol=1e-5, atol=1e-6)


def test_out_and_lse_are_written_inside_their_views_only(device, require):
    require("paged_decode", torch.bfloat16, torch.bfloat16)
    case = make_case("mixed", dtype=torch.bfloat16, device=device)
    args = (case.q, case.k_cache, case.v_cache, case.block_table, case.seq_lens)
    options = dict(cu_seqlens_q=case.cu_seqlens_q)
    want, want_lse = msa_kernels.paged_decode(*args, **options, return_lse=True)
    assert same_bits(msa_kernels.paged_decode(*args, **options), want)
    out, check_out = guarded(case.q.shape, torch.bfloat16, device, rows=True)
    lse, check_lse = guarded(case.q.shape[:2], torch.float32, device)
    msa_kernels.paged_decode(*args, **options, out=out, lse=lse)
    check_out()
    check_lse()
    assert same_bits(out, want) and same_bits(lse, want_lse)


@pytest.mark.parametrize("hints", [(1, 1), (10**6, 10**9)])
def test_wrong_hints_change_nothing(device, require, hints):
    require("paged_decode")
    check(make_case("chunks", device=device), max_seqlen_q=hints[0], max_seqlen_k=hints[1])


def test_twenty_runs_give_the_same_bits(device, require):
    require("paged_decode", torch.bfloat16, torch.bfloat16)
    case = make_case("verify", dtype=torch.bfloat16, device=device)
    args = (case.q, case.k_cache, case.v_cache, case.block_table, case.seq_lens)
    first = msa_kernels.paged_decode(*args, cu_seqlens_q=case.cu_seqlens_q)
    for _ in range(19):
        again = msa_kernels.paged_decode(*args, cu_seqlens_q=case.cu_seqlens_q)
        assert same_bits(again, first)


def test_lse_is_the_natural_logarithm(device, require):
    """By hand: two keys with logits 0 and ln 3 have LSE ln 4, and weights 1/4 and 3/4."""
    require("paged_decode")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    cache = torch.zeros(1, 1, BLOCK, D, device=device, dtype=dtype)
    values = torch.zeros_like(cache)
    q = torch.zeros(1, 1, D, device=device, dtype=dtype)
    q[..., 0] = 1
    cache[0, 0, 1, 0] = torch.log(torch.tensor(3.0))
    values[0, 0, 1] = 1
    table, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[0]], [2]))
    out, lse = msa_kernels.paged_decode(q, cache, values, table, lens, scale=1.0, return_lse=True)
    torch.testing.assert_close(lse.cpu(), torch.tensor([[4.0]]).log(), **near(dtype))
    want = torch.full((1, 1, D), 0.75, dtype=dtype)
    torch.testing.assert_close(out.cpu(), want, **near(dtype))
