"""Media: pixels of patches into numbers."""

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
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(x - 255 mean_c) / (255 std_c) of each channel c.

    patches [rows, 3 * frames * patch**2] uint8, in a row channel, frame, y, x; frames is 1 or
    `temporal` -> [rows, 3 * temporal * patch**2] in `compute_dtype`; a single frame is repeated.
    """
    rows, plane = patches.size(0), patch * patch
    frames = patches.size(1) // (3 * plane)
    pixels = patches.reshape(rows, 3, frames, plane).to(compute_dtype)
    of_channel = {"dtype": compute_dtype, "device": patches.device}
    offset, scale = (torch.tensor(x, **of_channel).view(3, 1, 1) * 255 for x in (mean, std))
    values = (pixels - offset) / scale
    return values.expand(rows, 3, temporal, plane).reshape(rows, 3 * temporal * plane)
