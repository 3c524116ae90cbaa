"""Whether a result is right, before it is timed: against the reference, on sampled tokens.

A sampled token becomes a request of its own that ends at the token, so the reference does little
even at a million tokens. Floating results are judged by ||result - reference|| / ||reference|| per
token, the worst counting; selections as sets, where a block may stand for another if their scores
lie closer than FP32 accumulation can err.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from msa_kernels import reference

from .inputs import BLOCK, FP8, FRAME, PIXEL_MEAN, PIXEL_STD, D, Inputs

SAMPLES = 24
"""tokens looked at"""
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
"""relative error allowed, by the dtype computed in: BF16 P and out give 2-4e-3"""


@dataclass(frozen=True)
class Check:
    """A verdict."""

    ok: bool
    error: float
    """relative error, or for selections the share of rows with a near tie"""
    message: str = ""
    """what is wrong"""


class Sample:
    """Some tokens of a step as requests of their own."""

    def __init__(self, inputs: Inputs, count: int = SAMPLES) -> None:
        """The first token, the last, and others drawn from all."""
        total = inputs.shape.num_tokens
        rng = torch.Generator().manual_seed(total)
        rows = torch.randperm(total, generator=rng)[:count].tolist()
        self.rows = torch.tensor(sorted({0, total - 1, *rows}), device=inputs.device)
        request = inputs.request[self.rows]
        self.batch = (
            inputs.block_table[request],
            torch.arange(len(self.rows) + 1, dtype=torch.int32, device=inputs.device),
            (inputs.pos[self.rows] + 1).int(),
        )


def all_of(*checks: Check) -> Check:
    """Right if all are; the largest error."""
    wrong = [c.message for c in checks if not c.ok]
    return Check(not wrong, max(c.error for c in checks), "; ".join(wrong))


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str = "out") -> Check:
    """Floating rows [rows, ...]: infinite at the same places, and the worst row's error."""
    if actual.shape != expected.shape:
        return Check(
            False, float("nan"), f"{what} is {list(actual.shape)}, not {list(expected.shape)}"
        )
    actual, expected = actual.double().flatten(1), expected.double().flatten(1)
    endless = expected.isinf()
    if not torch.equal(actual.isinf() & (actual == expected), endless):
        return Check(False, float("inf"), f"{what}: infinite at other places than the reference")
    actual, expected = actual.masked_fill(endless, 0), expected.masked_fill(endless, 0)
    if not bool(actual.isfinite().all()):
        return Check(False, float("nan"), f"{what}: NaN")
    norm = expected.norm(dim=1).clamp(min=1e-30)
    error = float(((actual - expected).norm(dim=1) / norm).max())
    limit = TOLERANCE[dtype]
    message = f"{what}: relative error {error:.2e}, allowed {limit:.0e}"
    return Check(error <= limit, error, "" if error <= limit else message)


def equal(actual: Tensor, expected: Tensor, what: str) -> Check:
    """Bit for bit."""
    if actual.shape == expected.shape and torch.equal(actual, expected):
        return Check(True, 0.0)
    return Check(False, float("nan"), f"{what} differs from the reference")


def selection(inputs: Inputs, ids: Tensor) -> Check:
    """ids [Hi, T, K] of `select_blocks`."""
    sample = Sample(inputs)
    query = inputs.index_q[sample.rows]
    scores = reference.index_score(query, inputs.index_k_cache, *sample.batch)
    # Two sums of D products, each in some order; no key is much longer than sqrt(D).
    lengths = query.float().norm(dim=-1).transpose(0, 1)
    slack = 2 * D * torch.finfo(torch.float32).eps * lengths * (1.5 * D**0.5)
    return chosen(ids[:, sample.rows], scores, inputs.visible[sample.rows], slack)


def chosen(ids: Tensor, scores: Tensor, visible: Tensor, slack: Tensor) -> Check:
    """ids [Hi, rows, K] as sets against the best of scores [Hi, rows, blocks]; slack [Hi, rows]."""
    expected = reference.topk_blocks(scores, visible, ids.size(-1))
    num_blocks = scores.size(-1)
    own = (visible.long() - 1)[:, None]
    masks = []
    for part in (ids, expected):
        part = part.long()
        if bool(((part < -1) | (part >= num_blocks)).any()):
            return Check(False, float("nan"), "ids: no block of the request")
        mask = torch.zeros(*part.shape[:2], num_blocks + 1, dtype=torch.int32, device=ids.device)
        place = part.masked_fill(part < 0, num_blocks)
        masks.append(mask.scatter_add_(-1, place, torch.ones_like(place, dtype=torch.int32)))
    got, want = (mask[..., :num_blocks] for mask in masks)
    if bool((got > 1).any()):
        return Check(False, float("nan"), "ids: a block twice")
    if not torch.equal(got.sum(dim=-1), want.sum(dim=-1)):
        return Check(False, float("nan"), "ids: too many or too few blocks")
    if not bool(got.gather(-1, own.expand(ids.size(0), -1, -1)).all()):
        return Check(False, float("nan"), "ids: the own block is missing")
    lost = scores.masked_fill((want == 0) | (got == 1), float("-inf")).amax(dim=-1)
    won = scores.masked_fill((got == 0) | (want == 1), float("inf")).amin(dim=-1)
    different = (got != want).any(dim=-1)
    wrong = different & ~(lost - won <= slack)
    share = float(different.float().mean())
    if bool(wrong.any()):
        gap = float((lost - won)[wrong].max())
        count = f"{int(wrong.sum())} of {wrong.numel()} sampled rows"
        return Check(False, share, f"ids: {count} wrong, by scores up to {gap:.2e}")
    return Check(True, share)


def attention(inputs: Inputs, out: Tensor, ids: Tensor | None = None) -> Check:
    """out [T, Hq, D] of sparse attention over `ids`, by default the inputs' own."""
    if out.shape != inputs.q.shape or out.dtype != inputs.q.dtype:
        return Check(False, float("nan"), f"out is {out.dtype} {list(out.shape)}")
    sample = Sample(inputs)
    ids = inputs.ids if ids is None else ids
    expected, _ = reference.sparse_attention(
        inputs.q[sample.rows],
        *inputs.kv(),
        ids[:, sample.rows],
        *sample.batch,
        **inputs.scales,
    )
    return close(out[sample.rows], expected, inputs.dtypes.q)


def dense_attention(inputs: Inputs, out: Tensor) -> Check:
    """out [T, Hq, D] of attention over the whole context, on few tokens: each reads all of it."""
    sample = Sample(inputs, count=1)
    table, _, lens = sample.batch
    for row, (token, length) in enumerate(zip(sample.rows.tolist(), lens.tolist(), strict=True)):
        pages = table[row, : -(-length // BLOCK)].long()
        k, v = (c[pages].transpose(0, 1).flatten(1, 2)[:, :length].float() for c in inputs.kv())
        q = inputs.q[token].float().unflatten(0, (k.size(0), -1))
        expected = ((q @ k.transpose(1, 2)) * D**-0.5).softmax(dim=-1) @ v
        check = close(out[token][None], expected.flatten(0, 1)[None], inputs.dtypes.q)
        if not check.ok:
            return check
    return check


def scores(inputs: Inputs, result: Tensor) -> Check:
    """[Hi, T, max_blocks] of `index_score`."""
    sample = Sample(inputs)
    query = inputs.index_q[sample.rows]
    expected = reference.index_score(query, inputs.index_k_cache, *sample.batch)
    actual = result[:, sample.rows].transpose(0, 1)
    return close(actual, expected.transpose(0, 1), torch.float32, "scores")


def topk(inputs: Inputs, ids: Tensor) -> Check:
    """ids of `topk_blocks` over the inputs' scores, which are exact."""
    rows = Sample(inputs).rows
    picked = inputs.scores[:, rows]
    return chosen(ids[:, rows], picked, inputs.visible[rows], picked.new_zeros(picked.shape[:2]))


def schedule(inputs: Inputs, result: tuple[Tensor, ...]) -> Check:
    """Row pointers, pairs in any order within a row, work items and their number."""
    expected = reference.kv_block_schedule(
        inputs.ids, inputs.cu_seqlens_q, inputs.seq_lens, inputs.shape.max_blocks
    )
    row_ptr, pairs, *items = result
    used = min(int(expected[0][-1]), pairs.numel())
    row = torch.repeat_interleave(expected[0].long().diff())[:used]  # of each pair
    ordered = pairs[:used][(row * 2**31 + pairs[:used]).argsort()]
    found = (row_ptr, torch.cat((ordered, pairs[used:])), *items)
    names = ("row_ptr", "pairs", "work_items", "num_work_items")
    return all_of(*(equal(a, e, n) for a, e, n in zip(found, expected, names, strict=True)))


def view(inputs: Inputs, result: tuple[Tensor, Tensor], steps: tuple[int, int]) -> Check:
    """Page table and lengths of a decode view."""
    expected = reference.decode_view(
        inputs.ids,
        inputs.block_table,
        inputs.cu_seqlens_q,
        inputs.seq_lens,
        inputs.kv()[0].size(0),
        *steps,
    )
    names = ("page_table", "kv_lens")
    return all_of(*(equal(a, e, n) for a, e, n in zip(result, expected, names, strict=True)))


def merged(inputs: Inputs, result: tuple[Tensor, Tensor]) -> Check:
    """(out [T, Hq, D], lse [T, Hq]) of a merge."""
    rows = Sample(inputs).rows
    out, lse = reference.merge_lse(inputs.outs[:, rows], inputs.lses[:, rows])
    return all_of(
        close(result[0][rows], out, inputs.dtypes.q),
        close(result[1][rows], lse, torch.float32, "lse"),
    )


def normalized(inputs: Inputs, patches: Tensor, out: Tensor) -> Check:
    """Normalised patches [4 T, 1176] of `patches`, on sampled rows."""
    if out.shape != (len(patches), 2 * FRAME) or out.dtype != inputs.dtypes.q:
        return Check(False, float("nan"), f"out is {out.dtype} {list(out.shape)}")
    rng = torch.Generator().manual_seed(len(patches))
    rows = torch.randint(len(patches), (SAMPLES,), generator=rng)
    rows = torch.cat([rows, torch.tensor([0, len(patches) - 1])]).to(patches.device)
    expected = reference.normalize_patches(patches[rows], PIXEL_MEAN, PIXEL_STD)
    return close(out[rows], expected, inputs.dtypes.q)


def written(inputs: Inputs) -> Check:
    """The new tokens in the three caches, bit for bit; wipes them, for the next one to write."""
    where = inputs.slot_mapping // BLOCK, inputs.slot_mapping % BLOCK
    checks = []
    for name, cache, rows in (
        ("k_cache", inputs.k_cache.transpose(1, 2), inputs.k),
        ("v_cache", inputs.v_cache.transpose(1, 2), inputs.v),
        ("index_k_cache", inputs.index_k_cache, inputs.index_k),
    ):
        rows = rows.to(cache.dtype)
        if cache.dtype == FP8:
            cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
        checks.append(equal(cache[where], rows, name))
        cache[where] = 0
    return all_of(*checks)
