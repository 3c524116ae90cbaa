"""Media: pixels of images and clips into what the vision tower's first convolution reads."""

from collections.abc import Sequence

import torch
from torch import Tensor


def normalize_patches(
    patches: Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    *,
    patch: int = 14,
    temporal: int = 2,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`(x - 255 mean_c) / (255 std_c)` of uint8 pixels, in one pass.

    A row is one patch: channel, frame, y, x. Rows that hold one frame of two, as an image's may,
    get their second as a copy of it.

    Args:
        patches: [rows, 3 * frames * patch**2] uint8, contiguous, aligned to 4 bytes (any slice of
            rows is); frames is `temporal`, or 1.
        mean: of the three channels, from 0 to 1.
        std: of the three channels, from 1e-6 to 1.
        patch: pixels a side, even, 4 to 128.
        temporal: frames of a row of the result, 1 or 2.
        dtype: of the result, float32 or bfloat16; None: `out`'s, or bfloat16.
        out: [rows, 3 * temporal * patch**2] float32 or bfloat16 to write into, contiguous, aligned
            to 16 bytes. Must not overlap `patches`.

    Returns:
        [rows, 3 * temporal * patch**2]; `out` where it is given.

    Raises:
        ValueError: an argument that the operator does not take.
        RuntimeError: no kernel of this build runs on the tensors' device.

    Notes:
        float32 results have the bits of the reference processors' fused rescale and normalise:
        255 * mean and 255 * std rounded to float32, one subtraction, one division. bfloat16
        results are those, rounded to nearest even.
    Cost:
        Bytes: every pixel read once, every number written once.
    Source:
        The image and video processors of MiniMax-M3; docs/kernels/normalize_patches.md.
    """
    if out is None:
        return torch.ops.msa.normalize_patches(
            patches,
            list(mean),
            list(std),
            patch=patch,
            temporal=temporal,
            dtype=dtype or torch.bfloat16,
        )
    if dtype is not None and dtype != out.dtype:
        raise ValueError(
            f"msa.normalize_patches: dtype must be None or that of out, {out.dtype}, got {dtype}"
        )
    torch.ops.msa.normalize_patches.out(
        patches, list(mean), list(std), patch=patch, temporal=temporal, output=out
    )
    return out
