"""How the gateway tells a child process what to do.

Jobs and answers are plain JSON values beside raw bytes: nothing that comes back from a process that
parsed hostile bytes is unpickled. This file imports no decoder, so the gateway itself loads none.
"""

from dataclasses import asdict, replace
from typing import Any

from .protocols import FrameSampler, MediaLimits, Modality, PatchGeometry, SizingPolicy


def make_job(
    modality: Modality,
    geometry: PatchGeometry,
    sizing: SizingPolicy,
    sampler: FrameSampler | None,
    limits: MediaLimits,
) -> dict[str, Any]:
    """The JSON form of what is to be done with one medium; `sampler` is None for an image.

    An image's rows hold its one frame, which the worker repeats: half the bytes all the way there.
    """
    if modality == "image":
        geometry = replace(geometry, temporal=1)
    return {
        "modality": modality,
        "geometry": asdict(geometry),
        "sizing": sizing.to_dict(),
        "sampling": None if sampler is None else sampler.to_dict(),
        "limits": {
            "image_pixels": limits.image_pixels,
            "frame_pixels": limits.frame_pixels,
            "source_frames": limits.source_frames,
            "video_pixels": limits.video_pixels,
        },
    }
