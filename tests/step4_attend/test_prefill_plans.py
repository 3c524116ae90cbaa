"""The ways that sparse_prefill takes on a GPU: by how many tokens, how wide the table, what is
shared. Each must give every token what the reference gives it, whatever stands beside it."""

import math

import pytest
import torch

import msa_kernels
from tests.conftest import no_gpu_reason
from tests.inputs import (
    BLOCK,
    FALSE_STARTS,
    FP8,
    D,
    check_false_starts,
    dtype_name,
    each_alone,
    make_case,
    same_bits,
    shared_selection,
    with_duplicates,
    with_holes,
)
from tests.tolerance import LSE_REL, assert_attention, near

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu():
    if reason := no_gpu_reason():
        pytest.skip(reason)


def plan_case(lengths, **options):
    """A case whose selection is yet to come: drawing one here takes longer than all the rest."""
    options = {"hq": 64, "hkv": 4, "dtype": torch.bfloat16, "device": "cuda"} | options
    return make_case(lengths, selection="none", **options)


def check(case, **options):
    """The policy on 48 tokens and the last 8; zeros behind them; the same bits again."""
    out, lse = msa_kernels.sparse_prefill(
        *case.attend_args, **case.scales, return_lse=True, **options
    )
    assert not bool(out[case.num_real :].any())
    rng = torch.Generator().manual_seed(case.num_real)
    some = torch.randperm(case.num_real, generator=rng)[:48]
    last = torch.arange(max(0, case.num_real - 8), case.num_real)
    tokens = torch.cat([some, last]).unique().to(case.q.device)
    assert_attention(each_alone(case, tokens), out[tokens], lse[tokens])
    again, again_lse = msa_kernels.sparse_prefill(
        *case.attend_args, **case.scales, return_lse=True, **options
    )
    assert same_bits(again, out) and same_bits(again_lse, lse)
    return out


RAGGED = [(1000, 6000), (1, 300), (17, 17), (0, 500), (900, 9000), (1, 1), (130, 2300)]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("hq", "hkv"), [(64, 4), (32, 4), (16, 4), (4, 4), (16, 1), (8, 1)])
@pytest.mark.parametrize("topk", [16, 5, 32])
def test_large_calls(hq, hkv, topk, share):
    lengths = RAGGED if hkv > 1 else [(3700, 9000), *RAGGED]
    case = plan_case(lengths, hq=hq, hkv=hkv, topk=topk)
    check(case.with_(ids=shared_selection(case, share)))


@pytest.mark.parametrize("tokens", [1, 2, 251, 252, 253, 511, 512, 513, 793])
@pytest.mark.parametrize("share", [0.0, 0.9])
def test_around_the_sizes_where_the_plan_changes(tokens, share):
    case = plan_case([(tokens, 5000)])
    check(case.with_(ids=shared_selection(case, share)))


@pytest.mark.parametrize("hkv", [1, 2, 4, 8])
@pytest.mark.parametrize("group", [2, 8, 16])
@pytest.mark.parametrize("share", [0.0, 0.9])
def test_few_tokens_of_several_requests(hkv, group, share):
    """A short plan: a CTA a KV head; work items of all heads by the tiles they have, which are of
    64 / group tokens."""
    lengths = [(90, 4000), (0, 500), (1, 300), (17, 17), (50, 9000), (3, 130)]
    case = plan_case(lengths, hq=group * hkv, hkv=hkv)
    case = case.with_(ids=shared_selection(case, share))
    out = check(case)
    wide = case.with_(ids=case.ids.long())
    assert same_bits(msa_kernels.sparse_prefill(*wide.attend_args), out)


@pytest.mark.parametrize("requests", [1023, 1024, 1025])
def test_many_requests_of_few_tokens(requests):
    """Around the most that a short plan takes; all but the last have no token."""
    lengths = [(0, 3)] * (requests - 1) + [(200, 900)]
    case = plan_case(lengths, hq=8, hkv=1, topk=5)
    check(case.with_(ids=shared_selection(case, 0.5)))


@pytest.mark.parametrize("tokens", [300, 1200])
@pytest.mark.parametrize("columns", [4000, 8192, 12289])
def test_wide_tables(tokens, columns):
    """More rows than a CTA counts in shared memory, of one request and of several."""
    lengths = [(tokens, 6000), (40, 5000), (tokens // 2, 7000)]
    case = plan_case(lengths)
    table = torch.nn.functional.pad(
        case.block_table, (0, columns - case.block_table.size(1)), value=2**31 - 1
    )
    case = case.with_(block_table=table)
    check(case.with_(ids=shared_selection(case, 0.8)))


@pytest.mark.parametrize("share", [0.0, 0.9])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=dtype_name)
def test_more_partial_results_than_the_workspace_holds(cache_dtype, share):
    """Rounds: 8,000 tokens of 4 KV heads and 16 blocks leave up to 2 GiB of partial results."""
    lengths = [(5000, 20000), (3000, 9000)]
    case = plan_case(lengths, cache_dtype=cache_dtype)
    check(case.with_(ids=shared_selection(case, share)))


@pytest.mark.parametrize(("hq", "hkv"), [(64, 4), (32, 4), (4, 1)])
@pytest.mark.parametrize("kind", ["all", "holes", "duplicates", "tables"])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=dtype_name)
def test_narrow_tables(hq, hkv, kind, cache_dtype):
    """No more blocks than a token selects: dense attention, but for what the ids leave out."""
    lengths = [(900, 2048), (13, 13), (0, 100), (1, 1999), (300, 300), (12, 128), (2, 1)]
    case = plan_case(
        lengths,
        hq=hq,
        hkv=hkv,
        max_pages=16,
        cache_dtype=cache_dtype,
        layout="nhd",
    )
    ids = shared_selection(case, 0.0)
    if kind == "holes":
        ids = with_holes(ids)
    elif kind == "duplicates":
        ids = with_duplicates(ids)
    elif kind == "tables":
        table = case.block_table.clone()
        table[0, 3] = -1
        table[4, 1] = 2**31 - 1
        case = case.with_(block_table=table)
    case = case.with_(ids=ids)
    out = check(case)
    # The other way to the same: a table that is wider than it needs to be.
    wide = torch.nn.functional.pad(case.block_table, (0, 30), value=-1)
    wide = case.with_(block_table=wide)
    other = msa_kernels.sparse_prefill(*wide.attend_args, **case.scales)
    torch.testing.assert_close(out, other, **near(out.dtype))
    # Of such a table the hint says what its width does not.
    hinted = msa_kernels.sparse_prefill(*wide.attend_args, **case.scales, max_seqlen_k=2048)
    assert same_bits(hinted, out)


def test_a_hint_that_nothing_is_selected_and_long_requests():
    case = plan_case(RAGGED)
    check(case.with_(ids=shared_selection(case, 0.5)), max_seqlen_k=300)


@pytest.mark.parametrize(("tokens", "columns"), [(900, 16), (150, 60), (1500, 60)])
@pytest.mark.parametrize("kind", FALSE_STARTS)
def test_starts_of_more_tokens_than_there_are(tokens, columns, kind):
    """Whatever cu_seqlens_q says: rows past the batch stay as they are, and requests that end
    behind it keep the tokens they have. Narrow tables, few tokens, and many."""
    case = make_case(
        [(tokens, 1900), (130, 2000)],
        hq=64,
        hkv=4,
        max_pages=columns,
        padding_rows=0,
        dtype=torch.bfloat16,
        device="cuda",
    )
    full = msa_kernels.sparse_prefill(*case.attend_args)
    kept = case.num_tokens - 40
    out = check_false_starts(msa_kernels.sparse_prefill, case, kept, kind)
    if kind == "more":
        torch.testing.assert_close(out, full[:kept], **near(out.dtype))


@pytest.mark.parametrize("tokens", [60, 1500])
def test_blocks_without_a_logit_before_blocks_of_very_low_ones(tokens):
    """Partial results are summed some at a time: the first may have no logit above -inf, and the
    next ones that 2 to the power of is 0."""
    case = make_case([(tokens, 9000)], hq=64, hkv=4, topk=32, dtype=torch.bfloat16, device="cuda")
    case.q[..., 0] = 1.0
    where = torch.arange(case.seq_lens.max().item(), device="cuda")
    page = case.block_table[0, where // 128].long()
    low = torch.where(where < 40 * 128, -math.inf, -6000.0).bfloat16()
    case.k_cache[page, :, where % 128, 0] = low[:, None]
    ids = torch.arange(0, 64, 2, device="cuda").expand_as(case.ids).contiguous()
    case = case.with_(ids=ids.int())
    some = torch.arange(0, tokens, tokens // 20, device="cuda")
    want, want_lse = msa_kernels.reference.sparse_prefill(*each_alone(case, some).attend_args)
    assert bool(want_lse.isfinite().all())
    for invariant in (False, True):
        out, lse = msa_kernels.sparse_prefill(
            *case.attend_args, return_lse=True, batch_invariant=invariant
        )
        torch.testing.assert_close(out[some].float(), want, **near(out.dtype))
        torch.testing.assert_close(lse[some], want_lse, rtol=LSE_REL, atol=1e-4)


def test_duplicates_among_shared_blocks_count_twice():
    case = plan_case([(1000, 6000)])
    ids = shared_selection(case, 1.0)
    ids[..., 1] = ids[..., 0]
    ids[:, ::3, 2] = ids[:, ::3, 0]
    check(case.with_(ids=ids))


@pytest.mark.parametrize("share", [0.0, 0.9])
@pytest.mark.parametrize(("hq", "topk"), [(64, 16), (32, 32), (8, 9)])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=dtype_name)
def test_batch_invariant_calls_give_a_request_its_own_bits(cache_dtype, hq, topk, share):
    """The whole batch is a long call, some requests alone are short ones; K is not always a
    multiple of the slots that are merged at a time."""
    lengths = [(901, 6000), (1500, 9000), (1, 777), (300, 300), (100, 6000)]
    case = plan_case(lengths, padding_rows=0, hq=hq, topk=topk, cache_dtype=cache_dtype)
    case = case.with_(ids=shared_selection(case, share))
    check(case, batch_invariant=True)
    option = {"return_lse": True, "batch_invariant": True, **case.scales}
    out, lse = msa_kernels.sparse_prefill(*case.attend_args, **option)
    begin = 0
    for request, (q_len, _) in enumerate(lengths):
        rows = slice(begin, begin + q_len)
        begin += q_len
        single, single_lse = msa_kernels.sparse_prefill(
            case.q[rows],
            case.k_cache,
            case.v_cache,
            case.ids[:, rows],
            case.block_table[request : request + 1],
            torch.tensor([0, q_len], dtype=torch.int32, device="cuda"),
            case.seq_lens[request : request + 1],
            **option,
        )
        assert same_bits(single, out[rows]) and same_bits(single_lse, lse[rows])


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8], ids=dtype_name)
@pytest.mark.parametrize("kind", ["few", "many", "rounds", "narrow", "batch_invariant"])
def test_twenty_runs_give_the_same_bits(kind, cache_dtype):
    lengths = {"few": [(90, 4000), (30, 900)], "rounds": [(3000, 9000), (1200, 1200)]}
    options = {"narrow": {"max_pages": 16}, "rounds": {"topk": 32}}
    case = plan_case(
        lengths.get(kind, [(700, 6000), (300, 300)]),
        cache_dtype=cache_dtype,
        **options.get(kind, {}),
    )
    case = case.with_(ids=shared_selection(case, 0.7))
    option = {"return_lse": True, "batch_invariant": kind == "batch_invariant"}
    first, first_lse = msa_kernels.sparse_prefill(*case.attend_args, **case.scales, **option)
    for _ in range(19):
        out, lse = msa_kernels.sparse_prefill(*case.attend_args, **case.scales, **option)
        assert same_bits(out, first) and same_bits(lse, first_lse)


def test_many_tokens():
    """More query tokens than 65,536, over a table that walks few pages again and again."""
    tokens = 70_000
    case = plan_case([(256, 1280)], hq=8, hkv=1, padding_rows=0)
    pages = case.block_table[0, :10]
    blocks = -(-tokens // BLOCK)
    rng = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(tokens, 8, D, generator=rng, device="cuda", dtype=torch.bfloat16)
    case = case.with_(
        lengths=[(tokens, tokens)],
        q=q,
        block_table=pages[torch.arange(blocks, device="cuda") % 10][None],
        seq_lens=torch.tensor([tokens], dtype=torch.int32, device="cuda"),
        cu_seqlens_q=torch.tensor([0, tokens], dtype=torch.int32, device="cuda"),
        ids=case.ids.new_zeros(1, tokens, 16),
    )
    check(case.with_(ids=shared_selection(case, 0.9)))


def test_graph_replays_follow_their_inputs():
    """A captured call reads lengths, tables and ids when it is replayed."""
    case = plan_case([(1000, 6000), (50, 300)])
    ids, lens = case.ids.clone(), case.seq_lens.clone()
    held = case.with_(ids=ids, seq_lens=lens)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        msa_kernels.sparse_prefill(*held.attend_args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = msa_kernels.sparse_prefill(*held.attend_args)
    for step, share in enumerate((0.0, 1.0, 0.5)):
        ids.copy_(shared_selection(case, share, seed=step))
        lens.copy_(case.seq_lens - 64 * step)
        graph.replay()
        want = msa_kernels.sparse_prefill(*held.attend_args)
        torch.cuda.synchronize()
        assert same_bits(out, want)
