"""Step 5, merge: partial attention results over disjoint keys into the result over all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_lse(
    outs: Tensor | Sequence[Tensor],
    lses: Tensor | Sequence[Tensor],
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges P attention results over disjoint sets of keys, by their log-sum-exps.

    `lse = log(sum over p of exp(lses[p]))`, `out = sum over p of exp(lses[p] - lse) * outs[p]`.

    Args:
        outs: [P, T, H, D = 128] float32 or bfloat16, strides free multiples of 16 bytes, last
            dimension contiguous (a [T, P, H, D] tensor is passed transposed); or 1 to 16 separate
            tensors [T, H, D].
        lses: [P, T, H] float32, strides free; natural logarithm of each part's softmax sum; or as
            many separate tensors [T, H].
        out: [T, H, D] of outs' dtype to write into, token and head strides free; given together
            with `lse`, for stacked parts only. Must not overlap the inputs.
        lse: [T, H] float32 to write into. Must not overlap the inputs or `out`.

    Returns:
        (out [T, H, D] in outs' dtype, lse [T, H] float32).

    Raises:
        ValueError: a shape, dtype, device or stride that the operator does not take.
        RuntimeError: no kernel of this build runs on the tensors' device.

    Notes:
        A part whose LSE is -inf holds no keys: it is left out, and its `outs` may be anything, NaN
        included. All parts -inf gives out 0 and LSE -inf. A NaN LSE makes its row NaN. FP32
        arithmetic; parts are added in a fixed order, so the result is the same bits every time.
    Cost:
        Bytes: every part once (P * T * H * (D * size + 4)) and the result once; 2 * D FLOPs a part.
    Source:
        The online softmax merge of split attention; docs/numerics.md.
    """
    if isinstance(outs, Tensor) != isinstance(lses, Tensor):
        raise ValueError(
            "msa.merge_lse: outs and lses must both be tensors or both be sequences of tensors, "
            f"got {type(outs).__name__} and {type(lses).__name__}"
        )
    if not isinstance(outs, Tensor):
        if len(outs) == 0:
            raise ValueError("msa.merge_lse: outs must be a sequence of 1 to 16 parts, got 0")
        if out is not None or lse is not None:
            raise ValueError(
                "msa.merge_lse: out and lse must be None when the parts are separate tensors, "
                "got tensors"
            )
        return torch.ops.msa.merge_lse.parts(list(outs), list(lses))
    if out is None and lse is None:
        return torch.ops.msa.merge_lse(outs, lses)
    if out is None or lse is None:
        raise ValueError("msa.merge_lse: out and lse must be given together, got only one of them")
    torch.ops.msa.merge_lse.out(outs, lses, output=out, lse=lse)
    return out, lse
