"""sparse_decode on Hopper, plan and kernels of each way that a call goes
(`csrc/step4_attend/sm80/decode_inst.cu`)."""

from typing import NamedTuple

import pytest
import torch

from msa_kernels import reference
from tests.emulation.emulator import Emulator
from tests.inputs import (
    BLOCK,
    FP8,
    Lengths,
    dtype_name,
    make_case,
    same_bits,
    shared_selection,
    with_duplicates,
    with_holes,
)
from tests.tolerance import assert_attention

CACHES = [torch.bfloat16, FP8]
WALK, MERGE = "msa_decode_sm80_kernel", "msa_decode_merge_sm80_kernel"
CLUSTER, PAIR = "msa_decode_cluster_sm90_kernel", "msa_decode_pair_sm90_kernel"
TILE, STREAM = "msa_decode_tile_sm90_kernel", "msa_decode_stream_sm90_kernel"

FEW = [(1, 9 * BLOCK + 70), (4, 300), (0, 500), (1, 7), (2, 1)]
"""tokens of requests; with padding 11, two a request"""
DRAFTS = [(5, 6 * BLOCK + 2), (4, 300), (8, 8), (1, 500)]
"""with padding 21, five a request"""
MORE_DRAFTS = [(10, 6 * BLOCK + 2), (9, 300), (8, 8), (10, 500)]
"""with padding 40, ten a request"""


class Way(NamedTuple):
    lengths: Lengths
    topk: int
    hkv: int
    sms: int
    launched: dict[torch.dtype, list[tuple[str, int, int]]]
    """by the caches' type"""


def both(*launches):
    return {cache: list(launches) for cache in CACHES}


WAYS = {
    "clusters": Way(
        FEW, 6, 2, 132, {torch.bfloat16: [(CLUSTER, 256, 6)], FP8: [(CLUSTER, 256, 3)]}
    ),
    "two_an_sm": Way(FEW, 6, 2, 60, both((CLUSTER, 128, 5))),
    "one_cta": Way(FEW, 6, 2, 22, both((CLUSTER, 256, 1))),
    "walk": Way(FEW, 6, 2, 3, both((WALK, 128, 0), (MERGE, 128, 0))),
    "one_split": Way(FEW, 6, 6, 3, {torch.bfloat16: [(WALK, 128, 0)], FP8: [(STREAM, 128, 0)]}),
    "pairs": Way(DRAFTS, 4, 12, 132, {torch.bfloat16: [(PAIR, 256, 0)], FP8: [(PAIR, 128, 0)]}),
    "many_pairs": Way(DRAFTS, 4, 13, 132, both((PAIR, 128, 0))),
    "tiles": Way(DRAFTS, 4, 30, 132, {torch.bfloat16: [(TILE, 384, 0)]}),
    "narrow_tiles": Way(MORE_DRAFTS, 4, 15, 132, {torch.bfloat16: [(TILE, 256, 0)]}),
}


LONG = ("many_pairs", "tiles", "narrow_tiles")


def each_way(*without: str):
    return pytest.mark.parametrize(
        "cache,way",
        [
            (cache, name)
            for name, way in WAYS.items()
            for cache in way.launched
            if name not in without
        ],
        ids=lambda x: x if isinstance(x, str) else dtype_name(x),
    )


def make(way, cache, group=8, **options):
    lengths, topk, hkv = WAYS[way][:3]
    options |= {"dtype": torch.bfloat16, "cache_dtype": cache, "topk": topk}
    return make_case(lengths, hq=group * hkv, hkv=hkv, **options)


def run(library, case, way, seed):
    """out and LSE; the way's kernels must have run."""
    emulator = Emulator(library, seed, sms=WAYS[way].sms, ctas_at_once=1 + seed % 4)
    result = emulator.sparse_decode(*case.attend_args, **case.scales)
    assert emulator.launched == WAYS[way].launched[case.k_cache.dtype]
    return result


def check(library, case, way, seed):
    out, lse = run(library, case, way, seed)
    assert_attention(case, out, lse)
    return out, lse


@each_way()
def test_orders(library, cache, way):
    """The same bits in each."""
    case = make(way, cache)
    case = case.with_(ids=shared_selection(case, 0.7))
    first = check(library, case, way, seed=0)
    for seed in (1,) if way == "tiles" else (1, 2, 3):
        again = run(library, case, way, seed)
        assert all(same_bits(*results) for results in zip(again, first, strict=True))


@pytest.mark.parametrize("group", [1, 2, 4, 16])
@each_way("many_pairs", "tiles", "narrow_tiles")
def test_groups(library, cache, way, group):
    check(library, make(way, cache, group), way, seed=group)


@pytest.mark.parametrize(
    "layout,poison", [("nhd", "nan"), ("interleaved", "inf"), ("offset", "nan")]
)
@each_way(*LONG)
def test_layouts(library, cache, way, layout, poison):
    """Strides that are not a cache's own, and what lies where no token was written."""
    case = make(way, cache, layout=layout, poison=poison, strided=True)
    check(library, case, way, seed=3)


def changed(case, kind):
    if kind == "holes":
        ids = with_holes(case.ids)
        ids[:, 2] = -1
        return case.with_(ids=ids)
    if kind == "duplicates":
        return case.with_(ids=with_duplicates(shared_selection(case, 0.7)))
    table = case.block_table.clone()
    table[0, 2:8:4] = -1
    table[1, 1] = case.k_cache.size(0)
    table[0, 4] = 2**31 - 1
    return case.with_(block_table=table)


@pytest.mark.parametrize("kind", ["holes", "duplicates", "pages"])
@each_way(*LONG)
def test_selections(library, cache, way, kind):
    """Entries and whole rows that are no blocks, blocks listed twice, pages that do not exist."""
    check(library, changed(make(way, cache), kind), way, seed=4)


@pytest.mark.parametrize("kind", ["int64", "garbage_tail", "none", "descending"])
@each_way(*LONG)
def test_ids(library, cache, way, kind):
    out, lse = check(library, make(way, cache, selection=kind), way, seed=5)
    if kind == "none":
        assert not bool(out.any()) and bool((lse == float("-inf")).all())


@pytest.mark.parametrize(
    "kind,group", [("holes", 8), ("duplicates", 16), ("pages", 8)], ids=lambda x: str(x)
)
def test_tiles(library, kind, group):
    case = make("tiles", torch.bfloat16, group, layout="interleaved", poison="inf", strided=True)
    check(library, changed(case, kind), "tiles", seed=group)


@each_way()
def test_wild_values(library, cache, way):
    """NaN in K and V that only the last tokens of a request see, and in V of an early block."""
    case = make(way, cache)
    for request, (_, length) in enumerate(case.lengths):
        for token in range(max(0, length - 2), length):
            page = case.block_table[request, token // BLOCK].item()
            for store in (case.k_cache, case.v_cache):
                set_nan(store, page, token % BLOCK, request)
    set_nan(case.v_cache, case.block_table[0, 1].item(), 77, 9)
    _, lse = check(library, case, way, seed=6)
    assert bool(lse.isnan().any()) and not bool(lse.isnan().all())


def set_nan(cache, page, row, column):
    values = cache[page, -1, row].float()
    values[column::40] = torch.nan
    cache[page, -1, row] = values.to(cache.dtype)


@pytest.mark.parametrize(
    "cache,topk,hkv,sms,launched",
    [
        (torch.bfloat16, 16, 1, 132, (CLUSTER, 256, 16)),
        (FP8, 16, 1, 132, (CLUSTER, 256, 8)),
        (torch.bfloat16, 18, 33, 4, (WALK, 128, 0)),
        (FP8, 34, 33, 4, (STREAM, 128, 0)),
    ],
    ids=["largest_cluster", "largest_cluster_fp8", "walk", "stream"],
)
def test_long_rows(library, cache, topk, hkv, sms, launched):
    """Clusters that are as large as they get; more slices of a warp than it looks up at a time."""
    lengths = [(1, topk * BLOCK + 70), (1, topk * BLOCK)]
    options = {"dtype": torch.bfloat16, "cache_dtype": cache, "padding_rows": 0, "topk": topk}
    case = make_case(lengths, hq=2 * hkv, hkv=hkv, **options)
    emulator = Emulator(library, seed=7, sms=sms)
    out, lse = emulator.sparse_decode(*case.attend_args, **case.scales)
    assert emulator.launched == [launched]
    assert_attention(case, out, lse)


EVEN = [(2, 9 * BLOCK + 70), (2, 300), (2, 40), (2, 1), (2, 8 * BLOCK)]
"""with padding 11, two a request: each is the one that is guessed"""
EVEN_DRAFTS = [(5, 6 * BLOCK + 2), (5, 300), (5, 9), (5, 500)]
"""with padding 21, five a request"""


def spread_out(case, columns: slice, seed=0):
    """The same keys as blocks that stand anywhere in tables of 1,040 pages, cut to some columns."""
    rng = torch.Generator().manual_seed(seed)
    where = reference.token_positions(
        case.cu_seqlens_q, case.seq_lens, case.num_tokens, case.block_table.size(1)
    )
    requests = len(case.lengths)
    table = torch.full((requests, 1040), 2**31 - 1, dtype=torch.int32)[:, columns]
    seq_lens, ids = case.seq_lens.clone(), torch.full_like(case.ids, -1)
    for request, (_, length) in enumerate(case.lengths):
        blocks = -(-length // BLOCK)
        if blocks == 0:
            continue
        places = torch.randperm(table.size(1), generator=rng)[:blocks].sort().values
        # The tokens of a request may end in the block before its last.
        places[-2:] = table.size(1) - 1 - torch.arange(len(places[-2:])).flip(0)
        table[request, places] = case.block_table[request, :blocks]
        seq_lens[request] += (places[-1] + 1 - blocks) * BLOCK
        for token in (where.request == request).nonzero()[:, 0].tolist():
            count = min(case.topk, int(where.visible[token]))
            chosen = case.ids[:, token, :count].long()
            real = (chosen >= 0) & (chosen < where.visible[token])
            ids[:, token, :count] = places[chosen.where(real, 0)].to(ids.dtype).where(real, -1)
    return case.with_(block_table=table, seq_lens=seq_lens, ids=ids)


@pytest.mark.parametrize(
    "columns", [slice(0, 1040), slice(0, 1037), slice(1, 1040), slice(0, 1040, 2)], ids=str
)
@pytest.mark.parametrize("lengths", [EVEN, FEW], ids=["guessed", "ragged"])
@each_way("pairs", *LONG)
def test_tables(library, cache, way, lengths, columns):
    """More pages than a CTA copies, rows that are no vectors of 16 bytes or not contiguous: the
    bits are those of the short table."""
    check_tables(library, cache, way, lengths, columns)


@pytest.mark.parametrize("columns", [slice(0, 1040), slice(1, 1040), slice(0, 1040, 2)], ids=str)
@pytest.mark.parametrize("lengths", [EVEN_DRAFTS, DRAFTS], ids=["guessed", "ragged"])
@pytest.mark.parametrize("cache", CACHES, ids=dtype_name)
def test_tables_of_pairs(library, cache, lengths, columns):
    """The same where two tokens, perhaps of two requests, share a CTA."""
    check_tables(library, cache, "pairs", lengths, columns)


def check_tables(library, cache, way, lengths, columns):
    _, topk, hkv = WAYS[way][:3]
    options = {"dtype": torch.bfloat16, "cache_dtype": cache, "topk": topk}
    padding = 1 if lengths in (EVEN, EVEN_DRAFTS) else 3
    case = make_case(lengths, hq=8 * hkv, hkv=hkv, padding_rows=padding, **options)
    case = case.with_(ids=shared_selection(case, 0.7))
    want = check(library, case, way, seed=0)
    for seed, dtype in ((1, torch.int32), (2, torch.int64)):
        spread = spread_out(case, columns, seed)
        ids = spread.ids.to(dtype)
        if dtype == torch.int64:
            ids[ids < 0] = 2**32 + spread.block_table.size(1) - 1  # a block by its low word alone
        got = run(library, spread.with_(ids=ids), way, seed)
        assert all(same_bits(*results) for results in zip(got, want, strict=True))


@pytest.mark.parametrize("pages", [1, 3])
@pytest.mark.parametrize("cache", CACHES, ids=dtype_name)
def test_short_tables(library, cache, pages):
    """Fewer pages than a vector of them, and no requests at all."""
    lengths = [(1, pages * BLOCK), (1, 5), (3, pages * BLOCK - 1)]
    for requests in (lengths, []):
        options = {"dtype": torch.bfloat16, "cache_dtype": cache, "topk": 6, "max_pages": pages}
        case = make_case(requests, hq=16, hkv=2, padding_rows=2, **options)
        out, lse = check(library, case, "clusters", seed=1)
        assert not bool(out[-2:].any()) and bool((lse[-2:] == float("-inf")).all())


def test_walk_alone(library):
    """Where a tensor map has no strides like the query's: as many units as are a stream's."""
    case = make("one_split", FP8)
    case = case.with_(q=case.q[:1].expand_as(case.q))
    emulator = Emulator(library, seed=1)
    out, lse = emulator.sparse_decode(*case.attend_args, **case.scales)
    assert emulator.launched == [(WALK, 128, 0)]
    assert_attention(case, out, lse)
