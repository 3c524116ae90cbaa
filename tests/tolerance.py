"""How close is close enough: the one policy of all numeric tests.

An operator may be as wrong as PyTorch is when it computes the same in the operator's dtype, twice
over, plus a floor: what rounding the exact result to that dtype costs, and what an FP32 sum of the
inputs' size can lose. All of it is measured on the same inputs against the FP64 reference, so that
no constant has to fit every shape: an attention's floor is eps * |largest LSE| * |largest output|,
a score's eps * |q| * |k|. On top:

- Inf and NaN stand where the reference has them.
- LSE: abs 1e-6 or rel 3e-5, whichever is larger.
- Ids: exactly equal. Only where the operator's own arithmetic could turn two scores around, that is
  where the exact scores of the exchanged blocks differ by less than FP32 accumulation can err, is
  an exchange taken; it is reported, and rare.
- Quantised caches: compared on the quantised numbers.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from msa_kernels import reference
from tests.inputs import BLOCK, FP8, Case, D

LSE_ABS, LSE_REL = 1e-6, 3e-5
MAX_TIED_ROWS = 0.01
"""share of rows of a test in which a near tie may have gone the other way"""


def near(dtype: torch.dtype) -> dict[str, float]:
    """For two results of the operators that must agree to rounding: torch.testing's tolerances."""
    wide = 1e-5 if dtype == torch.float32 else 2**-6
    return {"rtol": wide, "atol": wide}


def assert_same_places(actual: Tensor, exact: Tensor, what: str) -> Tensor:
    """NaN, +Inf and -Inf at the same places; returns where both are finite."""
    for name, test in (("NaN", torch.isnan), ("+Inf", torch.isposinf), ("-Inf", torch.isneginf)):
        there, expected = test(actual), test(exact)
        if not torch.equal(there, expected):
            where = tuple((there != expected).nonzero()[0].tolist())
            raise AssertionError(
                f"{what}: {name} at {int(there.sum())} places, not {int(expected.sum())}; first "
                f"difference at {where}: {float(actual[where])} for {float(exact[where])}"
            )
    return exact.isfinite()


def assert_close(
    actual: Tensor, exact: Tensor, baseline: Tensor, what: str = "out", floor: float = 0.0
) -> None:
    """Error against `exact` (FP64) at most twice that of `baseline` (PyTorch in actual's dtype)
    plus a floor.

    Of the largest error and of the root mean square, so that neither one bad element nor a bias of
    all hides.
    floor: added to what rounding `exact` to actual's dtype costs.
    """
    finite = assert_same_places(actual, exact, what)
    if not bool(finite.any()):
        return
    exact_values = exact[finite].double()
    error = (actual[finite].double() - exact_values).abs()
    base_error = (baseline[finite].double() - exact_values).abs()
    rounding = (exact_values.to(actual.dtype).double() - exact_values).abs()
    for name, norm in (("largest", lambda x: x.max()), ("rms", lambda x: x.square().mean().sqrt())):
        allowed = 2 * norm(base_error) + norm(rounding) + floor
        assert float(norm(error)) <= float(allowed), (
            f"{what}: {name} error {float(norm(error)):.3e} above {float(allowed):.3e} "
            f"(PyTorch in {baseline.dtype}: {float(norm(base_error)):.3e}, "
            f"rounding: {float(norm(rounding)):.3e}, floor {floor:.1e}), {_worst(error, finite)}"
        )


def assert_lse_close(actual: Tensor, exact: Tensor, what: str = "lse") -> None:
    finite = assert_same_places(actual, exact, what)
    exact_values = exact[finite].double()
    error = (actual[finite].double() - exact_values).abs()
    allowed = (LSE_REL * exact_values.abs()).clamp(min=LSE_ABS)
    if not bool((error <= allowed).all()):
        raise AssertionError(f"{what}: error {_worst(error - allowed, finite)} above the allowed")


def attention_floor(exact: Tensor, exact_lse: Tensor) -> float:
    """eps(FP32) * |largest LSE| * |largest output|: logits of that size cannot be known better."""
    lse = exact_lse[exact_lse.isfinite()].abs().max() if exact_lse.isfinite().any() else 0.0
    out = exact[exact.isfinite()].abs().max() if exact.isfinite().any() else 0.0
    return torch.finfo(torch.float32).eps * max(1.0, float(lse)) * float(out)


def assert_attention(
    case: Case, out: Tensor, lse: Tensor | None, scale: float | None = None, what: str = "attention"
) -> None:
    """out (and lse) of a sparse attention of the case, judged by the policy."""
    exact, exact_lse = reference.sparse_attention(
        *case.attend_args, scale=scale, **case.scales, compute_dtype=torch.float64
    )
    assert out.dtype == case.q.dtype and out.shape == case.q.shape
    baseline = attention_in_dtype(case, scale)
    assert_close(out, exact, baseline, f"{what}: out", attention_floor(exact, exact_lse))
    if lse is not None:
        assert lse.dtype == torch.float32 and lse.shape == case.q.shape[:2]
        assert_lse_close(lse, exact_lse, f"{what}: lse")


def attention_in_dtype(case: Case, scale: float | None = None) -> Tensor:
    """PyTorch's scaled_dot_product_attention in q's dtype on the same selection, as one would write
    it.

    Each request's keys are gathered and dequantised to q's dtype; a mask says which a query attends
    to, and a key that counts n times gets log(n) there.
    """
    dtype, num_kv_heads = case.q.dtype, case.k_cache.size(1)
    out = torch.zeros_like(case.q)
    where = reference.token_positions(
        case.cu_seqlens_q, case.seq_lens, case.num_tokens, case.block_table.size(1)
    )
    counts = reference.counted(case.ids.long(), where.visible)
    for request in range(len(case.lengths)):
        rows = ((where.request == request) & (where.visible > 0)).nonzero()[:, 0]
        if rows.numel() == 0:
            continue
        num_blocks = int(where.visible[rows].max())
        blocks = torch.arange(num_blocks, device=rows.device)[None]
        page, there = reference.find_pages(
            case.block_table, rows.new_tensor([request]), blocks, case.k_cache.size(0)
        )
        k = _dense(case.k_cache, page[0], case.k_scale, dtype)  # [Hkv, tokens, D]
        v = _dense(case.v_cache, page[0], case.v_scale, dtype)

        times = torch.zeros(num_kv_heads, rows.numel(), num_blocks + 1, device=rows.device)
        ids = case.ids[:, rows].long().where(counts[:, rows], num_blocks)
        times.scatter_add_(-1, ids, torch.ones_like(ids, dtype=times.dtype))
        times = times[..., :num_blocks] * there[0]
        bias = times.log().repeat_interleave(BLOCK, dim=-1)  # [Hkv, rows, tokens]
        token = torch.arange(num_blocks * BLOCK, device=rows.device)
        bias = bias.masked_fill(token > where.pos[rows, None], float("-inf"))
        empty = (bias == float("-inf")).all(dim=-1)

        group = case.q.size(1) // num_kv_heads
        result = F.scaled_dot_product_attention(
            case.q[rows].transpose(0, 1)[None],
            k.repeat_interleave(group, dim=0)[None],
            v.repeat_interleave(group, dim=0)[None],
            attn_mask=bias.repeat_interleave(group, dim=0).to(dtype)[None],
            scale=scale,
        )[0]
        result = result.masked_fill(empty.repeat_interleave(group, dim=0)[..., None], 0)
        out[rows] = result.transpose(0, 1)
    return out


def assert_scores(actual: Tensor, case: Case, what: str = "scores") -> None:
    """Scores FP32 [Hi, T, max_pages] of the case's index tensors."""
    exact = reference.index_score(*case.index_args, compute_dtype=torch.float64)
    baseline = reference.index_score(*case.index_args, compute_dtype=torch.float32)
    assert actual.dtype == torch.float32 and actual.shape == exact.shape
    floor = float(score_slack(case).nan_to_num(0).max()) / 2
    assert_close(actual, exact, baseline, what, floor)


def assert_ids(
    actual: Tensor,
    expected: Tensor,
    exact_scores: Tensor | None = None,
    slack: Tensor | float = 0.0,
    what: str = "ids",
) -> None:
    """ids [Hi, T, K] equal, or, given FP64 scores [Hi, T, blocks], equal but for exchanges within
    `slack`."""
    assert actual.dtype == torch.int32 and actual.shape == expected.shape, (
        f"{what}: int32 {list(expected.shape)} expected, got {actual.dtype} {list(actual.shape)}"
    )
    different = (actual != expected).any(dim=-1)
    if not bool(different.any()):
        return
    rows = different.nonzero().tolist()
    for head, token in rows:
        got, want = actual[head, token].tolist(), expected[head, token].tolist()
        message = f"{what}: [head {head}, token {token}] expected {want}, got {got}"
        assert exact_scores is not None, message
        assert got.count(-1) == want.count(-1) and len(set(got)) == len(set(want)), message
        assert got == sorted(set(got) - {-1}) + [-1] * got.count(-1), message
        lost, won = sorted(set(want) - set(got)), sorted(set(got) - set(want))
        row = exact_scores[head, token]
        gap = float(row[lost].max() - row[won].min())
        bound = float(slack[head, token]) if isinstance(slack, Tensor) else slack
        assert gap <= bound, f"{message}; scores differ by {gap:.3e}, a tie would by {bound:.3e}"
    share = len(rows) / max(1, different.numel())
    warnings.warn(f"{what}: {len(rows)} rows with a near tie", stacklevel=2)
    assert share <= MAX_TIED_ROWS, f"{what}: near ties in {share:.1%} of the rows"


def score_slack(case: Case) -> Tensor:
    """[Hi, T] how far FP32 sums may move a score: 2 * sqrt(D) * eps * |q| * max |k|."""
    q_norm = case.index_q.double().norm(dim=-1).transpose(0, 1)
    keys = case.index_k_cache.double()
    k_norm = keys.nan_to_num(0, 0, 0).norm(dim=-1).max()
    return 2 * D**0.5 * torch.finfo(torch.float32).eps * q_norm * k_norm


def assert_selection(actual: Tensor, case: Case, what: str = "ids", **rule) -> None:
    """ids of `select_blocks` on the case."""
    scores = reference.index_score(*case.index_args, compute_dtype=torch.float64)
    expected = reference.topk_blocks(scores, case.visible, case.topk, **rule)
    assert_ids(actual, expected, scores, score_slack(case), what)


def _dense(cache: Tensor, page: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[Hkv, tokens, D] of a request, in `dtype`; what was never written becomes 0."""
    if cache.dtype == FP8:
        rows = cache.view(torch.uint8)[page].view(FP8).float()
    else:
        rows = cache[page].float()
    if scale is not None:
        rows = rows * scale.view(-1, 1, 1)
    rows = rows.nan_to_num(0, 0, 0).to(dtype)
    return rows.transpose(0, 1).flatten(1, 2)


def _worst(error: Tensor, finite: Tensor) -> str:
    place = finite.nonzero()[int(error.argmax())].tolist()
    return f"worst at {place}: {float(error.max()):.3e}"
