"""merge_lse against the reference, and against what the parts were made from."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import msa_kernels
from msa_kernels import reference
from tests.inputs import D, dtype_name, guarded, same_bits
from tests.tolerance import assert_close, assert_lse_close

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float32, torch.bfloat16]


def parts(count, tokens, heads, dtype, device, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(count, tokens, heads, D, generator=generator).to(dtype)
    lses = torch.randn(count, tokens, heads, generator=generator) * spread
    return outs.to(device), lses.to(device)


def judge(out, lse, outs, lses):
    """The policy; the baseline is the same sum in PyTorch in FP32, rounded to outs' dtype."""
    exact, exact_lse = reference.merge_lse(outs, lses, compute_dtype=torch.float64)
    baseline, _ = reference.merge_lse(outs, lses)
    dtype = (outs if isinstance(outs, torch.Tensor) else outs[0]).dtype
    assert out.dtype == dtype and lse.dtype == torch.float32
    finite = exact[exact.isfinite()]
    floor = 4 * torch.finfo(torch.float32).eps * float(finite.abs().max() if len(finite) else 0)
    assert_close(out, exact, baseline.to(dtype), floor=floor)
    assert_lse_close(lse, exact_lse)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 17, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_matches_reference(device, require, dtype, count):
    require("merge_lse", dtype)
    for tokens, heads in ((1, 1), (37, 16), (5, 3)):
        outs, lses = parts(count, tokens, heads, dtype, device)
        judge(*msa_kernels.merge_lse(outs, lses), outs, lses)


@pytest.mark.parametrize("count", [1, 2, 5, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_separate_parts(device, require, dtype, count):
    require("merge_lse", dtype)
    outs, lses = parts(count, 9, 4, dtype, device)
    views = [guarded(outs[0].shape, dtype, device, rows=True)[0] for _ in range(count)]
    lse_views = [guarded(lses[0].shape, torch.float32, device)[0] for _ in range(count)]
    for part in range(count):
        views[part].copy_(outs[part])
        lse_views[part].copy_(lses[part])
    expected = msa_kernels.merge_lse(outs, lses)
    for got, want in zip(msa_kernels.merge_lse(views, lse_views), expected, strict=True):
        assert same_bits(got, want)
    judge(*msa_kernels.merge_lse(list(outs), tuple(lses)), outs, lses)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_empty_parts(device, require, dtype):
    """A part with LSE -inf is left out, NaN in it or not; all of them: 0 and -inf."""
    require("merge_lse", dtype)
    outs, lses = parts(4, 6, 2, dtype, device)
    for part, token in ((0, 0), (3, 0), (1, 1), (2, 1), (3, 1), (0, 2), (1, 2), (2, 2)):
        lses[part, token] = -INF
        outs[part, token] = NAN if token % 2 else INF
    lses[:, 3] = -INF
    outs[:, 3] = NAN
    out, lse = msa_kernels.merge_lse(outs, lses)
    judge(out, lse, outs, lses)
    assert not bool(out[3].any()) and bool((lse[3] == -INF).all())
    assert same_bits(out[1], outs[0, 1]) and same_bits(out[2], outs[3, 2])
    assert same_bits(lse[1], lses[0, 1])


def test_empty_is_the_identity_in_either_place(device, require):
    require("merge_lse", torch.float32)
    outs, lses = parts(1, 11, 4, torch.float32, device)
    nothing = torch.full_like(outs, NAN), torch.full_like(lses, -INF)
    for order in ((outs, nothing[0]), (nothing[0], outs)):
        lse_order = (lses, nothing[1]) if order[0] is outs else (nothing[1], lses)
        out, lse = msa_kernels.merge_lse(torch.cat(order), torch.cat(lse_order))
        assert same_bits(out, outs[0]) and same_bits(lse, lses[0])


def test_far_apart_and_large(device, require):
    """LSEs of thousands, and parts that vanish beside another: nothing overflows."""
    require("merge_lse", torch.float32)
    outs, lses = parts(3, 8, 2, torch.float32, device)
    lses[:, 0] = torch.tensor([5000.0, 5001.0, -5000.0], device=device)[:, None]
    lses[:, 1] = torch.tensor([-5000.0, -5001.0, -9000.0], device=device)[:, None]
    lses[:, 2] = torch.tensor([3e38, -3e38, 0.0], device=device)[:, None]
    lses[:, 3] = torch.tensor([100.0, -100.0, 12.0], device=device)[:, None]
    out, lse = msa_kernels.merge_lse(outs, lses)
    judge(out, lse, outs, lses)
    assert bool(out.isfinite().all())


def test_nan_lse_makes_its_row_nan(device, require):
    require("merge_lse", torch.float32)
    outs, lses = parts(3, 5, 2, torch.float32, device)
    lses[1, 2, 0] = NAN
    lses[0, 3, 1] = NAN
    lses[1:, 3, 1] = -INF
    out, lse = msa_kernels.merge_lse(outs, lses)
    bad = lses.isnan().any(dim=0)
    assert torch.equal(lse.isnan(), bad)
    assert torch.equal(out.isnan(), bad[..., None].expand_as(out))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_strides_and_outputs(device, require, dtype):
    """Token-major parts passed transposed, sliced LSEs, and outputs with sentinels around."""
    require("merge_lse", dtype)
    outs, lses = parts(5, 7, 3, dtype, device)
    expected = msa_kernels.merge_lse(outs, lses)
    token_major = outs.transpose(0, 1).contiguous().transpose(0, 1)
    wide, _ = guarded(outs.shape, dtype, device, rows=True)
    wide.copy_(outs)
    thin, _ = guarded(lses.shape, torch.float32, device)
    thin.copy_(lses)
    for some_outs, some_lses in ((token_major, lses), (wide, thin)):
        for got, want in zip(msa_kernels.merge_lse(some_outs, some_lses), expected, strict=True):
            assert same_bits(got, want)
    out, check_out = guarded(outs.shape[1:], dtype, device, rows=True)
    lse, check_lse = guarded(lses.shape[1:], torch.float32, device)
    result = msa_kernels.merge_lse(outs, lses, out=out, lse=lse)
    assert result[0] is out and result[1] is lse
    check_out()
    check_lse()
    assert same_bits(out, expected[0]) and same_bits(lse, expected[1])


def test_arguments_that_go_together(device):
    outs, lses = parts(2, 3, 2, torch.float32, device)
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    for given_out, given_lse in ((out, None), (None, lse)):
        with pytest.raises(ValueError, match=r"msa\.merge_lse: out and lse must"):
            msa_kernels.merge_lse(outs, lses, out=given_out, lse=given_lse)
    with pytest.raises(ValueError, match=r"msa\.merge_lse: out and lse must"):
        msa_kernels.merge_lse(list(outs), list(lses), out=out, lse=lse)


@pytest.mark.parametrize("shape", [(2, 0, 3), (2, 3, 0)])
def test_no_rows(device, require, shape):
    require("merge_lse", torch.float32)
    out, lse = msa_kernels.merge_lse(
        torch.zeros(*shape, D, device=device), torch.zeros(shape, device=device)
    )
    assert out.shape == (*shape[1:], D) and lse.shape == shape[1:]


def test_twenty_runs_give_the_same_bits(device, require):
    require("merge_lse", torch.bfloat16)
    outs, lses = parts(16, 40, 8, torch.bfloat16, device)
    first = msa_kernels.merge_lse(outs, lses)
    for _ in range(19):
        for got, want in zip(msa_kernels.merge_lse(outs, lses), first, strict=True):
            assert same_bits(got, want)


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_split_merges_to_the_whole(device, require, data):
    """softmax(x) v over random disjoint parts of the keys, empty ones included, is that over
    all."""
    require("merge_lse", torch.float32)
    keys, count = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    logits = torch.randn(3, keys, generator=generator, dtype=torch.float64) * 4
    values = torch.randn(keys, D, generator=generator, dtype=torch.float64)
    owner = torch.randint(count, (keys,), generator=generator)
    outs, lses = [], []
    for part in range(count):
        x = logits.masked_fill(owner != part, -INF)
        lses.append(x.logsumexp(dim=-1))
        outs.append(torch.softmax(x, dim=-1) @ values)  # NaN where the part is empty
    out, lse = msa_kernels.merge_lse(
        torch.stack(outs).float()[:, :, None].to(device),
        torch.stack(lses).float()[:, :, None].to(device),
    )
    whole = (torch.softmax(logits, dim=-1) @ values).float()
    torch.testing.assert_close(out[:, 0].cpu(), whole, rtol=1e-5, atol=1e-5)
    whole_lse = logits.logsumexp(dim=-1).float()
    torch.testing.assert_close(lse[:, 0].cpu(), whole_lse, rtol=3e-5, atol=1e-5)
