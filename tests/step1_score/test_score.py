"""index_score against the reference, on what shipped kernels got wrong."""

import pytest
import torch

import msa_kernels
from msa_kernels import reference
from tests.inputs import BATCHES, BLOCK, FP8, dtype_name, guarded, make_case, same_bits
from tests.tolerance import assert_scores

INDEX_DTYPES = [torch.float32, torch.bfloat16, FP8]


@pytest.mark.parametrize("poison", ["nan", "inf"])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=dtype_name)
def test_matches_reference(device, require, dtype, batch, strided, poison):
    require("index_score", dtype, dtype)
    case = make_case(batch, index_dtype=dtype, strided=strided, poison=poison, device=device)
    assert_scores(msa_kernels.index_score(*case.index_args), case)


@pytest.mark.parametrize("heads", [1, 3, 4, 8])
@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=dtype_name)
def test_whole_numbers_are_exact(device, require, dtype, heads):
    """Small whole numbers leave no room for rounding: every score is exact, in every head."""
    require("index_score", dtype, dtype)
    for batch in ("chunks", "long"):
        case = make_case(
            batch, hq=heads, hkv=heads, index_dtype=dtype, values="integer", device=device
        )
        expected = reference.index_score(*case.index_args)
        assert torch.equal(msa_kernels.index_score(*case.index_args), expected)


@pytest.mark.parametrize("q_len", range(1, 10))
def test_every_verify_length(device, require, q_len):
    """Each token of a step has its own last block and its own mask, odd lengths included."""
    require("index_score")
    for seq_len in (q_len, 125 + q_len, 128, 128 + q_len - 1, 2048 + q_len // 2, 5248):
        case = make_case([(1, 300), (q_len, seq_len), (0, 77)], values="integer", device=device)
        expected = reference.index_score(*case.index_args)
        assert torch.equal(msa_kernels.index_score(*case.index_args), expected)


@pytest.mark.parametrize("table_padding", [-1, 2**31 - 1, -(2**31), 0])
def test_table_padding_is_never_used(device, require, table_padding):
    require("index_score", torch.bfloat16, torch.bfloat16)
    case = make_case(
        "decode_edges", dtype=torch.bfloat16, table_padding=table_padding, device=device
    )
    assert_scores(msa_kernels.index_score(*case.index_args), case)


def test_table_narrower_than_the_lengths(device, require):
    """Blocks at or past the width of the table are not there."""
    require("index_score")
    for width in (0, 1, 5, 16):
        case = make_case("long", max_pages=width, device=device)
        scores = msa_kernels.index_score(*case.index_args)
        assert scores.shape == (2, case.num_tokens, width)
        assert_scores(scores, case)


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=dtype_name)
def test_live_entry_that_is_no_page(device, require, dtype):
    require("index_score", dtype, dtype)
    case = make_case("chunks", index_dtype=dtype, device=device)
    pages = case.index_k_cache.size(0)
    for request, block, page in ((0, 3, -1), (0, 0, pages), (1, 16, 2**31 - 1), (1, 2, -(2**31))):
        case.block_table[request, block] = page
    scores = msa_kernels.index_score(*case.index_args)
    assert_scores(scores, case)
    assert bool((scores[:, :7, 3] == float("-inf")).all())


@pytest.mark.parametrize("hints", [(1, 1), (1, 1024), (10**6, 10**9), (0, 0)])
def test_wrong_hints_change_nothing(device, require, hints):
    require("index_score")
    case = make_case("long", device=device)
    hinted = msa_kernels.index_score(*case.index_args, max_seqlen_q=hints[0], max_seqlen_k=hints[1])
    assert_scores(hinted, case)
    assert same_bits(hinted, msa_kernels.index_score(*case.index_args))


def test_out_is_written_inside_its_view_only(device, require):
    require("index_score")
    case = make_case("mixed", strided=True, device=device)
    plain = msa_kernels.index_score(*case.index_args)
    out, check = guarded(plain.shape, torch.float32, device)
    assert msa_kernels.index_score(*case.index_args, out=out) is out
    check()
    assert same_bits(out, plain)


@pytest.mark.parametrize("lengths", [[(3, 700), (2, 40 * BLOCK)], [(300, 700), (90, 40 * BLOCK)]])
@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=dtype_name)
def test_nan_and_inf_products(device, require, dtype, lengths):
    """A NaN product of a visible token makes its block NaN; -inf alone is a score; +inf wins.

    FP8 has no Inf: its largest numbers take the place, and win or lose as well."""
    require("index_score", dtype, dtype)
    case = make_case(lengths, values="integer", index_dtype=dtype, device=device)
    query, index = case.index_q, case.index_k_cache
    nan, inf, zero, one = (
        torch.tensor([x], device=device).to(dtype)
        for x in (float("nan"), 448.0 if dtype == FP8 else float("inf"), 0.0, 1.0)
    )
    low = -inf.float()
    low = low.to(dtype)
    if dtype == FP8:
        query, index, nan, inf, zero, one, low = (
            x.view(torch.uint8) for x in (query, index, nan, inf, zero, one, low)
        )
    first = lengths[0][0]  # the first token of the second request
    page = case.block_table[0].long()
    index[page[0], 17, 5] = nan
    index[page[1], 3] = inf  # +inf or NaN by the signs in q
    index[page[5], (700 - 1) % BLOCK] = nan  # visible to the last token only
    query[1, 0] = zero
    query[1, 0, 0] = one
    index[page[2]] = zero
    index[page[2], :, 0] = low
    query[first + 1, 1, 100] = nan  # a NaN query: every visible block of its row and head
    scores = msa_kernels.index_score(*case.index_args)
    expected = reference.index_score(*case.index_args)
    torch.testing.assert_close(scores, expected, rtol=0, atol=0, equal_nan=True)
    last = first - 1
    assert not bool(scores[:, :last, 5].isnan().any()) and bool(scores[:, last, 5].isnan().all())
    row, own = scores[:, first + 1], int(case.visible[first + 1])
    assert bool(row[1, :own].isnan().all()) and not bool(row[0].isnan().any())
    assert float(scores[0, 1, 2]) == (-448.0 if dtype == FP8 else float("-inf"))


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=dtype_name)
def test_bits_do_not_depend_on_the_batch(device, require, dtype):
    """A request gives the same bits alone, at another place, on other pages, in another
    chunking."""
    require("index_score", dtype, dtype)
    case = make_case("long", index_dtype=dtype, device=device)
    scores = msa_kernels.index_score(*case.index_args)
    starts = case.cu_seqlens_q.tolist()
    for request, (q_len, _) in enumerate(case.lengths):
        rows = slice(starts[request], starts[request] + q_len)
        alone = msa_kernels.index_score(
            case.index_q[rows],
            case.index_k_cache,
            case.block_table[request : request + 1],
            torch.tensor([0, q_len], dtype=torch.int32, device=device),
            case.seq_lens[request : request + 1],
        )
        assert same_bits(alone, scores[:, rows])
    # The 70 tokens of request 2 one by one: a decode step scores as the prefill does.
    first, q_len, seq_len = starts[2], case.lengths[2][0], case.lengths[2][1]
    for token in (0, 1, 33, q_len - 1):
        single = msa_kernels.index_score(
            case.index_q[first + token : first + token + 1],
            case.index_k_cache,
            case.block_table[2:3],
            torch.tensor([0, 1], dtype=torch.int32, device=device),
            torch.tensor([seq_len - q_len + token + 1], dtype=torch.int32, device=device),
        )
        torch.testing.assert_close(single[:, 0], scores[:, first + token], rtol=1e-5, atol=1e-4)
        if device == "cpu":
            assert same_bits(single[:, 0], scores[:, first + token])
    moved = torch.randperm(
        case.index_k_cache.size(0), generator=torch.Generator().manual_seed(3)
    ).to(device)
    index = torch.empty_like(case.index_k_cache)
    as_bytes = torch.uint8 if dtype == FP8 else dtype
    index.view(as_bytes)[moved] = case.index_k_cache.view(as_bytes)
    live = case.block_table < len(moved)
    table = torch.where(live, moved[case.block_table.long().where(live, 0)].int(), case.block_table)
    again = msa_kernels.index_score(case.index_q, index, table, case.cu_seqlens_q, case.seq_lens)
    assert same_bits(again, scores)


def test_twenty_runs_give_the_same_bits(device, require):
    require("index_score", torch.bfloat16, torch.bfloat16)
    case = make_case("long", dtype=torch.bfloat16, device=device)
    first = msa_kernels.index_score(*case.index_args)
    for _ in range(19):
        assert same_bits(msa_kernels.index_score(*case.index_args), first)


def test_shared_prefix_pages(device, require):
    require("index_score")
    case = make_case([(3, 2200), (1, 2305), (130, 2180)], shared_prefix=16, device=device)
    assert bool((case.block_table[0, :16] == case.block_table[1, :16]).all())
    assert_scores(msa_kernels.index_score(*case.index_args), case)


@pytest.mark.parametrize("requests", [132, 133, 300])
def test_many_short_requests(device, require, requests):
    require("index_score")
    lengths = [(1, 1 + 7 * (r % 40)) for r in range(requests)]
    case = make_case(lengths, values="integer", device=device)
    expected = reference.index_score(*case.index_args)
    assert torch.equal(msa_kernels.index_score(*case.index_args), expected)


@pytest.mark.slow
def test_a_very_long_context(device, require):
    """1,025 blocks, the last of one token; and a table of 8,193 columns."""
    require("index_score", torch.bfloat16, torch.bfloat16)
    case = make_case(
        [(2, 131073), (1, 300)],
        hq=1,
        hkv=1,
        dtype=torch.bfloat16,
        max_pages=8193,
        device=device,
    )
    assert_scores(msa_kernels.index_score(*case.index_args), case)
