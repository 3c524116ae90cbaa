"""Step 5, merge: attention over parts of the keys into attention over all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_lse(
    outs: Tensor | Sequence[Tensor],
    lses: Tensor | Sequence[Tensor],
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """lse = log(sum_p exp(lses[p])); out = sum_p exp(lses[p] - lse) outs[p].

    outs [P, T, H, D], lses [P, T, H] or P separate tensors -> out [T, H, D], lse [T, H] in
    `compute_dtype`. A part with lse -inf holds no keys: its outs are not looked at. All of them
    -inf: out 0, lse -inf.
    """
    outs = outs if isinstance(outs, Tensor) else torch.stack(list(outs))
    lses = lses if isinstance(lses, Tensor) else torch.stack(list(lses))
    outs, lses = outs.to(compute_dtype), lses.to(compute_dtype)
    empty = lses == float("-inf")
    if outs.size(0) == 0:
        return outs.new_zeros(outs.shape[1:]), lses.new_full(lses.shape[1:], float("-inf"))
    highest = lses.amax(dim=0)
    highest = highest.masked_fill(highest == float("-inf"), 0)
    weights = (lses - highest).exp()
    total = weights.sum(dim=0)
    outs = outs.masked_fill(empty[..., None], 0)
    out = (weights[..., None] * outs).sum(dim=0) / total.masked_fill(total == 0, 1)[..., None]
    return out, highest + total.log()
