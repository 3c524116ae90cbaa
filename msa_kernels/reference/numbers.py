"""Stored numbers to computing numbers, and back."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def take(cache: Tensor, pages: Tensor) -> Tensor:
    """cache[pages]; FP8 goes by its bytes, since not every device indexes FP8 tensors."""
    if cache.dtype == FP8:
        return cache.view(torch.uint8)[pages].view(FP8)
    return cache[pages]


def scale_of_head(scale: float | Tensor | None, head: int) -> float:
    """One number, one tensor element, or one element a KV head; None means 1."""
    if scale is None:
        return 1.0
    if not isinstance(scale, Tensor):
        return float(scale)
    return float(scale.reshape(-1)[head if scale.numel() > 1 else 0])
