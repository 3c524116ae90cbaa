"""FP8 caches: every stored number, scales, NaN, and weights far below the largest."""

import math

import pytest
import torch

import msa_kernels
from msa_kernels import reference
from tests.inputs import BLOCK, FP8, D, make_case, same_bits
from tests.tolerance import LSE_REL, assert_attention, near

OPS = ["sparse_prefill", "sparse_decode"]
HEADS = [(64, 4), (16, 1), (16, 2), (8, 2), (4, 2), (1, 1)]
"""G 16 and 8, which share blocks between tokens, and smaller ones, which do not"""
LENGTHS = [(3, 2200), (1, 129), (40, 300), (60, 5300)]
"""few blocks, which all tokens share, and many, of which a token selects some"""


@pytest.fixture(params=OPS)
def op(request, require):
    require(request.param, torch.bfloat16, FP8)
    return request.param


def fp8_case(lengths=LENGTHS, **options):
    return make_case(lengths, dtype=torch.bfloat16, cache_dtype=FP8, **options)


def run(op, case, **options):
    """(out, lse) of an operator on the case."""
    function = getattr(msa_kernels, op)
    return function(*case.attend_args, **case.scales, return_lse=True, **options)


def check(op, case):
    out, lse = run(op, case)
    assert_attention(case, out, lse, None, op)
    return out, lse


def test_scales_that_are_numbers_whatever_the_default_device(device, op):
    """They are read on the host: a tensor of the default device would be copied to it."""
    case = fp8_case(device=device)
    function = getattr(msa_kernels, op)
    expected = function(*case.attend_args, k_scale=0.5, v_scale=0.25)
    with torch.device("meta"):
        out = function(*case.attend_args, k_scale=0.5, v_scale=0.25)
    assert same_bits(out, expected)


@pytest.mark.parametrize("hq,hkv", HEADS)
def test_heads(device, op, hq, hkv):
    """Scales that differ from head to head, and every selection that a tile of tokens may have."""
    for selection in ("random", "same", "disjoint"):
        case = fp8_case(hq=hq, hkv=hkv, layout="interleaved", selection=selection, device=device)
        k_scale, v_scale = (torch.linspace(*ends, hkv) for ends in ((0.5, 2.0), (7.0, 0.01)))
        check(op, case.with_(k_scale=k_scale.to(device), v_scale=v_scale.to(device)))


def codes(first):
    """128 numbers as stored, from a byte on."""
    return (torch.arange(D) + first).to(torch.uint8)


def shared_block_case(hq, hkv, k_row, v_row, device):
    """128 tokens that select block 0 alone, whose tokens are all alike; D query heads see its K."""
    case = fp8_case([(BLOCK, 2 * BLOCK)], hq=hq, hkv=hkv, topk=1, padding_rows=0, device=device)
    page = case.block_table[0, 0].long()
    for cache, row in ((case.k_cache, k_row), (case.v_cache, v_row)):
        cache.view(torch.uint8)[page] = row.to(device).expand(hkv, BLOCK, D)
    return case.with_(ids=torch.zeros_like(case.ids), k_scale=None, v_scale=None)


@pytest.mark.parametrize("first", [0, 128])
@pytest.mark.parametrize("hq,hkv", [(16, 1), (8, 1), (4, 1)])
def test_every_number(device, op, hq, hkv, first):
    """Each of the 256 as K, by the LSE of a query that sees it alone, and as V, by the output."""
    stored = codes(first)
    finite = stored.masked_fill((stored & 127) == 127, 0)
    case = shared_block_case(hq, hkv, finite, stored, device)
    q = torch.eye(D, dtype=torch.bfloat16, device=device)[:, None].expand(D, hq, D)
    out, lse = run(op, case.with_(q=q.contiguous()), scale=1.0)
    keys, values = (x.view(FP8).float().to(device) for x in (finite, stored))
    expected = (keys + math.log(BLOCK))[:, None].expand(D, hq)
    torch.testing.assert_close(lse, expected, rtol=LSE_REL, atol=1e-6)
    assert torch.equal(out.isnan(), values.isnan().expand_as(out))
    torch.testing.assert_close(
        out.float(), values.expand_as(out), rtol=2**-9, atol=2**-20, equal_nan=True
    )


@pytest.mark.parametrize("hq,hkv", [(16, 1), (8, 1), (4, 1)])
def test_weights_far_below_the_largest(device, op, hq, hkv):
    """Weights of 2^-14 to 2^-21 beside a 1 whose V is 0: the output is theirs alone."""
    case = shared_block_case(hq, hkv, torch.zeros(D), codes(0) % 8 + 0x38, device)
    page = case.block_table[0, 0].long()
    k, v = case.k_cache.view(torch.uint8)[page], case.v_cache.view(torch.uint8)[page]
    k[:, 5, 0], v[:, 5] = 0x38, 0  # token 5: K is 1 where q looks, V 0
    case.k_cache.view(torch.uint8)[page], case.v_cache.view(torch.uint8)[page] = k, v
    q = torch.zeros_like(case.q)
    below = torch.linspace(14, 21, BLOCK, device=device)
    q[..., 0] = (below * math.log(2))[:, None]
    case = case.with_(q=q)
    out, lse = run(op, case, scale=1.0)
    exact, exact_lse = reference.sparse_attention(
        *case.attend_args, scale=1.0, compute_dtype=torch.float64
    )
    assert float(exact.abs().min()) > 0
    torch.testing.assert_close(out.double(), exact, rtol=2**-7, atol=0)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=LSE_REL, atol=1e-6)


@pytest.mark.parametrize("step", [-9.0, -2.0, 0.5, 2.0, 5.0, 9.0])
@pytest.mark.parametrize("hq,hkv", [(16, 1), (4, 1)])
def test_maxima_that_grow_or_shrink_from_block_to_block(device, op, hq, hkv, step):
    """By `step` log2 units a block: sums are made smaller at each, now and then, or never."""
    case = fp8_case([(24, 16 * BLOCK)], hq=hq, hkv=hkv, padding_rows=0, device=device)
    table = case.block_table[0].tolist()
    for block in range(16):
        stored = torch.tensor(float(block)).to(FP8).view(torch.uint8)
        case.k_cache.view(torch.uint8)[table[block], ..., 0] = stored.to(device)
    q = case.q * 0.1
    q[..., 0] = step * math.log(2) * D**0.5
    case = case.with_(q=q, k_scale=None)
    assert_attention(
        case, *getattr(msa_kernels, op)(*case.attend_args, v_scale=case.v_scale, return_lse=True)
    )


@pytest.mark.parametrize("size", [2.0**-60, 2.0**-20, 2.0**20, 2.0**60])
@pytest.mark.parametrize("hq,hkv", [(16, 1), (8, 1), (4, 1)])
def test_q_of_any_size(device, op, hq, hkv, size):
    """A token's numbers, and k_scale, far from 1, beside tokens and heads of another size."""
    case = fp8_case([(30, 1500)], hq=hq, hkv=hkv, device=device)
    q = case.q.clone()
    q[::2] *= size
    q[1::2] /= 2.0**3
    case = case.with_(q=q, k_scale=torch.full((1,), 1 / size, device=device))
    out, lse = run(op, case)
    exact, exact_lse = reference.sparse_attention(
        *case.attend_args, **case.scales, compute_dtype=torch.float64
    )
    real = slice(0, case.num_real, 2)  # of the others some logits are beyond float32
    torch.testing.assert_close(out[real].double(), exact[real], rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(lse[real].double(), exact_lse[real], rtol=LSE_REL, atol=1e-5)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("hq,hkv", [(16, 1), (8, 1), (4, 1)])
def test_q_that_is_no_number_stays_in_its_head(device, op, hq, hkv, value):
    case = fp8_case([(30, 1500)], hq=hq, hkv=hkv, padding_rows=0, device=device)
    out, lse = run(op, case)
    q = case.q.clone()
    q[7, hq // 2, 11] = value
    again, again_lse = run(op, case.with_(q=q))
    assert bool(again[7, hq // 2].isnan().all() and again_lse[7, hq // 2].isnan())
    touched = torch.zeros_like(lse, dtype=torch.bool)
    touched[7, hq // 2] = True
    torch.testing.assert_close(again[~touched], out[~touched], **near(out.dtype))
    torch.testing.assert_close(again_lse[~touched], lse[~touched], rtol=LSE_REL, atol=1e-6)


@pytest.mark.parametrize("hq,hkv", [(32, 2), (16, 2), (4, 2)])
def test_nan_of_later_tokens(device, op, hq, hkv):
    """NaN in tokens that some queries see and others do not: in K and in V, in its place and only
    there, beside numbers that count for much."""
    case = fp8_case([(90, 300), (150, 150)], hq=hq, hkv=hkv, device=device)
    for request, token, head in ((0, 250, 0), (0, 255, 1), (0, 256, 0), (0, 299, 1), (1, 77, 1)):
        page = case.block_table[request, token // BLOCK].long()
        case.v_cache.view(torch.uint8)[page, head, token % BLOCK, 3:7] = 0x7F
        case.v_cache.view(torch.uint8)[page, head, token % BLOCK, 90] = 0xFF
        case.v_cache.view(torch.uint8)[page, head, token % BLOCK, [2, 7]] = 0x74  # 192
    page = case.block_table[1, 0].long()
    case.k_cache.view(torch.uint8)[page, 0, 100, 17] = 0xFF
    out, lse = run(op, case)
    exact, exact_lse = reference.sparse_attention(*case.attend_args, **case.scales)
    for got, want in ((out, exact), (lse, exact_lse)):
        assert torch.equal(got.isfinite(), want.isfinite())
        finite = want.isfinite()
        torch.testing.assert_close(got[finite].float(), want[finite], **near(out.dtype))
    assert bool(out[:40].isfinite().all())
    assert bool(out[40:90, 0, [2, 7]].isfinite().all() and out[40:90, 0, 3:7].isnan().all())


@pytest.mark.parametrize("hq,hkv,tokens", [(64, 4, 256), (32, 4, 512), (4, 1, 40)])
def test_nan_stays_with_those_that_selected_its_block(device, op, hq, hkv, tokens):
    """Neighbours share all blocks but one, whose V holds NaN; every fourth token is without it."""
    case = fp8_case([(tokens, 3000)], hq=hq, hkv=hkv, device=device)
    case.ids[:, :, :15] = torch.arange(15, device=device)
    case.ids[:, :tokens, 15] = 19
    case.ids[:, 2:tokens:4, 3] = 16
    page = case.block_table[0, 3].long()
    case.v_cache.view(torch.uint8)[page, :, 70, 8:11] = 0x7F
    out, lse = run(op, case)
    exact, exact_lse = reference.sparse_attention(*case.attend_args, **case.scales)
    assert torch.equal(out.isfinite(), exact.isfinite()) and bool(out[2:tokens:4].isfinite().all())
    finite = exact.isfinite()
    torch.testing.assert_close(out[finite].float(), exact[finite], **near(out.dtype))
    torch.testing.assert_close(lse, exact_lse, rtol=LSE_REL, atol=1e-5)


def test_twenty_runs_give_the_same_bits(device, op):
    for hq, hkv in ((16, 1), (4, 1)):
        case = fp8_case(hq=hq, hkv=hkv, device=device)
        out, lse = run(op, case)
        for _ in range(19):
            again, again_lse = run(op, case)
            assert same_bits(again, out) and same_bits(again_lse, lse)


def test_many_tiles(device, op):
    """More tiles and blocks than a GPU has multiprocessors: all buffers are used many times."""
    case = fp8_case([(700, 1900), (1300, 1300)], hq=16, hkv=2, topk=8, device=device)
    check(op, case)
