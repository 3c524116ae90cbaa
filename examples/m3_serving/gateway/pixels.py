"""From RGB frames to the rows that the vision tower reads.

Rows stay uint8 on their way: the worker normalises them, and they are a quarter of float32's bytes.
"""

import numpy as np
from PIL import Image

from .protocols import PatchGeometry


def resize_frame(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    """[height, width, 3] uint8 from [h, w, 3] uint8 RGB, bicubic with antialiasing.

    Pillow's fixed-point resampler on bytes, never a float one: those overshoot and round apart.
    """
    if frame.shape[:2] == (height, width):
        return frame
    image = Image.fromarray(np.ascontiguousarray(frame))
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))


class PatchWriter:
    """Cuts frames into rows as they arrive, so that a clip is never held at its source size.

    Row order: time, then merge blocks in raster order, then the patches inside a block; so
    `merge**2` consecutive rows are one token. Column order: channel, frame, y, x. A last patch
    without all its frames repeats the last one.
    """

    def __init__(self, frames: int, height: int, width: int, geometry: PatchGeometry) -> None:
        """Allocates the rows.

        Args:
            frames: how many will be put.
            height, width: pixels, multiples of the geometry's alignment.
            geometry: of the model.
        """
        if frames < 1 or height % geometry.alignment or width % geometry.alignment:
            raise ValueError(
                f"frames must be at least 1 and sides multiples of {geometry.alignment}, got "
                f"{frames}, {height} x {width}"
            )
        self._frames, self._height, self._width = frames, height, width
        self._geometry = geometry
        side, merge = geometry.patch, geometry.merge
        self.grid = (-(-frames // geometry.temporal), height // side, width // side)
        t, gh, gw = self.grid
        self._rows = np.empty(
            (t, gh // merge, gw // merge, merge, merge, 3, geometry.temporal, side, side), np.uint8
        )

    def put(self, index: int, frame: np.ndarray) -> None:
        """Resizes frame `index`, [h, w, 3] uint8 RGB of any size, and stores it."""
        pixels = resize_frame(frame, self._height, self._width)
        side, merge = self._geometry.patch, self._geometry.merge
        _, gh, gw = self.grid
        blocks = pixels.reshape(gh // merge, merge, side, gw // merge, merge, side, 3)
        blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5)
        last = index == self._frames - 1
        t, slot = divmod(index, self._geometry.temporal)
        for s in range(slot, self._geometry.temporal if last else slot + 1):
            self._rows[t, :, :, :, :, :, s] = blocks

    def finish(self) -> np.ndarray:
        """[T * gh * gw, row_width] uint8."""
        return self._rows.reshape(-1, self._geometry.row_width)
