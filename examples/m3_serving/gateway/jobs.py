"""What a child process does for one medium: bytes and policies in, patches out."""

from collections.abc import Mapping
from typing import Any

import av
import numpy as np
import PIL

from .decode_image import decode_image, probe_image
from .decode_video import decode_frames, probe_clip
from .errors import MediaTooLarge
from .pixels import PatchWriter
from .protocols import Decoder, PatchGeometry, PixelProcessor
from .sampling import sampler_from_dict
from .sizing import sizing_from_dict

PIPELINE_VERSION = 2
"""raised whenever the same bytes and policies give other patches"""


def processor_version() -> str:
    """Everything outside the request that decides the pixels."""
    codec = ".".join(map(str, av.library_versions["libavcodec"]))
    scale = ".".join(map(str, av.library_versions["libswscale"]))
    return f"{PIPELINE_VERSION};pillow={PIL.__version__};avcodec={codec};swscale={scale}"


def _answer(
    writer: PixelProcessor, indices: list[int], times: list[float]
) -> tuple[dict[str, Any], np.ndarray]:
    meta = {
        "grid": list(writer.grid),
        "indices": indices,
        "timestamps": times,
        "processor": processor_version(),
    }
    return meta, writer.finish()


def _run_image(data: bytes, job: Mapping[str, Any]) -> tuple[dict[str, Any], np.ndarray]:
    max_pixels = job["limits"]["image_pixels"]
    sizing = sizing_from_dict(job["sizing"])
    header = probe_image(data, max_pixels)
    sizing.size(header.height, header.width)  # refuse a shape before decoding it
    pixels = decode_image(data, max_pixels)
    height, width = sizing.size(*pixels.shape[:2])
    writer = PatchWriter(1, height, width, PatchGeometry(**job["geometry"]))
    writer.put(0, pixels)
    return _answer(writer, [0], [0.0])


def _run_clip(data: bytes, job: Mapping[str, Any]) -> tuple[dict[str, Any], np.ndarray]:
    limits = job["limits"]
    probe = probe_clip(data, limits["frame_pixels"], limits["source_frames"])
    indices = sampler_from_dict(job["sampling"]).choose(probe.times)
    height, width = sizing_from_dict(job["sizing"]).size(probe.height, probe.width)
    pixels = len(indices) * height * width
    if pixels > limits["video_pixels"]:
        raise MediaTooLarge(
            f"{len(indices)} frames of {width} x {height} are {pixels} pixels, a clip may have "
            f"{limits['video_pixels']}; ask for a lower fps or a smaller max_long_side_pixel"
        )
    writer = PatchWriter(len(indices), height, width, PatchGeometry(**job["geometry"]))
    for i, frame in enumerate(decode_frames(data, probe, indices, limits["frame_pixels"])):
        writer.put(i, frame)
    return _answer(writer, indices, [probe.times[index] for index in indices])


_DECODERS: dict[str, Decoder] = {"image": _run_image, "video": _run_clip}


def run_job(data: bytes, job: Mapping[str, Any]) -> tuple[dict[str, Any], np.ndarray]:
    """Does a job.

    Returns:
        ({"grid", "indices", "timestamps", "processor"}, patches [rows, row_width] uint8).

    Raises:
        GatewayError: the medium is refused.
    """
    return _DECODERS[job["modality"]](data, job)
