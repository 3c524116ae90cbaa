"""sparse_prefill on Hopper, plan and kernels of each way that a call goes
(`csrc/step4_attend/sm90/prefill_inst.cu`)."""

import pytest
import torch

from tests.emulation.emulator import Emulator
from tests.inputs import (
    BLOCK,
    FP8,
    dtype_name,
    make_case,
    same_bits,
    shared_selection,
    with_duplicates,
    with_holes,
)
from tests.tolerance import assert_attention

CACHES = [torch.bfloat16, FP8]
RAGGED = [(30, 11 * BLOCK + 70), (1, 300), (0, 500), (7, 7), (2, 1)]


def make(lengths=RAGGED, group=8, hkv=2, **options):
    options.setdefault("topk", 6)
    return make_case(lengths, hq=group * hkv, hkv=hkv, dtype=torch.bfloat16, **options)


def check(emulator, case, **options):
    out, lse = emulator.sparse_prefill(*case.attend_args, **case.scales, **options)
    assert_attention(case, out, lse)
    return out, lse


@pytest.mark.parametrize("group", [8, 16])
@pytest.mark.parametrize("cache", CACHES, ids=dtype_name)
def test_short_calls(emulator, cache, group):
    """A plan of one cluster, partial results by KV block, their merge."""
    check(emulator, make(group=group, cache_dtype=cache))


@pytest.mark.parametrize("group", [1, 2, 4])
def test_small_groups(library, group):
    """Boxes of q that are half of eight rows."""
    check(Emulator(library, seed=group), make(group=group, hkv=3))


@pytest.mark.parametrize("kind", ["holes", "duplicates", "same", "int64", "garbage_tail"])
def test_selections(library, kind):
    case = make(selection=kind if kind in ("same", "int64", "garbage_tail") else "random")
    if kind == "holes":
        case = case.with_(ids=with_holes(case.ids))
    elif kind == "duplicates":
        case = case.with_(ids=with_duplicates(case.ids))
    check(Emulator(library, seed=3), case)


@pytest.mark.parametrize("cache", CACHES, ids=dtype_name)
def test_wild_values(emulator, cache):
    """NaN in V of blocks that some tokens see in part: of those that see it, and of no others."""
    case = make([(40, 5 * BLOCK - 3)], cache_dtype=cache)
    last, before = case.block_table[0, 4].item(), case.block_table[0, 1].item()
    for column, (page, row) in enumerate([(last, 90), (last, 120), (before, 5)]):
        values = case.v_cache[page, 1].float()
        values[row, column::40] = torch.nan
        case.v_cache[page, 1] = values.to(cache)
    check(emulator, case)


@pytest.mark.parametrize("poison", ["inf", "nan"])
@pytest.mark.parametrize("cache", CACHES, ids=dtype_name)
def test_layouts(library, cache, poison):
    """Strides that are not a cache's own, and what lies where no token was written."""
    case = make(cache_dtype=cache, layout="interleaved", poison=poison, strided=True)
    check(Emulator(library, seed=1, sms=2), case)


@pytest.mark.parametrize("cache", CACHES, ids=dtype_name)
def test_tables_no_wider_than_a_selection(emulator, cache):
    """Tiles of requests, query-major."""
    lengths = [(25, 4 * BLOCK + 70), (13, 13), (0, 100), (1, 600), (30, 200)]
    case = make(lengths, max_pages=6, cache_dtype=cache)
    check(emulator, case.with_(ids=shared_selection(case, 0.3)))


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("cache", CACHES, ids=dtype_name)
def test_large_calls(library, cache, share):
    """Query-major tiles, and leftovers by KV block."""
    case = make([(70, 9 * BLOCK), (30, 1000)], group=16, hkv=11, topk=3, cache_dtype=cache)
    emulator = Emulator(library, seed=int(share * 10), sms=8)
    check(emulator, case.with_(ids=shared_selection(case, share)))


@pytest.mark.parametrize("cache", CACHES, ids=dtype_name)
@pytest.mark.parametrize("sms,at_once", [(1, 1), (2, 2), (5, 5), (200, 3)])
def test_items_are_drawn(library, cache, sms, at_once):
    """By few CTAs, each of which walks many; and by more than there are items. Of every size."""
    lengths = [(100, 3 * BLOCK), (2, 6 * BLOCK), *RAGGED]
    case = make(lengths, group=16, hkv=3, cache_dtype=cache)
    check(Emulator(library, seed=sms, sms=sms, ctas_at_once=at_once), case)


@pytest.mark.parametrize("cache", CACHES, ids=dtype_name)
@pytest.mark.parametrize("seed", range(12))
def test_items_of_a_tile(library, cache, seed):
    """Two consumers in three have none of it, and their q producers may fall behind."""
    case = make([(3, 40 * BLOCK)], group=16, topk=16, cache_dtype=cache)
    check(Emulator(library, seed, sms=1), case)


@pytest.mark.parametrize("cache", CACHES, ids=dtype_name)
@pytest.mark.parametrize("sms", [1, 4, 40])
def test_rounds(library_of_small_rounds, cache, sms):
    """Items of every round are drawn anew; the slots of one are the next one's."""
    case = make([(70, 9 * BLOCK), (30, 1000)], cache_dtype=cache)
    check(Emulator(library_of_small_rounds, seed=sms, sms=sms, ctas_at_once=min(sms, 4)), case)


def test_rounds_of_large_calls(library_of_small_rounds):
    """Leftovers of query-major tiles in many rounds."""
    case = make([(70, 9 * BLOCK), (30, 1000)], group=16, hkv=11, topk=3)
    case = case.with_(ids=shared_selection(case, 0.6))
    check(Emulator(library_of_small_rounds, seed=1, sms=8), case)


def test_bits_do_not_depend_on_the_order(library):
    case = make(RAGGED * 2)
    first = Emulator(library).sparse_prefill(*case.attend_args)
    for seed in range(1, 5):
        emulator = Emulator(library, seed, sms=1 + 3 * seed, ctas_at_once=seed)
        for result, expected in zip(emulator.sparse_prefill(*case.attend_args), first, strict=True):
            assert same_bits(result, expected)
