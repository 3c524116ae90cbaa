"""The step on the CPU, and its result copied to the device: what a kernel there is to save.

Pixels start in memory of the host and the result in pinned memory; ours starts with the pixels on
the device, a quarter or an eighth of what is copied here.
"""

from pathlib import Path

import torch

import msa_kernels as msa

from ..inputs import FRAME, PIXEL_MEAN, PIXEL_STD, Inputs
from .base import Call, CannotRun


def load(folder: Path | None) -> "Host":
    """Always there."""
    return Host()


class Host:
    """See the module."""

    name = "host"
    version = f"msa_kernels on {torch.get_num_threads()} CPU threads"

    def prepare(self, op: str, inputs: Inputs) -> Call:
        """See `Peer`."""
        if op == "normalize_patches":
            patches = inputs.patches.cpu()
        elif op == "normalize_image_patches":
            patches = inputs.image_patches.cpu()
        else:
            raise CannotRun(f"{op} is not a step that a CPU would be given")
        on_host = torch.empty(
            len(patches),
            2 * FRAME,
            dtype=inputs.dtypes.q,
            pin_memory=inputs.device.type == "cuda",
        )
        out = torch.empty_like(on_host, device=inputs.device)

        def run() -> torch.Tensor:
            msa.normalize_patches(patches, PIXEL_MEAN, PIXEL_STD, out=on_host)
            return out.copy_(on_host, non_blocking=True)

        return Call(run, note="on the CPU, and copied", on_host=True)
