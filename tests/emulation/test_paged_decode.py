"""paged_decode on Hopper: whole page tables, by clusters, by a CTA each or in parts that a kernel
merges."""

import pytest
import torch

from msa_kernels import reference
from tests.emulation.emulator import Emulator
from tests.inputs import BLOCK, FP8, dtype_name, make_case, same_bits
from tests.tolerance import assert_close, assert_lse_close, attention_floor, attention_in_dtype

CACHES = [torch.bfloat16, FP8]
WALK, MERGE = "msa_decode_sm80_kernel", "msa_decode_merge_sm80_kernel"
CLUSTER, STREAM = "msa_decode_cluster_sm90_kernel", "msa_decode_stream_sm90_kernel"
LENGTHS = [(1, 7 * BLOCK + 70), (3, 300), (0, 500), (1, 7), (2, 1)]
"""with padding 9 tokens"""
WAYS = {  # pages of a row, KV heads, SMs, kernels
    "clusters": (9, 2, 132, [CLUSTER]),
    "one_split": (9, 10, 3, [STREAM]),  # of FP8 caches
    "walk": (9, 2, 3, [WALK, MERGE]),
    "32_parts": (300, 2, 132, [WALK, MERGE]),
}


def make(cache, way, group=4, **options):
    max_pages, hkv = WAYS[way][:2]
    options |= {"dtype": torch.bfloat16, "cache_dtype": cache, "max_pages": max_pages}
    return make_case(LENGTHS, hq=hkv * group, hkv=hkv, **options)


def check(library, case, way, seed, by_request=True):
    """Causal by request, or every row with a table and a length of its own."""
    table, lens, starts = case.block_table, case.seq_lens, case.cu_seqlens_q
    if not by_request:
        where = reference.token_positions(starts, lens, case.num_tokens)
        table, lens, starts = table[where.request], (where.pos + 1).clamp(0).int(), None
    args = (case.q, case.k_cache, case.v_cache, table, lens)
    emulator = Emulator(library, seed, sms=WAYS[way][2])
    out, lse = emulator.paged_decode(*args, cu_seqlens_q=starts, **case.scales)
    kernels = WAYS[way][3]
    if kernels == [STREAM] and case.k_cache.dtype != FP8:
        kernels = [WALK]
    assert [launch.kernel for launch in emulator.launched] == kernels
    exact, exact_lse = reference.paged_decode(
        *args, cu_seqlens_q=starts, **case.scales, compute_dtype=torch.float64
    )
    every = torch.arange(case.block_table.size(1), dtype=torch.int32)
    dense = case.with_(ids=every.expand(case.k_cache.size(1), case.num_tokens, len(every)))
    assert_close(out, exact, attention_in_dtype(dense), floor=attention_floor(exact, exact_lse))
    assert_lse_close(lse, exact_lse)
    return out, lse


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", CACHES, ids=dtype_name)
def test_orders(library, cache, way):
    """The same bits in each."""
    case = make(cache, way)
    first = check(library, case, way, seed=0)
    for seed in (1, 2):
        again = check(library, case, way, seed)
        assert all(same_bits(*results) for results in zip(again, first, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", CACHES, ids=dtype_name)
def test_rows(library, cache, way):
    options = {"layout": "interleaved", "poison": "inf", "strided": True}
    case = make(cache, way, 16, padding_rows=0, **options)
    check(library, case, way, seed=3, by_request=False)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("way", ["clusters", "one_split", "walk"])
@pytest.mark.parametrize("cache", CACHES, ids=dtype_name)
def test_guessed_requests(library, cache, way, strided):
    """As many tokens of one as of another, longer and shorter than the table; none at all."""
    for lengths, padding in (([(3, 7 * BLOCK + 70), (3, 300), (3, 11 * BLOCK)], 0), ([], 9)):
        max_pages, hkv = WAYS[way][:2]
        options = {"dtype": torch.bfloat16, "cache_dtype": cache, "max_pages": max_pages}
        options |= {"padding_rows": padding, "strided": strided}
        case = make_case(lengths, hq=hkv * 4, hkv=hkv, **options)
        out, _ = check(library, case, way, seed=5)
        assert bool(out.any()) == (padding == 0)


@pytest.mark.parametrize(
    "cache,way",
    [(torch.bfloat16, "clusters"), (FP8, "one_split"), (torch.bfloat16, "walk")],
    ids=lambda x: x if isinstance(x, str) else dtype_name(x),
)
def test_tables(library, cache, way):
    """Pages outside the cache, and a row that is longer than its table."""
    case = make(cache, way, layout="nhd")
    case.block_table[0, 2] = -1
    case.block_table[0, 5] = 2**31 - 1
    case.block_table[1, 1] = case.k_cache.size(0)
    check(library, case.with_(block_table=case.block_table[:, :6]), way, seed=4)
