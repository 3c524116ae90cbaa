"""sparse_prefill and sparse_decode against the reference: both take every batch there is."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import msa_kernels
from msa_kernels import reference
from tests.inputs import (
    BATCHES,
    BLOCK,
    DTYPES,
    FP8,
    LAYOUTS,
    SELECTIONS,
    D,
    dtype_name,
    guarded,
    make_case,
    make_selection,
    same_bits,
)
from tests.tolerance import LSE_REL, assert_attention, near

OPS = ["sparse_prefill", "sparse_decode"]


@pytest.fixture(params=OPS)
def op(request):
    return request.param


def run(op, case, **options):
    """(out, lse) of an operator on the case."""
    function = getattr(msa_kernels, op)
    return function(*case.attend_args, **case.scales, return_lse=True, **options)


def check(op, case, **options):
    out, lse = run(op, case, **options)
    assert_attention(case, out, lse, options.get("scale"), op)
    return out, lse


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtypes", DTYPES, ids=dtype_name)
def test_batches(device, require, op, dtypes, batch, strided):
    require(op, *dtypes)
    poison = "inf" if strided else "nan"
    case = make_case(
        batch,
        dtype=dtypes[0],
        cache_dtype=dtypes[1],
        strided=strided,
        poison=poison,
        device=device,
    )
    out, lse = check(op, case)
    assert not bool(out[case.num_real :].any())
    assert bool((lse[case.num_real :] == float("-inf")).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=dtype_name)
def test_layouts(device, require, op, dtypes, layout):
    require(op, *dtypes)
    for batch in ("chunks", "long"):
        check(
            op,
            make_case(batch, dtype=dtypes[0], cache_dtype=dtypes[1], layout=layout, device=device),
        )


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[2]], ids=dtype_name)
def test_selections(device, require, op, dtypes, selection):
    require(op, *dtypes)
    for batch in ("mixed", "long"):
        check(
            op,
            make_case(
                batch,
                dtype=dtypes[0],
                cache_dtype=dtypes[1],
                selection=selection,
                layout="interleaved",
                device=device,
            ),
        )


@pytest.mark.parametrize(
    "hq,hkv",
    [(64, 4), (32, 4), (32, 2), (16, 1), (8, 1), (64, 8), (4, 2), (3, 3), (1, 1)],
)
def test_heads(device, require, op, hq, hkv):
    """Values name their KV head: a query head that reads another one is seen at once."""
    require(op)
    case = make_case([(3, 2200), (1, 129), (40, 300)], hq=hq, hkv=hkv, layout="nhd", device=device)
    check(op, case)
    case.v_cache.copy_(
        torch.arange(hkv, device=device).float()[None, :, None, None].expand_as(case.v_cache)
    )
    out, _ = run(op, case)
    head = torch.arange(hq, device=device) // (hq // hkv)
    expected = head[None, :, None].expand(case.num_real, hq, D).float()
    torch.testing.assert_close(out[: case.num_real].float(), expected, **near(out.dtype))


@pytest.mark.parametrize("topk", [1, 2, 15, 16, 17, 31, 32])
def test_topk(device, require, op, topk):
    require(op)
    lengths = [(1, BLOCK * n - 5) for n in (1, 2, 15, 16, 17, 31, 32, 33, 40)] + [(50, 5200)]
    check(op, make_case(lengths, topk=topk, device=device))


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("q_len", range(1, 10))
def test_every_verify_length(device, require, op, q_len, group):
    """Steps of 1 to 9 tokens that end before, at and behind a boundary; own rows differ."""
    require(op)
    lengths = [(q_len, n) for n in (q_len, 127 + q_len, 128, 132, 2048, 2048 + q_len - 1, 5300)]
    hkv = 2 if group == 4 else 1
    check(op, make_case([*lengths, (0, 50)], hq=hkv * group, hkv=hkv, device=device))


@pytest.mark.parametrize(
    "requests,hq,hkv,topk,selection",
    [
        (48, 32, 2, 16, "random"),
        (64, 16, 1, 32, "same"),
        (64, 8, 1, 7, "duplicates"),
        (64, 12, 3, 1, "holes_and_tail"),
        (48, 4, 2, 16, "int64"),
        (80, 1, 1, 16, "minus_middle"),
    ],
)
@pytest.mark.parametrize("dtypes", [DTYPES[1], DTYPES[2]], ids=dtype_name)
def test_many_verify_steps(device, require, op, dtypes, requests, hq, hkv, topk, selection):
    """Enough tokens of enough requests that kernels may share blocks between neighbours."""
    require(op, *dtypes)
    lengths = [(1 + r % 8, 20 + 37 * r) for r in range(requests)]
    case = make_case(
        lengths,
        hq=hq,
        hkv=hkv,
        topk=topk,
        selection=selection,
        dtype=dtypes[0],
        cache_dtype=dtypes[1],
        layout="interleaved",
        shared_prefix=4,
        padding_rows=2,
        device=device,
    )
    check(op, case)


@pytest.mark.parametrize("requests,tokens", [(40, 6), (24, 3)])
@pytest.mark.parametrize("dtypes", [DTYPES[1], DTYPES[2]], ids=dtype_name)
def test_a_token_has_the_same_bits_beside_any_other(device, require, dtypes, requests, tokens):
    """A decode token's sums do not depend on its neighbours in the batch."""
    require("sparse_decode", *dtypes)
    case = make_case(
        [(tokens, 150 + 83 * r) for r in range(requests)],
        dtype=dtypes[0],
        cache_dtype=dtypes[1],
        padding_rows=1,
        device=device,
    )
    out, lse = run("sparse_decode", case)
    # Moved by one row, every token stands beside another one.
    moved = case.with_(
        q=torch.cat([case.q[:1], case.q[:-1]]),
        ids=torch.cat([case.ids[:, :1], case.ids[:, :-1]], dim=1),
        cu_seqlens_q=case.cu_seqlens_q + 1,
    )
    moved.cu_seqlens_q[0] = 0  # the first request has one token more, in front
    again, again_lse = run("sparse_decode", moved)
    assert same_bits(again[1:], out[:-1]) and same_bits(again_lse[1:], lse[:-1])


def test_future_of_the_own_block_is_masked(device, require, op):
    """Poison right behind the query, at every kind of offset within its block."""
    require(op)
    offsets = (0, 1, 63, 126, 127)
    lengths = [(1, BLOCK * n + offset + 1) for n in (0, 1, 16, 20) for offset in offsets]
    for poison in ("nan", "inf"):
        check(op, make_case([*lengths, (8, 133)], poison=poison, device=device))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_later_tokens_of_the_request_may_be_wild(device, require, op, value):
    """NaN or Inf in a token that some queries see and others do not stays with those that see
    it."""
    require(op)
    # The second request only makes the call large enough for every kernel.
    case = make_case([(90, 300), (60, 500)], hq=4, hkv=2, device=device)
    for token, head in ((250, 0), (255, 1), (256, 0), (299, 1)):
        page = case.block_table[0, token // BLOCK].long()
        case.v_cache[page, head, token % BLOCK, 3:7] = value
        case.k_cache[page, head, token % BLOCK, 5] = float("nan")
    out, lse = run(op, case)
    exact, exact_lse = reference.sparse_attention(*case.attend_args)
    for got, want in ((out, exact), (lse, exact_lse)):
        assert torch.equal(got.isfinite(), want.isfinite())
        finite = want.isfinite()
        torch.testing.assert_close(got[finite].float(), want[finite], **near(out.dtype))
    assert bool(out[:40, 0].isfinite().all()) and not bool(out[40:90, 0].isfinite().any())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("hq,hkv,tokens", [(64, 4, 256), (32, 4, 512), (4, 1, 40), (2, 2, 40)])
def test_a_wild_number_stays_with_those_that_selected_its_block(
    device, require, op, hq, hkv, tokens, value
):
    """Neighbours share all blocks but one, whose V holds NaN or Inf; those without it are whole.

    The larger ones are tokens enough for query-major tiles on Hopper, of prefill and of decode."""
    require(op)
    case = make_case([(tokens, 3000)], hq=hq, hkv=hkv, device=device)
    case.ids[:, :, :15] = torch.arange(15, device=device)
    case.ids[:, :tokens, 15] = 19
    case.ids[:, 2:tokens:4, 3] = 16  # every fourth token takes another block for block 3
    page = case.block_table[0, 3].long()
    case.v_cache[page, :, 70, 8:11] = value
    out, lse = run(op, case)
    exact, exact_lse = reference.sparse_attention(*case.attend_args)
    assert torch.equal(out.isfinite(), exact.isfinite())
    finite = exact.isfinite()
    torch.testing.assert_close(out[finite].float(), exact[finite], **near(out.dtype))
    torch.testing.assert_close(lse, exact_lse, rtol=LSE_REL, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("hq,hkv", [(32, 2), (16, 2), (4, 2)])
def test_wild_values_leave_their_neighbours_alone(device, require, op, hq, hkv, value):
    """NaN or Inf in some columns of V: the others of the row count, and here for much."""
    require(op)
    case = make_case([(90, 300), (150, 150)], hq=hq, hkv=hkv, device=device)
    for request, token, head in ((0, 250, 0), (0, 256, 1), (1, 77, 1)):
        page = case.block_table[request, token // BLOCK].long()
        case.v_cache[page, head, token % BLOCK, 3:7] = value
        case.v_cache[page, head, token % BLOCK, [2, 7, 90]] = 192.0
    out, _ = run(op, case)
    exact, _ = reference.sparse_attention(*case.attend_args)
    assert torch.equal(out.isfinite(), exact.isfinite())
    finite = exact.isfinite()
    torch.testing.assert_close(out[finite].float(), exact[finite], **near(out.dtype))
    assert bool(out[50:90, 0, 3:7].isfinite().any(dim=0).logical_not().all())


@pytest.mark.parametrize("empty_rows", ["lengths", "ids"])
def test_empty_rows(device, require, op, empty_rows):
    """Requests of length 0 and rows whose ids are all -1 give 0 and -inf; the others are whole."""
    require(op, torch.bfloat16, torch.bfloat16)
    lengths = [0, 1, 0, 129, 4096, 0, 128, 2049]
    if empty_rows == "lengths":
        case = make_case([(1, n) for n in lengths], dtype=torch.bfloat16, device=device)
    else:
        case = make_case([(1, n or 3000) for n in lengths], dtype=torch.bfloat16, device=device)
        case.ids[:, [row for row, n in enumerate(lengths) if n == 0]] = -1
    out, lse = check(op, case)
    for row, length in enumerate(lengths):
        assert bool(out[row].any()) == (length > 0)
        assert bool(lse[row].isfinite().all()) == (length > 0)


@pytest.mark.parametrize("table_padding", [-1, 2**31 - 1, -(2**31), 0])
def test_table_padding_is_never_used(device, require, op, table_padding):
    require(op, torch.bfloat16, torch.bfloat16)
    check(
        op,
        make_case("decode_edges", dtype=torch.bfloat16, table_padding=table_padding, device=device),
    )


def test_tables_that_lack_pages(device, require, op):
    """A narrow table, and live entries that are no page: such blocks add nothing."""
    require(op)
    for width in (1, 5, 16):
        check(op, make_case("long", max_pages=width, device=device))
    case = make_case("chunks", topk=20, device=device)
    case.block_table[0, 3] = -1
    case.block_table[1, 17] = case.k_cache.size(0)
    case.block_table[1, 2] = 2**31 - 1
    case.block_table[2, 0] = -(2**31)
    out, lse = check(op, case)
    row = int(case.cu_seqlens_q[2])
    assert not bool(out[row].any()) and bool((lse[row] == float("-inf")).all())


@pytest.mark.parametrize("garbage", [0, 1, -1, 2**31 - 1, -(2**31), 10**6])
def test_ids_past_the_valid_count_are_ignored(device, require, op, garbage):
    require(op)
    case = make_case([(1, 300), (3, 129), (5, 1000)], device=device)
    out, lse = run(op, case)
    entry = torch.arange(16, device=device)
    past = (entry >= case.visible[:, None])[None].expand_as(case.ids)
    again, again_lse = run(op, case.with_(ids=case.ids.masked_fill(past, garbage)))
    assert same_bits(again, out) and same_bits(again_lse, lse)


@pytest.mark.parametrize("batch", ["long", [(1, 5125), (2, 6144)]], ids=["many", "few"])
@pytest.mark.parametrize("offset", [2**32, -(2**32), 2**62])
def test_long_ids_are_read_whole(device, require, offset, batch):
    """A 64-bit id is no block for its lower half alone."""
    require("sparse_decode")
    case = make_case(batch, selection="int64", device=device)
    some = (torch.arange(16, device=device) % 3 == 1) & (case.ids >= 0)
    without = run("sparse_decode", case.with_(ids=case.ids.masked_fill(some, -1)))
    moved = run("sparse_decode", case.with_(ids=case.ids + offset * some))
    assert same_bits(moved[0], without[0]) and same_bits(moved[1], without[1])


@pytest.mark.parametrize("scale", [None, 0.0, 1.0, 0.02, -0.1])
def test_scales_of_the_softmax(device, require, op, scale):
    require(op)
    check(op, make_case("chunks", device=device), scale=scale)


def test_large_logits(device, require, op):
    """Logits of several hundred: the maximum is taken out before exp."""
    require(op)
    case = make_case("chunks", device=device)
    case = case.with_(q=case.q * 40)
    out, lse = run(op, case)
    exact, exact_lse = reference.sparse_attention(*case.attend_args, compute_dtype=torch.float64)
    assert bool(out.isfinite().all())
    real = slice(0, case.num_real)
    torch.testing.assert_close(lse[real].double(), exact_lse[real], rtol=LSE_REL, atol=1e-5)
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("form", ["number", "one", "per_head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_fp8_scale_forms(device, require, op, dtype, form):
    """A number, one element, one a KV head; k_scale reaches the logits, v_scale the output."""
    require(op, dtype, FP8)
    case = make_case("chunks", hq=8, hkv=4, dtype=dtype, cache_dtype=FP8, device=device)
    k_scale, v_scale = torch.tensor([0.5, 0.25, 1.0, 2.0]), torch.tensor([3.0, 1.0, 0.1, 7.0])
    if form != "per_head":
        k_scale, v_scale = torch.tensor([0.5]), torch.tensor([3.0])
    case = case.with_(k_scale=k_scale.to(device), v_scale=v_scale.to(device))
    if form != "number":
        check(op, case)
        return
    function = getattr(msa_kernels, op)
    out, lse = function(*case.attend_args, k_scale=0.5, v_scale=3, return_lse=True)
    assert_attention(case, out, lse)


def test_fp8_without_scales(device, require, op):
    """None means 1."""
    require(op, torch.bfloat16, FP8)
    case = make_case("chunks", dtype=torch.bfloat16, cache_dtype=FP8, device=device)
    check(op, case.with_(k_scale=None, v_scale=None))
    only_v = case.with_(k_scale=torch.ones(1, device=device))
    out, _ = getattr(msa_kernels, op)(*case.attend_args, v_scale=case.v_scale, return_lse=True)
    assert_attention(only_v, out, None)


def test_every_fp8_number(device, require, op):
    """Each of the 256 bytes as K, seen in the LSE, and as V, seen in the output, alone in a
    request."""
    require(op, torch.bfloat16, FP8)
    case = make_case(
        [(1, 1)] * 256, hq=2, hkv=1, dtype=torch.bfloat16, cache_dtype=FP8, device=device
    )
    numbers = torch.arange(256, dtype=torch.uint8, device=device)
    pages = case.block_table[:, 0].long()
    for cache in (case.k_cache, case.v_cache):
        rows = cache.view(torch.uint8)
        rows[pages, 0, 0] = 0
        rows[pages, 0, 0, 5] = numbers
    case.q[:] = 1
    ones = torch.ones(1, device=device)
    case = case.with_(k_scale=ones, v_scale=ones)
    out, lse = run(op, case, scale=1.0)
    exact = numbers.view(FP8).float()
    seen = exact.isfinite()
    for head in range(2):
        assert torch.equal(out[:256][seen, head, 5].float(), exact[seen])
        # A weight may stand for 2^-15 of it at most: half a unit in the last place of such an
        # exponent, in log2 units, is what an LSE near 0 can be off by.
        torch.testing.assert_close(lse[:256][seen, head], exact[seen], rtol=1e-6, atol=2**-21)
        assert bool(out[:256][~seen, head].isnan().all())
        assert bool(lse[:256][~seen, head].isnan().all())


@pytest.mark.parametrize("hints", [(1, 1), (1, 1024), (10**6, 10**9), (0, 0)])
def test_wrong_hints_change_nothing(device, require, op, hints):
    require(op)
    case = make_case("chunks", device=device)
    check(op, case, max_seqlen_q=hints[0], max_seqlen_k=hints[1])


@pytest.mark.parametrize("with_lse", ["none", "returned", "given"])
@pytest.mark.parametrize("with_out", [False, True], ids=["allocated", "given"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_outputs(device, require, op, dtype, with_out, with_lse):
    """Every way to ask for out and LSE; given ones are strided views with sentinels around."""
    require(op, dtype, dtype)
    case = make_case("mixed", dtype=dtype, device=device)
    function = getattr(msa_kernels, op)
    out, check_out = guarded(case.q.shape, dtype, device, rows=True)
    lse, check_lse = guarded(case.q.shape[:2], torch.float32, device)
    options = {"return_lse": True} if with_lse == "returned" else {}
    options |= {"out": out} if with_out else {}
    options |= {"lse": lse} if with_lse == "given" else {}
    if with_lse == "given" and not with_out:
        with pytest.raises(ValueError, match=rf"msa\.{op}: lse must"):
            function(*case.attend_args, **options)
        return
    result = function(*case.attend_args, **options)
    got_out, got_lse = (result, None) if with_lse == "none" else result
    assert not with_out or got_out is out
    assert with_lse != "given" or got_lse is lse
    check_out()
    check_lse()
    assert_attention(case, got_out, got_lse)


@pytest.mark.parametrize("dtypes", DTYPES, ids=dtype_name)
def test_both_paths_agree(device, require, dtypes):
    """Prefill and decode on the same tokens, duplicates and FP8 scales included."""
    for op in OPS:
        require(op, *dtypes)
    for selection in ("random", "duplicates", "minus_middle"):
        case = make_case(
            "chunks",
            dtype=dtypes[0],
            cache_dtype=dtypes[1],
            selection=selection,
            device=device,
        )
        (out, lse), (other, other_lse) = (run(op, case) for op in OPS)
        torch.testing.assert_close(out, other, **near(dtypes[0]))
        torch.testing.assert_close(lse, other_lse, rtol=LSE_REL, atol=1e-5)


def test_a_chunk_equals_its_tokens_one_by_one(device, require):
    require("sparse_prefill")
    require("sparse_decode")
    case = make_case([(20, 2060)], padding_rows=0, device=device)
    whole, whole_lse = run("sparse_prefill", case)
    count = case.num_tokens
    singles = case.with_(
        cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32, device=device),
        seq_lens=torch.arange(2041, 2061, dtype=torch.int32, device=device),
        block_table=case.block_table.expand(count, -1),
    )
    out, lse = run("sparse_decode", singles)
    torch.testing.assert_close(out, whole, **near(out.dtype))
    torch.testing.assert_close(lse, whole_lse, rtol=LSE_REL, atol=1e-6)


def test_order_of_ids_does_not_matter(device, require, op):
    require(op)
    case = make_case("long", device=device)
    out, lse = run(op, case)
    shuffled = case.ids.clone()
    generator = torch.Generator().manual_seed(0)
    for token, seen in enumerate(case.visible.tolist()):
        count = min(16, seen)
        order = torch.randperm(count, generator=generator).to(device)
        shuffled[:, token, :count] = case.ids[:, token, order]
    again, again_lse = check(op, case.with_(ids=shuffled))
    torch.testing.assert_close(again, out, **near(out.dtype))
    torch.testing.assert_close(again_lse, lse, rtol=LSE_REL, atol=1e-6)


def reordered(case, order):
    """(case with its requests in another order, the old row of each new row)."""
    starts = case.cu_seqlens_q.tolist()
    spans = [range(starts[r], starts[r + 1]) for r in order]
    rows = torch.tensor([row for span in spans for row in span], device=case.q.device)
    lens = torch.tensor([0, *map(len, spans)], device=case.q.device).cumsum(0).int()
    moved = case.with_(
        lengths=[case.lengths[r] for r in order],
        q=case.q[rows],
        ids=case.ids[:, rows],
        block_table=case.block_table[order],
        cu_seqlens_q=lens,
        seq_lens=case.seq_lens[order],
    )
    return moved, rows


def test_bits_do_not_depend_on_the_place_in_the_batch(device, require, op):
    require(op, torch.bfloat16, torch.bfloat16)
    case = make_case("long", dtype=torch.bfloat16, padding_rows=0, device=device)
    out, lse = run(op, case)
    for order in ([3, 2, 1, 0], [1, 3, 0, 2]):
        moved, rows = reordered(case, order)
        again, again_lse = run(op, moved)
        assert same_bits(again, out[rows]) and same_bits(again_lse, lse[rows])


def test_a_request_alone(device, require, op):
    """On a CPU even the bits of a request are the same without the others."""
    require(op, torch.bfloat16, torch.bfloat16)
    case = make_case("long", dtype=torch.bfloat16, padding_rows=0, device=device)
    out, lse = run(op, case)
    for request in range(len(case.lengths)):
        single, rows = reordered(case, [request])
        alone, alone_lse = run(op, single)
        torch.testing.assert_close(alone, out[rows], **near(out.dtype))
        torch.testing.assert_close(alone_lse, lse[rows], rtol=LSE_REL, atol=1e-5)
        if device == "cpu":
            assert same_bits(alone, out[rows]) and same_bits(alone_lse, lse[rows])


def test_twenty_runs_give_the_same_bits(device, require, op):
    require(op, torch.bfloat16, torch.bfloat16)
    case = make_case("long", dtype=torch.bfloat16, selection="same", device=device)
    out, lse = run(op, case)
    for _ in range(19):
        again, again_lse = run(op, case)
        assert same_bits(again, out) and same_bits(again_lse, lse)


@pytest.mark.parametrize("requests,tokens", [(3, 1), (40, 1), (40, 6)])
def test_one_call_serves_batches_that_change_in_place(device, require, requests, tokens):
    """Lengths, ids and tables edited in place, shrinking to nothing too; on a GPU in one graph."""
    for name in ("sparse_decode", "paged_decode"):
        require(name)
    case = make_case([(tokens, 2300 + 41 * r) for r in range(requests)], device=device)
    ids, table, lens = case.ids.clone(), case.block_table.clone(), case.seq_lens.clone()

    def both():
        batch = (table, case.cu_seqlens_q, lens)
        args = (case.q, case.k_cache, case.v_cache)
        sparse = msa_kernels.sparse_decode(*args, ids, *batch, return_lse=True)
        options = dict(cu_seqlens_q=case.cu_seqlens_q, return_lse=True)
        return *sparse, *msa_kernels.paged_decode(*args, table, lens, **options)

    replay = both
    if device == "cuda":
        both()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = both()

        def replay():
            graph.replay()
            return outputs

    order = torch.arange(requests, device=device).flip(0)
    steps = [(case.seq_lens // 3, False), (case.seq_lens * 0, False), (case.seq_lens, True)]
    steps += [(case.seq_lens.clamp(max=129), False), (case.seq_lens - 1, False)]
    for seed, (lengths, flipped) in enumerate(steps):
        lens.copy_(lengths[order] if flipped else lengths)
        table.copy_(case.block_table[order] if flipped else case.block_table)
        now = case.with_(seq_lens=lens, block_table=table)
        ids.copy_(make_selection("random", now.visible.cpu(), 2, 16, seed=seed))
        out, lse, dense, dense_lse = replay()
        assert_attention(now.with_(ids=ids), out, lse)
        for got, want in zip((out, lse, dense, dense_lse), both(), strict=True):
            assert same_bits(got, want)


def test_heads_of_a_rank_have_the_bits_of_all(device, require, op):
    """One KV head of four alone, as a tensor-parallel rank has it."""
    require(op, torch.bfloat16, torch.bfloat16)
    case = make_case("chunks", hq=16, hkv=4, dtype=torch.bfloat16, device=device)
    out, _ = run(op, case)
    for head in range(4):
        rank = case.with_(
            q=case.q[:, 4 * head : 4 * head + 4],
            k_cache=case.k_cache[:, head : head + 1],
            v_cache=case.v_cache[:, head : head + 1],
            ids=case.ids[head : head + 1],
        )
        alone, _ = run(op, rank)
        torch.testing.assert_close(alone, out[:, 4 * head : 4 * head + 4], **near(out.dtype))


def test_shared_prefix_pages(device, require, op):
    require(op)
    lengths = [(3, 2200), (1, 2305), (20, 2180)]
    check(op, make_case(lengths, shared_prefix=16, layout="offset", device=device))


@pytest.mark.parametrize(
    "requests", [1, 2, 3, 5, 7, 8, 11, 17, 22, 30, 33, 44, 50, 66, 67, 100, 132, 133]
)
def test_every_size_of_a_call(device, require, op, requests):
    """A kernel may cut a row in parts by the number of rows: every such number must do."""
    require(op)
    lengths = [(1, 1 + 37 * ((7 * r + requests) % 70)) for r in range(requests)]
    group = (1, 2, 4, 8, 16)[requests % 5]
    check(op, make_case(lengths, hq=group, hkv=1, padding_rows=0, device=device))


@pytest.mark.slow
def test_a_very_long_context(device, require, op):
    require(op, torch.bfloat16, torch.bfloat16)
    case = make_case([(2, 131073), (1, 300)], hq=4, hkv=1, dtype=torch.bfloat16, device=device)
    check(op, case)


@pytest.mark.parametrize("blocks", [1025, 4097, 8192, 8193])
def test_contexts_up_to_a_million_tokens(device, require, op, blocks):
    """A table that walks few pages again and again; ids up to the last block."""
    require(op)
    case = make_case([(1, 1280), (1, 300)], hq=8, hkv=2, padding_rows=0, device=device)
    pages = case.block_table[0, :10]
    table = pages[torch.arange(8193, device=device) % 10].expand(2, -1)
    seq_lens = torch.tensor([blocks * BLOCK, blocks * BLOCK - 17], device=device).int()
    visible = torch.tensor([blocks, blocks])
    ids = make_selection("random", visible, 2, 16, seed=blocks).to(device)
    case = case.with_(block_table=table, seq_lens=seq_lens, ids=ids)
    out, lse = run(op, case)
    # Not by the policy: its baseline is dense attention over the whole context.
    exact, exact_lse = reference.sparse_attention(*case.attend_args)
    torch.testing.assert_close(out.float(), exact, **near(out.dtype))
    torch.testing.assert_close(lse, exact_lse, rtol=LSE_REL, atol=1e-5)


@pytest.mark.parametrize("dtypes", [DTYPES[1], DTYPES[2]], ids=dtype_name)
@pytest.mark.parametrize("what", ["tokens of q", "heads of q", "pages", "heads", "tokens"])
def test_expanded_inputs(device, require, op, dtypes, what):
    """A stride of 0: one token or head of q for all; one page, head or token of the caches."""
    require(op, *dtypes)
    case = make_case(
        [(40, 2900), (1, 300)],
        dtype=dtypes[0],
        cache_dtype=dtypes[1],
        padding_rows=0,
        device=device,
    )
    if what == "tokens of q":
        case = case.with_(q=case.q[:1].expand_as(case.q))
    elif what == "heads of q":
        case = case.with_(q=case.q[:, 3:4].expand_as(case.q))
    else:
        axis = {"pages": 0, "heads": 1, "tokens": 2}[what]
        page = case.block_table[0, 0].long()
        if axis > 0:  # no poison that only some of the pages, which stay apart, would hold
            case.k_cache.view(torch.uint8).copy_(case.k_cache.view(torch.uint8)[page].clone())
            case.v_cache.view(torch.uint8).copy_(case.v_cache.view(torch.uint8)[page].clone())
            page = 0
        k, v = (
            cache.view(torch.uint8).narrow(axis, int(page), 1).view(cache.dtype).expand_as(cache)
            for cache in (case.k_cache, case.v_cache)
        )
        case = case.with_(k_cache=k, v_cache=v)
    check(op, case)


@pytest.mark.parametrize("dtypes", [DTYPES[1], DTYPES[2]], ids=dtype_name)
@pytest.mark.parametrize("missing", ["pages", "columns"])
@pytest.mark.parametrize("tokens", [2, 300])
def test_no_pages_at_all(device, require, op, dtypes, tokens, missing):
    """A pool without a page, or a table without a column: nothing to attend to, everywhere."""
    require(op, *dtypes)
    lengths, hq = [(tokens, 2000), (1, 5)], 8 if tokens == 2 else 32
    case = make_case(lengths, hq=hq, dtype=dtypes[0], cache_dtype=dtypes[1], device=device)
    if missing == "pages":
        case = case.with_(k_cache=case.k_cache[:0], v_cache=case.v_cache[:0])
    else:
        case = case.with_(block_table=case.block_table[:, :0])
    out, lse = run(op, case)
    assert not bool(out.any()) and bool((lse == float("-inf")).all())
    out, lse = msa_kernels.paged_decode(
        *(case.q, case.k_cache, case.v_cache, case.block_table, case.seq_lens),
        cu_seqlens_q=case.cu_seqlens_q,
        return_lse=True,
        **case.scales,
    )
    assert not bool(out.any()) and bool((lse == float("-inf")).all())


def test_logits_of_minus_infinity(device, require, op):
    """Keys that are there but have weight 0: nothing above -inf is nothing to attend to."""
    require(op)
    case = make_case([(1, 5), (2, 700)], padding_rows=0, device=device)
    q = case.q.abs() + 1
    case.k_cache[case.block_table[0, 0].long(), :, :5, 0] = float("-inf")
    case.k_cache[case.block_table[1, 1].long(), :, 7, 0] = float("-inf")
    out, lse = run(op, case.with_(q=q))
    assert not bool(out[0].any()) and bool((lse[0] == float("-inf")).all())
    assert bool(out[1:].isfinite().all()) and bool(lse[1:].isfinite().all())


def test_parts_merge_to_the_whole(device, require, op):
    """Two disjoint halves of a selection, merged by their LSEs, are the whole."""
    require(op)
    require("merge_lse", torch.float32)
    case = make_case("long", device=device)
    even = torch.arange(16, device=device) % 2 == 0
    halves = [run(op, case.with_(ids=case.ids.masked_fill(mask, -1))) for mask in (even, ~even)]
    out, lse = msa_kernels.merge_lse(
        torch.stack([out for out, _ in halves]), torch.stack([lse for _, lse in halves])
    )
    assert_attention(case, out, lse)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_batch(device, require, op, data):
    dtypes = data.draw(st.sampled_from(DTYPES))
    require(op, *dtypes)
    q_len = st.one_of(st.integers(0, 3), st.integers(0, 20))
    seq_len = st.one_of(st.integers(0, 400), st.sampled_from([128, 2048, 2049, 5121]))
    lengths = data.draw(st.lists(st.tuples(q_len, seq_len), min_size=1, max_size=4))
    hkv, group = data.draw(st.sampled_from([(1, 16), (2, 4), (4, 1), (1, 8), (2, 2)]))
    case = make_case(
        lengths,
        hq=hkv * group,
        hkv=hkv,
        topk=data.draw(st.integers(1, 32)),
        dtype=dtypes[0],
        cache_dtype=dtypes[1],
        layout=data.draw(st.sampled_from(LAYOUTS)),
        poison=data.draw(st.sampled_from(["nan", "inf"])),
        table_padding=data.draw(st.sampled_from([-1, 2**31 - 1])),
        padding_rows=data.draw(st.integers(0, 3)),
        strided=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
        device=device,
    )
    kind = data.draw(st.sampled_from(SELECTIONS))
    ids = make_selection(kind, case.visible.cpu(), hkv, case.topk).to(device)
    check(op, case.with_(ids=ids))
