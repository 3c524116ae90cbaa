"""Draft tokens in sparse_decode: calls with enough tokens a request that Hopper serves by kernels
of their own, one where tiles of tokens fill a GPU, others where they do not. Every token must get
what it gets alone."""

import pytest
import torch

import msa_kernels
from msa_kernels import reference
from tests.conftest import no_gpu_reason
from tests.inputs import (
    BLOCK,
    FALSE_STARTS,
    FP8,
    check_false_starts,
    dtype_name,
    make_case,
    make_selection,
    same_bits,
    shared_selection,
    with_duplicates,
    with_holes,
)
from tests.tolerance import LSE_REL, assert_attention, near

pytestmark = pytest.mark.gpu

REQUESTS = {(64, 4): 32, (32, 4): 31, (32, 2): 64, (16, 1): 128, (8, 1): 125}
"""(Hq, Hkv), of 16 or 8 query heads a KV head -> requests whose tiles, one each, fill 132 SMs"""
FEW = {(64, 4): (1, 8, 16), (32, 4): (17,), (32, 2): (11,), (16, 1): (5, 60), (8, 1): (90,)}
"""requests whose tiles are fewer"""
ANY = [(heads, count) for heads, few in FEW.items() for count in (*few, REQUESTS[heads])]


@pytest.fixture(autouse=True)
def gpu():
    if reason := no_gpu_reason():
        pytest.skip(reason)


def draft_case(hq=64, hkv=4, tokens=8, requests=None, vary=True, **options):
    """Requests of `tokens` query tokens or, in turn, one fewer and one more, of all lengths."""
    requests = requests or REQUESTS[hq, hkv]
    lengths = []
    for r in range(requests):
        q_len = tokens + (r % 3 - 1 if vary and r < requests // 3 * 3 else 0)
        lengths.append((q_len, q_len + 97 * r % 5000))
    options = {"dtype": torch.bfloat16, "device": "cuda"} | options
    return make_case(lengths, hq=hq, hkv=hkv, **options)


def run(case):
    return msa_kernels.sparse_decode(*case.attend_args, **case.scales, return_lse=True)


def alone(case, tokens):
    """(out, lse) of some tokens, each as a request of its own: other kernels serve those."""
    where = reference.token_positions(
        case.cu_seqlens_q, case.seq_lens, case.num_tokens, case.block_table.size(1)
    )
    request, pos = where.request[tokens], where.pos[tokens]
    return msa_kernels.sparse_decode(
        case.q[tokens],
        case.k_cache,
        case.v_cache,
        case.ids[:, tokens],
        case.block_table[request],
        torch.arange(len(tokens) + 1, device="cuda", dtype=torch.int32),
        (pos + 1).int(),
        **case.scales,
        return_lse=True,
    )


def check(case):
    out, lse = run(case)
    assert not bool(out[case.num_real :].any())
    assert bool((lse[case.num_real :] == float("-inf")).all())
    tokens = torch.arange(case.num_real, device="cuda")
    want, want_lse = alone(case, tokens)
    torch.testing.assert_close(out[tokens], want, **near(out.dtype))
    torch.testing.assert_close(lse[tokens], want_lse, rtol=LSE_REL, atol=1e-4)
    again, again_lse = run(case)
    assert same_bits(again, out) and same_bits(again_lse, lse)
    return out, lse


@pytest.mark.parametrize(
    ("topk", "share"),
    [(16, 0.0), (16, 0.5), (16, 0.9), (16, 1.0), (5, 0.7), (32, 0.7), (1, 0.5)],
)
@pytest.mark.parametrize(("heads", "requests"), ANY)
def test_shares_of_blocks(heads, requests, topk, share):
    case = draft_case(*heads, requests=requests, topk=topk)
    check(case.with_(ids=shared_selection(case, share)))


@pytest.mark.parametrize("tokens", range(3, 18))
@pytest.mark.parametrize("few", [0, 1, 4])
@pytest.mark.parametrize(("hq", "hkv"), [(64, 4), (32, 4)])
def test_tokens_of_a_request(hq, hkv, tokens, few):
    """More than a tile holds are cut; on both sides of where they are."""
    tile_tokens = 128 // (hq // hkv)
    tiles = -(-tokens // tile_tokens)
    case = draft_case(hq, hkv, tokens, requests=few or 32 // tiles)
    out, lse = check(case.with_(ids=shared_selection(case, 0.8)))
    assert_attention(case.with_(ids=shared_selection(case, 0.8)), out, lse)


@pytest.mark.parametrize("requests", [2, 32])
@pytest.mark.parametrize("layout", ["nhd", "interleaved", "nhd_kv", "offset"])
def test_layouts_and_strides(layout, requests):
    case = draft_case(requests=requests, layout=layout, strided=True, poison="inf", shared_prefix=3)
    check(case)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=dtype_name)
@pytest.mark.parametrize("kind", ["holes", "duplicates", "tables", "int64", "none", "lengths"])
@pytest.mark.parametrize("requests", [12, None])
@pytest.mark.parametrize(("hq", "hkv"), [(64, 4), (32, 4)])
def test_what_a_selection_may_hold(hq, hkv, requests, kind, cache_dtype):
    case = draft_case(hq, hkv, requests=requests, cache_dtype=cache_dtype)
    ids = shared_selection(case, 0.7)
    if kind == "holes":
        ids = with_holes(ids)
    elif kind == "duplicates":
        ids = with_duplicates(ids)
    elif kind == "tables":
        table = case.block_table.clone()
        table[5, 1] = -1
        table[9, 3] = 2**31 - 1
        table[11, 0] = case.k_cache.size(0)
        case = case.with_(block_table=table)
    elif kind == "int64":
        ids = ids.long()
    elif kind == "none":
        ids = torch.full_like(ids, -1)
    else:  # no token at all, or more query tokens than tokens
        lens = case.seq_lens.clone()
        lens[::4], lens[1::4] = 0, 3
        case = case.with_(seq_lens=lens)
    out, lse = check(case.with_(ids=ids))
    if kind == "none":
        assert not bool(out.any()) and bool((lse == float("-inf")).all())


@pytest.mark.parametrize("hkv", [1, 2, 4])
def test_requests_of_any_number_of_tokens(hkv):
    """Eight on the average; one has most of them, and some have none."""
    lengths = [(0, 500), (131, 4000), (1, 1), (0, 0), (8, 8), (3, 700)]
    lengths += [(q, 300 + 61 * q) for q in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13)] * 3
    lengths = lengths[:32]
    case = make_case(
        lengths, hq=16 * hkv, hkv=hkv, dtype=torch.bfloat16, device="cuda", shared_prefix=2
    )
    assert 5 <= case.num_tokens // len(lengths) <= 8
    check(case.with_(ids=shared_selection(case, 0.8)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("share", [0.0, 0.9])
@pytest.mark.parametrize("requests", [1, 9, None])
@pytest.mark.parametrize(("hq", "hkv"), [(64, 4), (32, 4)])
def test_wild_values_reach_those_that_see_them(hq, hkv, requests, share, value):
    case = draft_case(hq, hkv, requests=requests, topk=7)
    case = case.with_(ids=shared_selection(case, share))
    rng = torch.Generator().manual_seed(0)
    for request, (_, length) in enumerate(case.lengths):
        token = int(torch.randint(length, (1,), generator=rng))
        page = case.block_table[request, token // BLOCK].long()
        case.v_cache[page, request % hkv, token % BLOCK, 3:7] = value
    newest = case.block_table[0, (case.lengths[0][1] - 1) // BLOCK].long()
    case.v_cache[newest, 0, (case.lengths[0][1] - 1) % BLOCK, 90] = value  # the last token alone
    out, lse = run(case)
    exact, exact_lse = reference.sparse_attention(*case.attend_args)
    assert torch.equal(out.isfinite(), exact.isfinite()) and not bool(out.isfinite().all())
    finite = exact.isfinite()
    torch.testing.assert_close(out[finite].float(), exact[finite], **near(out.dtype))
    torch.testing.assert_close(lse, exact_lse, rtol=LSE_REL, atol=1e-4)


@pytest.mark.parametrize("blocks", [8192, 12288, 12289, 40_000])
@pytest.mark.parametrize("requests", [24, None])
def test_contexts_past_a_window(blocks, requests):
    """A table that walks few pages again and again; ids up to the last block, some twice."""
    case = draft_case(16, 1, requests=requests, vary=False)
    pages = case.block_table[-1, :10]
    table = pages[torch.arange(blocks, device="cuda") % 10].expand(len(case.lengths), -1)
    short = torch.arange(len(case.lengths), device="cuda") * 13
    case = case.with_(block_table=table, seq_lens=(blocks * BLOCK - short).int())
    ids = make_selection("random", case.visible.cpu(), 1, 16, seed=blocks).cuda()
    ids[:, ::3, 2:5] = ids[:, ::3, 2:3]
    check(case.with_(ids=ids))


@pytest.mark.parametrize(("hq", "requests"), [(32, 64), (16, 64), (16, 100), (16, 2)])
def test_bits_do_not_depend_on_neighbours(hq, requests):
    """Other requests beside it, in another order, and other tokens in the tile: the same bits. Not
    so of pairs in clusters, which serve more than 16 and up to 132 (token, KV head)."""
    case = draft_case(hq, hq // 16, 7, requests=requests, vary=False, padding_rows=1)
    case = case.with_(ids=shared_selection(case, 0.5))
    out, lse = run(case)
    # Moved by one row, every token but one is in another place of its tile, or in another one.
    moved = case.with_(
        q=torch.cat([case.q[:1], case.q[:-1]]),
        ids=torch.cat([case.ids[:, :1], case.ids[:, :-1]], dim=1),
        cu_seqlens_q=case.cu_seqlens_q + 1,
    )
    moved.cu_seqlens_q[0] = 0
    again, again_lse = run(moved)
    assert same_bits(again[1:], out[:-1]) and same_bits(again_lse[1:], lse[:-1])
    order = torch.arange(len(case.lengths), device="cuda").flip(0)
    rows = torch.arange(case.num_real, device="cuda").view(-1, 7)[order].flatten()
    rows = torch.cat([rows, rows.new_tensor([case.num_real])])
    turned = case.with_(
        q=case.q[rows],
        ids=case.ids[:, rows],
        block_table=case.block_table[order],
        seq_lens=case.seq_lens[order],
    )
    again, again_lse = run(turned)
    assert same_bits(again, out[rows]) and same_bits(again_lse, lse[rows])


@pytest.mark.parametrize("requests", [21, None])
def test_graph_replays_follow_their_inputs(requests):
    """A captured call reads lengths, tokens of each request, tables and ids when it is replayed."""
    case = draft_case(requests=requests)
    ids, table, lens = case.ids.clone(), case.block_table.clone(), case.seq_lens.clone()
    starts = case.cu_seqlens_q.clone()
    held = case.with_(ids=ids, block_table=table, seq_lens=lens, cu_seqlens_q=starts)
    run(held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(held)
    uneven = case.cu_seqlens_q.clone()
    uneven[1:20] = 0  # the first requests have no token, one has theirs
    for step, (lengths, first) in enumerate(
        [
            (case.seq_lens, case.cu_seqlens_q),
            (case.seq_lens // 3, case.cu_seqlens_q),
            (case.seq_lens, uneven),
            (case.seq_lens * 0, case.cu_seqlens_q),
            (case.seq_lens - 1, case.cu_seqlens_q // 2),
        ]
    ):
        lens.copy_(lengths)
        starts.copy_(first)
        ids.copy_(shared_selection(held, (0.0, 0.5, 1.0)[step % 3], seed=step))
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        want, want_lse = run(held)
        assert same_bits(out, want) and same_bits(lse, want_lse)
        exact, exact_lse = reference.sparse_attention(*held.attend_args)
        torch.testing.assert_close(out.float(), exact, **near(out.dtype))
        torch.testing.assert_close(lse, exact_lse, rtol=LSE_REL, atol=1e-4)


@pytest.mark.parametrize("kind", FALSE_STARTS)
@pytest.mark.parametrize("requests", [1, 32])
def test_starts_of_more_tokens_than_there_are(requests, kind):
    """Whatever cu_seqlens_q says: rows past the batch stay as they are."""
    case = draft_case(requests=requests, vary=False, padding_rows=0)
    full, _ = run(case)
    kept = case.num_tokens - 3
    out = check_false_starts(msa_kernels.sparse_decode, case, kept, kind)
    if kind == "more":
        torch.testing.assert_close(out, full[:kept], **near(out.dtype))
