"""decode_view: page tables over per-head pages, proved by attention that knows nothing of MSA."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import msa_kernels
from msa_kernels import reference
from tests.inputs import (
    BATCHES,
    BLOCK,
    FP8,
    LAYOUTS,
    SELECTIONS,
    D,
    dtype_name,
    make_case,
    make_selection,
    same_bits,
)
from tests.tolerance import assert_attention

ONCE = [kind for kind in SELECTIONS if kind != "duplicates"]


def view_of(case):
    return msa_kernels.decode_view(case.ids, *case.batch, case.k_cache, case.v_cache)


def steps_of(case):
    """(page_step, head_step) that the view's documentation promises for the K cache."""
    if case.k_cache.size(1) == 1:
        return 1, 0
    page, head = case.k_cache.stride(0), case.k_cache.stride(1)
    unit = torch.tensor([page, head]).gcd(torch.tensor(page))[1].item()
    return page // unit, head // unit


# Pages follow from ids, and steps from the layout: every one of each, not every pair.
@pytest.mark.parametrize(
    "selection,layout",
    [*((kind, LAYOUTS[i % len(LAYOUTS)]) for i, kind in enumerate(SELECTIONS))]
    + [("random", layout) for layout in LAYOUTS[1:]],
)
def test_matches_reference(device, require, selection, layout):
    require("decode_view", torch.int64 if selection == "int64" else torch.int32)
    for batch in BATCHES:
        for strided, topk in ((False, 16), (True, 5)):
            case = make_case(
                batch,
                selection=selection,
                layout=layout,
                strided=strided,
                topk=topk,
                hq=6,
                hkv=3,
                device=device,
            )
            view = view_of(case)
            expected = reference.decode_view(
                case.ids, *case.batch, case.k_cache.size(0), *steps_of(case)
            )
            for name, got, want in zip(("page_table", "kv_lens"), view, expected, strict=False):
                assert got.dtype == torch.int32 and got.shape == want.shape
                assert torch.equal(got, want), f"{batch}: {name}"


@pytest.mark.parametrize("batch", BATCHES)
def test_into_tensors_of_an_engine(device, require, batch):
    """Slices of larger tensors, whatever stood there; around them nothing is written."""
    require("decode_view", torch.int32)
    case = make_case(batch, hq=4, hkv=2, device=device)
    expected = view_of(case)
    rows, width = expected.page_table.shape
    tables = torch.full((rows + 2, width + 3), -7, dtype=torch.int32, device=device)
    lens = torch.full((rows + 2, 2), -7, dtype=torch.int32, device=device)
    page_table, kv_lens = tables[1:-1, 2:-1], lens[1:-1, 1]
    got = msa_kernels.decode_view(
        *(case.ids, *case.batch, case.k_cache, case.v_cache), page_table=page_table, kv_lens=kv_lens
    )
    assert got.page_table is page_table and got.kv_lens is kv_lens
    assert torch.equal(page_table, expected.page_table) and torch.equal(kv_lens, expected.kv_lens)
    page_table.fill_(-7), kv_lens.fill_(-7)
    assert bool((tables == -7).all()) and bool((lens == -7).all())
    across = torch.zeros(width, rows, dtype=torch.int32, device=device).T
    torch.ops.msa.decode_view.out(
        *(case.ids, *case.batch, case.k_cache.size(0), *steps_of(case)),
        page_table=across,
        kv_lens=kv_lens,
    )
    assert torch.equal(across, expected.page_table) and torch.equal(kv_lens, expected.kv_lens)


def test_tensors_of_an_engine_come_together():
    case = make_case("mixed")
    call = (case.ids, *case.batch, case.k_cache, case.v_cache)
    with pytest.raises(ValueError, match=r"msa\.decode_view: page_table and kv_lens must be given"):
        msa_kernels.decode_view(*call, kv_lens=torch.zeros(case.num_tokens * 2).int())


@pytest.mark.parametrize("hkv", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_view_pages_are_the_cache(device, require, layout, hkv):
    """Every entry leads to the page and head that it stands for, in the same memory."""
    require("decode_view", torch.int32)
    case = make_case("decode_edges", layout=layout, hq=hkv, hkv=hkv, device=device)
    view = view_of(case)
    entries = view.page_table.view(case.num_tokens, hkv, -1)
    for token in (0, 3, 7, 12):
        for head in range(hkv):
            ids = case.ids[head, token]
            count = min(16, int(case.visible[token]))
            for column, block in enumerate(sorted(ids[:count].tolist())):
                page = int(case.block_table[token, block])
                entry = int(entries[token, head, column])
                for cache, seen in ((case.k_cache, view.k_view), (case.v_cache, view.v_view)):
                    assert seen[entry, 0].data_ptr() == cache[page, head].data_ptr()
                    assert seen[entry, 0].stride() == cache[page, head].stride()
    assert view.k_view.shape[1:] == (1, BLOCK, D)


def paged_attention(q, k_pages, v_pages, page_table, kv_lens, scale):
    """Dense attention over page tables, one row at a time: q [R, G, D], pages [N, 1, 128, D].

    Written as any engine would, in FP64: it knows pages and lengths, and no blocks, heads or ids.
    """
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for row, length in enumerate(kv_lens.tolist()):
        if length == 0:
            continue
        pages = page_table[row, : -(-length // BLOCK)].long()
        k = k_pages[pages, 0].double().flatten(0, 1)[:length]
        v = v_pages[pages, 0].double().flatten(0, 1)[:length]
        weights = torch.softmax(scale * q[row].double() @ k.T, dim=-1)
        out[row] = weights @ v
    return out


@pytest.mark.parametrize("selection", ONCE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_independent_paged_attention(device, require, layout, selection):
    """A plain paged attention on the view gives MSA's result, poison around every page or not."""
    require("decode_view", torch.int32)
    for batch in ("decode_edges", "verify", "overfull"):
        case = make_case(
            batch, layout=layout, selection=selection, hq=8, hkv=2, strided=True, device=device
        )
        view = view_of(case)
        q = case.q.reshape(case.num_tokens * 2, 4, D)
        out = paged_attention(q, view.k_view, view.v_view, view.page_table, view.kv_lens, D**-0.5)
        exact, _ = reference.sparse_decode(*case.attend_args, compute_dtype=torch.float64)
        torch.testing.assert_close(out.view_as(exact), exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("selection", ONCE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_paged_decode(device, require, layout, selection):
    """paged_decode on the view is sparse_decode."""
    require("decode_view", torch.int32)
    require("paged_decode")
    case = make_case("verify", layout=layout, selection=selection, hq=8, hkv=2, device=device)
    view = view_of(case)
    out, lse = msa_kernels.paged_decode(
        case.q.reshape(case.num_tokens * 2, 4, D),
        view.k_view,
        view.v_view,
        view.page_table,
        view.kv_lens,
        return_lse=True,
    )
    assert_attention(case, out.view_as(case.q), lse.view(case.num_tokens, 8))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_own_paged_decode_on_fp8(device, require, dtype, layout):
    """One scale of K and one of V: a view has one KV head, and takes no more."""
    require("decode_view", torch.int32)
    require("paged_decode", dtype, FP8)
    case = make_case(
        "verify", layout=layout, hq=8, hkv=2, dtype=dtype, cache_dtype=FP8, device=device
    )
    view = view_of(case)
    args = (case.q.reshape(case.num_tokens * 2, 4, D), view.k_view, view.v_view, *view[:2])
    with pytest.raises(ValueError, match=r"msa\.paged_decode: k_scale must .*\[2\]"):
        msa_kernels.paged_decode(*args, **case.scales)
    case = case.with_(k_scale=case.k_scale[:1], v_scale=case.v_scale[1:])
    out, lse = msa_kernels.paged_decode(*args, **case.scales, return_lse=True)
    assert_attention(case, out.view_as(case.q), lse.view(case.num_tokens, 8))


def test_duplicates_of_full_blocks_count_twice(device, require):
    require("decode_view", torch.int32)
    case = make_case([(1, 700), (1, 5200)], selection="duplicates", hq=8, hkv=2, device=device)
    view = view_of(case)
    q = case.q.reshape(case.num_tokens * 2, 4, D)
    out = paged_attention(q, view.k_view, view.v_view, view.page_table, view.kv_lens, D**-0.5)
    exact, _ = reference.sparse_decode(*case.attend_args, compute_dtype=torch.float64)
    torch.testing.assert_close(out.view_as(exact), exact, rtol=1e-9, atol=1e-9)


def test_entries_without_a_page_are_left_out(device, require):
    """Negative pages, and those whose view page int32 cannot hold; also of the own block."""
    require("decode_view", torch.int32)
    case = make_case("chunks", layout="nhd", selection="random", topk=20, device=device)
    case.block_table[0, 3] = -1
    case.block_table[1, 17] = -(2**31)  # the own block of the last token
    case.block_table[1, 0] = 2**31 - 1
    view = view_of(case)
    expected = reference.decode_view(case.ids, *case.batch, case.k_cache.size(0), *steps_of(case))
    assert torch.equal(view.page_table, expected[0]) and torch.equal(view.kv_lens, expected[1])


def test_fp8_caches_and_padding(device, require):
    require("decode_view", torch.int32)
    case = make_case("mixed", cache_dtype=FP8, dtype=torch.bfloat16, device=device)
    view = view_of(case)
    rows = view.page_table.view(case.num_tokens, -1), view.kv_lens.view(case.num_tokens, -1)
    assert not any(bool(x[case.num_real :].any()) for x in rows)
    assert view.k_view.dtype == FP8


def test_caches_in_different_ratio_are_refused(device):
    case = make_case("one", hq=2, hkv=2, device=device)
    other = make_case("one", hq=2, hkv=2, layout="nhd", device=device)
    with pytest.raises(ValueError, match=r"msa\.decode_view: v_cache must .*expected.*got"):
        msa_kernels.decode_view(case.ids, *case.batch, case.k_cache, other.v_cache)


def test_twenty_runs_give_the_same_bits(device, require):
    require("decode_view", torch.int32)
    case = make_case("verify", device=device)
    first = view_of(case)
    for _ in range(19):
        again = view_of(case)
        assert same_bits(first.page_table, again.page_table)
        assert same_bits(first.kv_lens, again.kv_lens)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_batch(device, require, data):
    require("decode_view", torch.int32)
    lengths = data.draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5300)), min_size=1, max_size=4)
    )
    topk, heads = data.draw(st.integers(1, 32)), data.draw(st.integers(1, 4))
    cu_seqlens_q = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).int()
    seq_lens = torch.tensor([n for _, n in lengths], dtype=torch.int32)
    num_tokens = int(cu_seqlens_q[-1]) + data.draw(st.integers(0, 2))
    width = data.draw(st.integers(1, 45))
    table = torch.randint(
        -1, 1000, (len(lengths), width), generator=torch.Generator().manual_seed(1)
    ).int()
    visible = reference.token_positions(cu_seqlens_q, seq_lens, num_tokens, width).visible
    kind = data.draw(st.sampled_from(ONCE))
    ids = make_selection(kind, visible, heads, topk, seed=data.draw(st.integers(0, 9)))
    steps = data.draw(st.sampled_from([(1, 0), (4, 1), (128, 1), (1000, 3), (2**21, 7)]))
    args = [x.to(device) for x in (ids, table, cu_seqlens_q, seq_lens)]
    page_table, kv_lens = torch.ops.msa.decode_view(*args, 900, *steps)
    want_table, want_lens = reference.decode_view(*args, 900, *steps)
    assert torch.equal(page_table, want_table) and torch.equal(kv_lens, want_lens)
