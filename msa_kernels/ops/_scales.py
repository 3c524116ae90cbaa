"""FP8 scales as callers write them (a number or a tensor) to what the operators take (a tensor)."""

import torch

Scale = float | torch.Tensor | None


def as_scale(scale: Scale) -> torch.Tensor | None:
    """A number as a one-element CPU tensor, which the operator reads on the host.

    The device is named: an engine's default device may be a GPU, and a copy there would synchronise
    and could not be captured.
    """
    if scale is None or isinstance(scale, torch.Tensor):
        return scale
    return torch.tensor([scale], dtype=torch.float32, device="cpu")
