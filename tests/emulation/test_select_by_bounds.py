"""FP8 selection by bounds on Hopper, all five kernels: factors, bounds, candidates, their scores,
ids (`csrc/step2_select/sm90/bounded_select_inst.cu`).
"""

import pytest
import torch

from msa_kernels import reference
from tests.emulation.emulator import Emulator
from tests.inputs import BLOCK, FP8, make_case
from tests.tolerance import assert_ids, assert_selection

RAGGED = [(33, 30 * BLOCK + 70), (0, 500), (17, 900), (20, 10), (9, 36 * BLOCK)]
"""with tokens that see few blocks, and some that have no position"""


def make(lengths=RAGGED, heads=2, **options):
    return make_case(lengths, hq=heads, hkv=heads, index_dtype=FP8, **options)


@pytest.mark.parametrize("values", ["normal", "integer"])
def test_orders(emulator, values):
    case = make(values=values, heads=3)
    assert_selection(emulator.select_by_bounds(*case.index_args), case)


@pytest.mark.parametrize("heads", [1, 4, 8])
def test_heads(library, heads):
    case = make([(40, 24 * BLOCK + 50), (3, 300)], heads, strided=heads == 4)
    ids = Emulator(library).select_by_bounds(*case.index_args)
    assert_selection(ids, case)


@pytest.mark.parametrize("width", [40, 700, 1100])
def test_widths(library, width):
    """Each its own kernel of candidates."""
    case = make(max_pages=width, values="integer")
    ids = Emulator(library).select_by_bounds(*case.index_args)
    assert_ids(ids, reference.select_blocks(*case.index_args))


@pytest.mark.parametrize(
    "topk,init,local",
    [(1, 0, 1), (2, 0, 1), (8, 1, 2), (16, 1, 1), (20, 0, 3), (32, 0, 1), (32, 1, 1)],
)
@pytest.mark.parametrize("values", ["normal", "integer"])
def test_rules(library, topk, init, local, values):
    case = make([(70, 40 * BLOCK), (5, 300)], values=values, topk=topk)
    rule = dict(init_blocks=init, local_blocks=local)
    ids = Emulator(library, seed=topk).select_by_bounds(*case.index_args, topk=topk, **rule)
    assert_selection(ids, case, **rule)


def test_windows(emulator):
    case = make([(70, 30 * BLOCK + 70), (0, 500), (30, 3900), (20, 10)], values="integer")
    ids = emulator.select_by_bounds(*case.index_args, window_tokens=32)
    assert_ids(ids, reference.select_blocks(*case.index_args))


@pytest.mark.parametrize("scale", [0.0, 2.0**-9, 1.0])
def test_equal_keys(library, scale):
    case = make([(20, 100 * BLOCK)])
    case.index_k_cache.view(torch.uint8)[:] = case.index_k_cache.view(torch.uint8)[1, 0]
    case.index_k_cache[:, :, 40:] = 0
    case.index_q.copy_((case.index_q.float() * scale).to(FP8))
    ids = Emulator(library).select_by_bounds(*case.index_args)
    assert_ids(ids, reference.select_blocks(*case.index_args))


@pytest.mark.parametrize("width", [130, 700, 1100])
def test_scores_that_few_bits_cannot_tell_apart(library, width):
    """Rows with more candidates than their lists hold."""
    case = make([(20, 120 * BLOCK + 70)], max_pages=width, values="integer")
    case.index_q[..., 3] = 256
    case.index_k_cache[..., 3] = 256
    ids = Emulator(library, seed=1).select_by_bounds(*case.index_args)
    assert_ids(ids, reference.select_blocks(*case.index_args))


def test_small_terms_after_large_sums(library):
    """A first step so large that the terms of the others are cut off: of some blocks they make the
    score, and only the factors of the errors know that they may."""
    case = make([(20, 60 * BLOCK + 70)])
    generator = torch.Generator().manual_seed(3)
    case.index_q[..., :32] = case.index_k_cache[..., :32] = 16
    case.index_q[..., 32:] = 1
    pages, slots = case.index_k_cache.shape[:2]
    share = torch.rand(pages, 1, 1, generator=generator)  # each block's own
    ones = torch.rand(pages, slots, 96, generator=generator) < share
    case.index_k_cache[..., 32:] = (ones * 0.9375).to(FP8)
    case.index_k_cache[::2, :, 32:] = 0
    case.index_k_cache[::2, :, 0] = 18
    ids = Emulator(library).select_by_bounds(*case.index_args)
    assert_ids(ids, reference.select_blocks(*case.index_args))


def make_negative(case) -> None:
    """No score is positive but those of every third block of the first request; and they are of
    different sizes, so that bounds tell them apart."""
    case.index_q.view(torch.uint8).bitwise_and_(0x7F)
    pages = torch.arange(len(case.index_k_cache))
    keys = case.index_k_cache.float().abs() * -torch.exp2(-2.0 * (pages % 4)).view(-1, 1, 1)
    blocks = case.block_table[0, ::3]
    keys[blocks[blocks < len(keys)].long()] *= -1
    case.index_k_cache.copy_(keys.to(FP8))


@pytest.mark.parametrize("every", [1, 2, 5])
def test_negative_scores(emulator, every):
    """Maxima of bits are not those of scores; of some rows only, which others stand beside."""
    case = make()
    make_negative(case)
    negative = torch.arange(case.num_tokens) % every == 0
    case.index_q.view(torch.uint8)[~negative] |= 0x80
    ids = emulator.select_by_bounds(*case.index_args)
    assert_selection(ids, case)


@pytest.mark.parametrize("width", [130, 700, 1100])
@pytest.mark.parametrize("negative", [False, True])
def test_rows_of_nothing_but_nan(library, width, negative):
    """The first blocks are selected; their neighbours in a warp have scores."""
    case = make([(33, 100 * BLOCK + 70), (9, 500)], max_pages=width, values="integer")
    if negative:
        make_negative(case)
    case.index_q[::2, 1, 100] = torch.nan
    ids = Emulator(library).select_by_bounds(*case.index_args)
    assert_ids(ids, reference.select_blocks(*case.index_args))


@pytest.mark.parametrize("values", ["normal", "integer"])
def test_more_blocks_than_a_warp_looks_at_together(library, values):
    """Of 1,100, with the best ones among the last, and a row of nothing but NaN."""
    case = make([(6, 1100 * BLOCK + 70)], values=values)
    late = case.block_table[0, 1016:1100:7].long()
    case.index_k_cache[late] = (case.index_k_cache[late].float() * 2).to(FP8)
    case.index_q[3, 1, 100] = torch.nan
    rule = dict(init_blocks=1, local_blocks=1)
    ids = Emulator(library).select_by_bounds(*case.index_args, **rule)
    assert_selection(ids, case, **rule)


@pytest.mark.parametrize("sms", [1, 3])
def test_blocks_that_many_rows_want(library, sms):
    """Lists longer than a work item, of rows of 5 heads and of two windows."""
    case = make([(150, 30 * BLOCK), (9, 500)], heads=5, values="integer")
    case.index_q[..., 3] = case.index_k_cache[..., 3] = 64
    ids = Emulator(library, seed=sms, sms=sms).select_by_bounds(*case.index_args, window_tokens=128)
    assert_ids(ids, reference.select_blocks(*case.index_args))


@pytest.mark.parametrize("share", [0.0005, 0.02])
def test_nan_and_absent_pages(emulator, share):
    case = make(values="integer", poison="nan", table_padding=-1)
    generator = torch.Generator().manual_seed(7)
    for tensor in (case.index_q, case.index_k_cache):
        tensor.view(torch.uint8)[torch.rand(tensor.shape, generator=generator) < share] = 0x7F
    case.block_table[0, 3:30:9] = -1
    case.block_table[4, 2:30:7] = case.index_k_cache.size(0)
    ids = emulator.select_by_bounds(*case.index_args)
    assert_ids(ids, reference.select_blocks(*case.index_args))


@pytest.mark.parametrize("seed", range(6))
def test_outliers(library, seed):
    """The whole range of e4m3, subnormals too."""
    case = make(heads=1 + seed % 3, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for tensor, spread in ((case.index_q, 2.0), (case.index_k_cache, 3.0)):
        size = torch.randn(tensor.shape, generator=generator) * spread
        values = torch.randn(tensor.shape, generator=generator) * torch.exp2(size)
        tensor.copy_(values.clamp(-448, 448).to(FP8))
    ids = Emulator(library, seed).select_by_bounds(*case.index_args)
    assert_selection(ids, case)


@pytest.mark.parametrize("sms", [1, 7, 40])
def test_pieces(library, sms):
    """However the line of work is cut."""
    case = make(values="integer", shared_prefix=20)
    ids = Emulator(library, sms=sms).select_by_bounds(*case.index_args)
    assert_ids(ids, reference.select_blocks(*case.index_args))


@pytest.mark.parametrize("length", [-(2**31), -(2**31) + 10, -1, 2**31 - 1])
def test_lengths_that_cannot_be(library, length):
    """A negative length is one of 0, also where positions counted back from it would wrap."""
    case = make([(33, 30 * BLOCK + 70), (5, 900)], values="integer")
    expected = reference.select_blocks(*case.index_args)
    case.seq_lens[0] = length
    ids = Emulator(library).select_by_bounds(*case.index_args)
    assert bool(((ids >= -1) & (ids < case.block_table.size(1))).all())
    if length < 0:
        assert bool((ids[:, :33] == -1).all())
    assert_ids(ids[:, 33:], expected[:, 33:])
