"""Media made on the spot, and stand-ins, for the gateway's tests."""

import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image

from examples.m3_serving.gateway.families import MiniMaxM3Family

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())
FAMILY = MiniMaxM3Family()
GEOMETRY = FAMILY.geometry
MAX_PIXELS = FAMILY.limits.image_pixels
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def normalise(patches: np.ndarray) -> np.ndarray:
    """(x - 255 MEAN) / (255 STD) per channel, [rows, row width] uint8 to float32: rescale and
    normalise fused, as in the reference processor."""
    mean = np.asarray(MEAN, np.float32) * np.float32(255)
    std = np.asarray(STD, np.float32) * np.float32(255)
    table = (np.arange(256, dtype=np.float32)[None] - mean[:, None]) / std[:, None]
    channels = patches.reshape(len(patches), 3, -1)
    return np.stack([table[c][channels[:, c]] for c in range(3)], 1).reshape(patches.shape)


def pattern(height: int, width: int, t: int = 0) -> np.ndarray:
    """[height, width, 3] uint8: the input of the golden values."""
    y, x = np.mgrid[:height, :width]
    red = x * 255 // max(width - 1, 1) + 5 * t
    green = y * 255 // max(height - 1, 1) + 3 * t
    blue = (x // 8) ^ ((y // 8) + 17 * t)
    return (np.stack([red, green, blue], -1) % 256).astype(np.uint8)


def image_bytes(image: Image.Image | np.ndarray, kind: str = "PNG", **options) -> bytes:
    """A file of the image."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def clip_bytes(
    frames: Iterable[np.ndarray],
    rate: Fraction | int = 30,
    *,
    container: str = "matroska",
    codec: str = "ffv1",
    pix_fmt: str = "bgr0",
    pts: Sequence[int] | None = None,
    time_base: Fraction | None = None,
    rotation: int | None = None,
    matrix: Sequence[int] | None = None,
    options: dict[str, str] | None = None,
    out: Path | io.BytesIO | None = None,
) -> bytes:
    """A file of the frames. FFV1 in `bgr0` loses nothing.

    Args:
        frames: [h, w, 3] uint8 each, or [h, w, 4] with alpha.
        rate: frames a second.
        container, codec, pix_fmt: FFmpeg's names.
        pts: one a frame in `time_base`; None: one frame every 1/rate.
        time_base: seconds a tick, by default 1/rate.
        rotation: degrees, written as display matrix.
        matrix: the display matrix itself, 9 numbers.
        options: of the container.
        out: where it is written on the way, by default memory.
    """
    import av  # here, so that the tests without clips run where it is missing

    out = out or io.BytesIO()
    with av.open(out, "w", format=container, options=options) as file:
        stream = file.add_stream(codec, rate=rate)
        stream.pix_fmt = pix_fmt
        base = time_base or 1 / Fraction(rate)
        for i, pixels in enumerate(frames):
            if i == 0:
                stream.height, stream.width = pixels.shape[:2]
                stream.codec_context.time_base = base
                if rotation is not None:
                    stream.set_display_rotation(rotation)
                if matrix is not None:
                    stream.set_display_matrix(matrix)
            layout = "rgb24" if pixels.shape[2] == 3 else "rgba"
            frame = av.VideoFrame.from_ndarray(pixels, format=layout)
            frame.pts, frame.time_base = i if pts is None else pts[i], base
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return out.read_bytes() if isinstance(out, Path) else out.getvalue()


def small_limits(**changes):
    """The family's limits with some changed."""
    return replace(FAMILY.limits, **changes)


class LetterTokenizer:
    """A token a character, from 1000 on; the special strings have ids of their own."""

    def __init__(self, specials: Sequence[str]) -> None:
        self.special_tokens = {token: i for i, token in enumerate(specials)}

    def encode_plain(self, text: str) -> list[int]:
        return [1000 + ord(letter) for letter in text]

    def show(self, ids: Iterable[int]) -> str:
        """Ids as text, special tokens between double angle brackets."""
        names = {i: f"⟪{token}⟫" for token, i in self.special_tokens.items()}
        return "".join(names[i] if i in names else chr(i - 1000) for i in ids)
