"""select_blocks of FP8 index keys in calls large enough that Hopper bounds scores first.

By the shapes alone, so a wide table makes a small call large: 2^21 (row, column) pairs, 256 columns
and 128 rows a request at least (`csrc/step2_select/sm90/bounded_select_inst.cu`). Elsewhere these
are tests like any other.
"""

import pytest
import torch

import msa_kernels
from msa_kernels import reference
from tests.inputs import (
    BLOCK,
    FALSE_STARTS,
    FP8,
    false_starts,
    guarded,
    make_case,
    same_bits,
    while_growing,
)
from tests.tolerance import assert_ids, assert_selection

WIDTHS = {16384: 150, 8192: 300, 1024: 2200, 512: 4300, 300: 7100}
"""columns of a table and how many rows make a call of it large; each width its own kernel"""


def large(width: int, heads: int, prefix: int = 45 * BLOCK + 70, index_dtype=FP8, **options):
    """One request, and a short one behind it."""
    tokens = -(-WIDTHS[width] // heads)
    lengths = [(tokens, prefix + tokens), (5, 21 * BLOCK)]
    options |= dict(hq=heads, hkv=heads, index_dtype=index_dtype, max_pages=width)
    return make_case(lengths, **options)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("width", WIDTHS)
def test_matches_reference(device, require, width, heads):
    require("select_blocks", FP8, FP8)
    case = large(width, heads, strided=heads % 4 == 0, device=device)
    assert_selection(msa_kernels.select_blocks(*case.index_args), case)


@pytest.mark.parametrize(
    "topk,init,local",
    [
        (topk, init, local)
        for topk in (1, 2, 8, 16, 20, 21, 32)
        for init, local in ((0, 1), (1, 0), (1, 2))
        if init + local <= topk
    ],
)
def test_rules(device, require, topk, init, local):
    require("select_blocks", FP8, FP8)
    case = large(8192, 3, topk=topk, values="integer", device=device)
    rule = dict(init_blocks=init, local_blocks=local)
    expected = reference.select_blocks(*case.index_args, topk, **rule)
    assert_ids(msa_kernels.select_blocks(*case.index_args, topk, **rule), expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_ties_and_ragged_batches(device, require, width):
    require("select_blocks", FP8, FP8)
    tokens = WIDTHS[width] // 3
    lengths = [(tokens, 4200 + tokens), (0, 300), (tokens, tokens), (tokens + 9, 6000 + tokens)]
    case = make_case(
        lengths,
        hq=2,
        hkv=2,
        index_dtype=FP8,
        max_pages=width,
        values="integer",
        poison="inf" if width < 1000 else "nan",
        shared_prefix=20,
        device=device,
    )
    case.block_table[0, 7] = -1
    case.block_table[3, 9] = case.index_k_cache.size(0)
    expected = reference.select_blocks(*case.index_args)
    assert_ids(msa_kernels.select_blocks(*case.index_args), expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_scores_that_few_bits_cannot_tell_apart(device, require, width):
    """All blocks are candidates: more than a row's list holds."""
    require("select_blocks", FP8, FP8)
    prefix = (45 if width < 8192 else 120) * BLOCK
    case = large(width, 2, prefix, values="integer", device=device)
    case.index_q[..., 3] = 256
    case.index_k_cache[..., 3] = 256
    expected = reference.select_blocks(*case.index_args)
    assert_ids(msa_kernels.select_blocks(*case.index_args), expected)


@pytest.mark.parametrize("scale", [0.0, 2.0**-9, 1.0])
def test_equal_keys(device, require, scale):
    """Every block ties with every other, with scores of 0 and others."""
    require("select_blocks", FP8, FP8)
    case = large(8192, 1, 100 * BLOCK, device=device)
    case.index_k_cache.view(torch.uint8)[:] = case.index_k_cache.view(torch.uint8)[1, 0]
    case.index_k_cache[:, :, 40:] = 0
    case.index_q.copy_((case.index_q.float() * scale).to(FP8))
    expected = reference.select_blocks(*case.index_args)
    assert_ids(msa_kernels.select_blocks(*case.index_args), expected)


def test_outliers(device, require):
    """Keys and queries over the whole range of e4m3, subnormals too; few large blocks."""
    require("select_blocks", FP8, FP8)
    case = large(8192, 2, 100 * BLOCK, device=device)
    generator = torch.Generator().manual_seed(5)
    for tensor, spread in ((case.index_q, 2.0), (case.index_k_cache, 3.0)):
        size = torch.randn(tensor.shape, generator=generator) * spread
        values = torch.randn(tensor.shape, generator=generator) * torch.exp2(size)
        tensor.copy_(values.clamp(-448, 448).to(tensor.device).to(FP8))
    case.index_k_cache[:40].copy_((case.index_k_cache[:40].float() * 2.0**-6).to(FP8))
    assert_selection(msa_kernels.select_blocks(*case.index_args), case)


def test_nan_queries_and_keys(device, require):
    require("select_blocks", FP8, FP8)
    case = large(8192, 2, values="integer", device=device)
    nan = float("nan")
    case.index_q[0] = nan
    case.index_q[5, 1, 7] = nan
    case.index_k_cache[case.block_table[0, 3:40].long(), 5, 77] = nan
    expected = reference.select_blocks(*case.index_args)
    assert_ids(msa_kernels.select_blocks(*case.index_args), expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_nothing_but_nan(device, require, width):
    """Every second row: its score is NaN in every block, and the first ones are selected."""
    require("select_blocks", FP8, FP8)
    case = large(width, 2, 100 * BLOCK, values="integer", device=device)
    case.index_q[:, 1, 100] = float("nan")
    expected = reference.select_blocks(*case.index_args)
    assert_ids(msa_kernels.select_blocks(*case.index_args), expected)


@pytest.mark.parametrize("index_dtype", [FP8, torch.bfloat16])
@pytest.mark.parametrize("width", [300, 8192])
def test_negative_scores(device, require, width, index_dtype):
    """Most blocks have no key with a positive score; some rows have a NaN among such scores."""
    require("select_blocks", index_dtype, index_dtype)
    case = large(width, 4, index_dtype=index_dtype, values="integer", device=device)
    case.index_q.copy_(case.index_q.float().abs().to(index_dtype))
    keys = -case.index_k_cache.float().abs()
    keys[case.block_table[0, 3:40:9].long(), 0, 5] *= -1
    case.index_k_cache.copy_(keys.to(index_dtype))
    case.index_q[7, 2, 0] = float("nan")
    expected = reference.select_blocks(*case.index_args)
    assert_ids(msa_kernels.select_blocks(*case.index_args), expected)


def test_several_windows_and_out(device, require):
    """More rows than one window of scores holds; ids are written inside their view only."""
    require("select_blocks", FP8, FP8)
    lengths = [(700, 3000), (900, 5000)]
    case = make_case(
        lengths, hq=2, hkv=2, index_dtype=FP8, max_pages=8192, values="integer", device=device
    )
    expected = reference.select_blocks(*case.index_args)
    out, untouched = guarded(expected.shape, torch.int32, device)
    assert msa_kernels.select_blocks(*case.index_args, out=out) is out
    untouched()
    assert_ids(out, expected)


@pytest.mark.parametrize("kind", FALSE_STARTS)
@pytest.mark.parametrize("width", [8192, 300])
def test_starts_that_cannot_be(device, require, width, kind):
    """Whatever cu_seqlens_q says, ids are written inside their view only, and a token that it still
    places right has its ids."""
    require("select_blocks", FP8, FP8)
    case = large(width, 2, values="integer", device=device)
    expected = reference.select_blocks(*case.index_args)
    msa_kernels.select_blocks(*case.index_args)  # leaves bounds in the workspace
    starts = false_starts(case, kind)
    kept = int(case.cu_seqlens_q[-1]) - 8  # the second request has none of its tokens
    out, untouched = guarded((2, kept, 16), torch.int32, device)
    short = case.with_(index_q=case.index_q[:kept], cu_seqlens_q=starts)
    msa_kernels.select_blocks(*short.index_args, out=out)
    untouched()
    if kind in ("more", "late"):
        assert_ids(out[:, starts[0] :], expected[:, starts[0] : kept])
    elif kind == "negative":
        assert bool((out == -1).all())


@pytest.mark.parametrize("length", [-(2**31), -(2**31) + 1000, -1, 2**31 - 1])
def test_lengths_that_cannot_be(device, require, length):
    """Whatever seq_lens says, ids are blocks of the table, and other requests keep theirs."""
    require("select_blocks", FP8, FP8)
    case = large(300, 2, values="integer", device=device)
    expected = msa_kernels.select_blocks(*case.index_args)  # leaves bounds in the workspace
    out, untouched = guarded(expected.shape, torch.int32, device)
    lengths = case.seq_lens.clone()
    lengths[0] = length
    msa_kernels.select_blocks(*case.with_(seq_lens=lengths).index_args, out=out)
    untouched()
    assert bool(((out >= -1) & (out < 300)).all())
    if length < 0:
        assert bool((out[:, : case.lengths[0][0]] == -1).all())
    others = slice(case.lengths[0][0], None)
    assert_ids(out[:, others], expected[:, others])


def test_twenty_runs_give_the_same_bits(device, require):
    require("select_blocks", FP8, FP8)
    case = large(512, 4, device=device)
    ids = msa_kernels.select_blocks(*case.index_args)
    for _ in range(19 if device != "cpu" else 1):
        assert same_bits(msa_kernels.select_blocks(*case.index_args), ids)


def test_graph_replays_follow_the_lengths(device, require):
    require("select_blocks", FP8, FP8)
    case = large(8192, 2, 60 * BLOCK, values="integer", device=device)

    def call():
        return msa_kernels.select_blocks(*case.index_args)

    for ids in while_growing(case, call, (0, 127, 129, 2048, 2049, 10**6, 130, 0)):
        assert_ids(ids, reference.select_blocks(*case.index_args))
