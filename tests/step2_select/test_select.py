"""select_blocks against the reference, and against its two steps one after the other."""

import pytest
import torch

import msa_kernels
from msa_kernels import reference
from tests.inputs import (
    BATCHES,
    BLOCK,
    FP8,
    dtype_name,
    guarded,
    make_case,
    same_bits,
    while_growing,
)
from tests.tolerance import assert_ids, assert_scores, assert_selection

INF, NAN = float("inf"), float("nan")
INDEX_DTYPES = [torch.float32, torch.bfloat16, FP8]


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=dtype_name)
def test_matches_reference(device, require, dtype, batch, strided):
    require("select_blocks", dtype, dtype)
    case = make_case(batch, index_dtype=dtype, strided=strided, device=device)
    assert_selection(msa_kernels.select_blocks(*case.index_args), case)


@pytest.mark.parametrize("heads", [1, 3, 4, 8])
@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=dtype_name)
def test_whole_numbers_are_exact(device, require, dtype, heads):
    """Exact scores with many ties: not one id may differ."""
    require("select_blocks", dtype, dtype)
    for batch, poison in (("long", "nan"), ("decode_edges", "inf")):
        case = make_case(
            batch,
            hq=heads,
            hkv=heads,
            index_dtype=dtype,
            values="integer",
            poison=poison,
            device=device,
        )
        expected = reference.select_blocks(*case.index_args)
        assert_ids(msa_kernels.select_blocks(*case.index_args), expected)


@pytest.mark.parametrize("topk", [1, 8, 16, 17, 32])
@pytest.mark.parametrize("init,local", [(0, 1), (0, 0), (1, 0)])
def test_rules(device, require, topk, init, local):
    require("select_blocks", torch.bfloat16, torch.bfloat16)
    rule = dict(init_blocks=init, local_blocks=local)
    for batch in ("long", "verify"):
        case = make_case(batch, topk=topk, dtype=torch.bfloat16, values="integer", device=device)
        expected = reference.select_blocks(*case.index_args, topk, **rule)
        assert_ids(msa_kernels.select_blocks(*case.index_args, topk, **rule), expected)


def test_more_forced_blocks_than_visible(device, require):
    require("select_blocks")
    case = make_case("verify", values="integer", device=device)
    for init, local in ((4, 12), (16, 0), (0, 16), (2, 2)):
        rule = dict(init_blocks=init, local_blocks=local)
        expected = reference.select_blocks(*case.index_args, **rule)
        assert_ids(msa_kernels.select_blocks(*case.index_args, **rule), expected)


@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=dtype_name)
def test_is_score_then_topk(device, require, dtype):
    """The ids of the two steps; on a CPU whatever the numbers, on a GPU where sums are exact."""
    for op in ("select_blocks", "index_score"):
        require(op, dtype, dtype)
    require("topk_blocks", torch.float32)
    for batch in ("long", "mixed", "chunks"):
        values = "normal" if device == "cpu" else "integer"
        case = make_case(batch, index_dtype=dtype, seed=7, values=values, device=device)
        visible = msa_kernels.visible_blocks(
            case.cu_seqlens_q, case.seq_lens, case.num_tokens, case.block_table.size(1)
        )
        assert torch.equal(visible, case.visible)
        two_steps = msa_kernels.topk_blocks(msa_kernels.index_score(*case.index_args), visible)
        assert same_bits(msa_kernels.select_blocks(*case.index_args), two_steps)


def test_own_block_is_last_and_count_is_right(device, require):
    require("select_blocks")
    lengths = [(1, blocks * BLOCK - 3) for blocks in range(1, 18)]
    case = make_case(lengths, device=device)
    ids = msa_kernels.select_blocks(*case.index_args).cpu()
    for token in range(len(lengths)):
        seen = token + 1
        row = ids[0, token].tolist()
        assert row.count(-1) == 16 - min(16, seen)
        assert row[min(16, seen) - 1] == seen - 1
    assert bool((ids[:, len(lengths) :] == -1).all())


def test_selection_depends_on_the_index_keys(device, require):
    """Past 16 blocks, other index keys select other blocks: a wrong index cache cannot hide."""
    require("select_blocks")
    case = make_case("long", device=device)
    other = make_case("long", device=device, seed=1)
    ids = msa_kernels.select_blocks(*case.index_args)
    swapped = msa_kernels.select_blocks(case.index_q, other.index_k_cache, *other.batch)
    assert bool((ids[:, : case.num_real] != swapped[:, : case.num_real]).any(dim=-1).all())
    assert bool((ids[0, : case.num_real] != ids[1, : case.num_real]).any(dim=-1).all())


def test_narrow_table_bad_pages_and_wrong_hints(device, require):
    require("select_blocks")
    for width in (0, 1, 20):
        case = make_case("long", values="integer", max_pages=width, device=device)
        if width == 20:
            case.block_table[0, 3] = -1
            case.block_table[1, 19] = case.index_k_cache.size(0)  # its last visible block
        expected = reference.select_blocks(*case.index_args)
        assert_ids(msa_kernels.select_blocks(*case.index_args), expected)
        for hints in ((1, 1), (10**6, 10**9)):
            ids = msa_kernels.select_blocks(
                *case.index_args, max_seqlen_q=hints[0], max_seqlen_k=hints[1]
            )
            assert_ids(ids, expected)


def test_hints_in_a_wide_table(device, require):
    """As wide as an engine's: the hint says how much of the workspace's rows is used."""
    require("select_blocks")
    case = make_case([(700, 9000), (3, 40_000), (2, 140_000)], device=device)
    expected = msa_kernels.select_blocks(*case.index_args)
    table = torch.nn.functional.pad(
        case.block_table, (0, 16_000 - case.block_table.size(1)), value=-1
    )
    wide = case.with_(block_table=table)
    for hint in (None, 140_000, 40_000, 9000, 1, 10**9):
        ids = msa_kernels.select_blocks(*wide.index_args, max_seqlen_k=hint)
        assert torch.equal(ids, expected), hint


def test_out_is_written_inside_its_view_only(device, require):
    require("select_blocks")
    case = make_case("mixed", strided=True, device=device)
    plain = msa_kernels.select_blocks(*case.index_args)
    out, untouched = guarded(plain.shape, torch.int32, device)
    assert msa_kernels.select_blocks(*case.index_args, out=out) is out
    untouched()
    assert same_bits(out, plain)


@pytest.mark.parametrize(
    "lengths,heads",
    [("long", 2), ([(300, 5000), (1, 6144)], 4), ([(20, 5000)] * 3, 3)],
    ids=["few", "many", "some"],
)
@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=dtype_name)
def test_nan_queries_and_keys(device, require, dtype, lengths, heads):
    """Rows whose scores are all NaN, or partly, still give distinct ids in order.

    With few query rows a request, and with as many as other kernels are for; NaN and Inf stand in
    whole keys, in one number of a key, and past what a tile's first rows see.
    """
    require("select_blocks", dtype, dtype)
    case = make_case(
        lengths, hq=heads, hkv=heads, index_dtype=dtype, values="integer", device=device
    )
    nan, inf = (torch.tensor([x], device=device).to(dtype) for x in (NAN, INF))
    tokens, last = case.num_real, len(case.lengths) - 1
    request = max(range(last + 1), key=lambda r: case.lengths[r][0])  # of the most tokens
    length = case.lengths[request][1]
    query, index = (
        x.view(torch.uint8) if dtype == FP8 else x for x in (case.index_q, case.index_k_cache)
    )
    nan, inf = (x.view(torch.uint8) if dtype == FP8 else x for x in (nan, inf))
    query[0] = nan
    query[5, 1] = nan
    query[tokens // 2, 0, 77] = nan
    query[tokens - 1, heads - 1, 127] = nan
    page = case.block_table[request].long()
    index[page[:20], 5] = nan
    index[page[22], 127, 64] = nan
    index[page[(length - 1) // BLOCK], (length - 1) % BLOCK] = nan  # seen by the last token alone
    index[case.block_table[last, 0].long(), 5] = inf
    expected = reference.select_blocks(*case.index_args)
    assert_ids(msa_kernels.select_blocks(*case.index_args), expected)
    own = int(case.visible[0]) - 1
    assert expected[0, 0].tolist() == [*range(15), own]
    scores = reference.index_score(*case.index_args)
    assert bool(scores.isnan().any(dim=-1).all(dim=0)[: case.num_real].any())
    # Where own blocks are not forced, they are scored like the others.
    rule = {"local_blocks": 0}
    expected = reference.select_blocks(*case.index_args, **rule)
    assert_ids(msa_kernels.select_blocks(*case.index_args, **rule), expected)


def test_bits_do_not_depend_on_the_batch(device, require):
    require("select_blocks", torch.bfloat16, torch.bfloat16)
    case = make_case("long", dtype=torch.bfloat16, device=device)
    ids = msa_kernels.select_blocks(*case.index_args)
    starts = case.cu_seqlens_q.tolist()
    for request, (q_len, _) in enumerate(case.lengths):
        rows = slice(starts[request], starts[request] + q_len)
        alone = msa_kernels.select_blocks(
            case.index_q[rows],
            case.index_k_cache,
            case.block_table[request : request + 1],
            torch.tensor([0, q_len], dtype=torch.int32, device=device),
            case.seq_lens[request : request + 1],
        )
        assert same_bits(alone, ids[:, rows])
    for head in range(2):  # a tensor-parallel rank has one of the heads
        one = msa_kernels.select_blocks(case.index_q[:, head : head + 1], *case.index_args[1:])
        assert same_bits(one[0], ids[head])
    for _ in range(19):
        assert same_bits(msa_kernels.select_blocks(*case.index_args), ids)


@pytest.mark.parametrize("lengths", ["long", [(300, 5000), (1, 2700)]], ids=["few", "many"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=dtype_name)
def test_hundred_runs_give_the_same_bits(device, require, dtype, lengths):
    require("select_blocks", dtype, dtype)
    case = make_case(lengths, hq=4, hkv=4, index_dtype=dtype, device=device)
    first = msa_kernels.select_blocks(*case.index_args)
    runs = 100 if device == "cuda" else 5
    assert all(same_bits(msa_kernels.select_blocks(*case.index_args), first) for _ in range(runs))


@pytest.mark.parametrize("heads", [1, 3, 4, 16])
@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=dtype_name)
def test_chunks_on_long_prefixes(device, require, dtype, heads):
    """Tiles of many tokens, ragged, across several blocks of their own; exact, with ties."""
    require("select_blocks", dtype, dtype)
    for lengths in ([(300, 5000), (1, 2700), (0, 400), (131, 3000 + 131)], [(257, 2500)]):
        case = make_case(
            lengths, hq=heads, hkv=heads, index_dtype=dtype, values="integer", device=device
        )
        case.block_table[0, 7] = -1
        expected = reference.select_blocks(*case.index_args)
        assert_ids(msa_kernels.select_blocks(*case.index_args), expected)


@pytest.mark.parametrize("lengths", [[(290, 6000), (20, 3000)], [(8, 5000)] * 40])
def test_wide_table_changes_nothing(device, require, lengths):
    """Columns that no request reaches: however a call is cut for them, the ids are the same."""
    require("select_blocks", torch.bfloat16, torch.bfloat16)
    case = make_case(lengths, hq=8, hkv=8, dtype=torch.bfloat16, device=device)
    ids = msa_kernels.select_blocks(*case.index_args)
    wide = torch.full((len(lengths), 8193), 2**31 - 1, dtype=torch.int32, device=device)
    wide[:, : case.block_table.size(1)] = case.block_table
    again = msa_kernels.select_blocks(case.index_q, case.index_k_cache, wide, *case.batch[1:])
    assert same_bits(again, ids)


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("q_len", [1, 3, 8, 16])
@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=dtype_name)
def test_few_pages_and_many(device, require, dtype, q_len, strided):
    """A page a CTA where a table has few columns, long pieces where it has many: the same bits."""
    for op in ("select_blocks", "index_score"):
        require(op, dtype, dtype)
    for lengths in ([(q_len, 4000)], [(q_len, 2500), (q_len, 700), (1, 130)]):
        case = make_case(
            lengths, hq=4, hkv=4, index_dtype=dtype, strided=strided, poison="nan", device=device
        )
        case.block_table[0, 2] = -1
        scores = msa_kernels.index_score(*case.index_args)
        assert_scores(scores, case)
        ids = msa_kernels.select_blocks(*case.index_args)
        assert_selection(ids, case)
        width = case.block_table.size(1)
        table = torch.nn.functional.pad(case.block_table, (0, 1100 - width), value=2**31 - 1)
        wide = case.with_(block_table=table)
        assert same_bits(msa_kernels.index_score(*wide.index_args)[..., :width], scores)
        assert same_bits(msa_kernels.select_blocks(*wide.index_args), ids)


@pytest.mark.parametrize("q_len", [1, 4, 100])
def test_graph_replays_follow_the_lengths(device, require, q_len):
    """Captured at the shortest lengths, replayed while they grow in place, across blocks."""
    require("select_blocks", torch.bfloat16, torch.bfloat16)
    longest = (5400, 700, 2304)
    case = make_case(
        [(q_len, seq_len) for seq_len in longest],
        dtype=torch.bfloat16,
        values="integer",
        device=device,
    )

    def call():
        return msa_kernels.select_blocks(*case.index_args)

    shares = (0, 127, 128, 129, 2047, 2048, 2049, 4000, 10**6, 130, 0)
    for ids in while_growing(case, call, shares):
        assert_ids(ids, reference.select_blocks(*case.index_args))


@pytest.mark.slow
def test_a_very_long_context(device, require):
    require("select_blocks", torch.bfloat16, torch.bfloat16)
    case = make_case(
        [(2, 131073), (1, 300), (3, 8192)],
        hq=1,
        hkv=1,
        dtype=torch.bfloat16,
        values="integer",
        max_pages=8193,
        device=device,
    )
    expected = reference.select_blocks(*case.index_args)
    assert_ids(msa_kernels.select_blocks(*case.index_args), expected)


@pytest.mark.parametrize(
    "blocks", [1024, 1025, 4095, 4096, 4097, 8191, 8192, 8193, 16384, 16385, 20000]
)
@pytest.mark.parametrize("dtype", INDEX_DTYPES, ids=dtype_name)
def test_contexts_up_to_a_million_tokens(device, require, dtype, blocks):
    """And past them; a table that walks 50 pages again and again: ties without end."""
    require("select_blocks", dtype, dtype)
    require("index_score", dtype, dtype)
    generator = torch.Generator().manual_seed(blocks)
    index_q = torch.randint(-2, 3, (2, 2, 128), generator=generator).to(dtype).to(device)
    cache = torch.randint(-2, 3, (50, BLOCK, 128), generator=generator).to(dtype).to(device)
    table = torch.randint(50, (1, max(8193, blocks)), generator=generator).int().to(device)
    cu_seqlens_q = torch.tensor([0, 2], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([blocks * BLOCK], dtype=torch.int32, device=device)
    args = (index_q, cache, table, cu_seqlens_q, seq_lens)

    by_page = torch.einsum("thd,psd->htps", index_q.float(), cache.float())
    scores = by_page.amax(-1)[..., table[0].long()]
    # The first of the two tokens does not see the last key of the context.
    scores[:, 0, blocks - 1] = by_page[:, 0, table[0, blocks - 1].long(), :-1].amax(-1)
    scores[..., blocks:] = float("-inf")
    assert torch.equal(msa_kernels.index_score(*args), scores)
    visible = torch.full((2,), blocks, dtype=torch.int32, device=device)
    for topk in (16, 32):
        expected = reference.topk_blocks(scores, visible, topk)
        assert_ids(msa_kernels.select_blocks(*args, topk), expected)
