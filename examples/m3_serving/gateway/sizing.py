"""Named rules from a source size to the size the model sees, both sides multiples of `alignment`.

The rules disagree by up to 80 times in tokens for the same image, so which one was used is part of
a medium's content key.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from .errors import InvalidMedia, InvalidParameter
from .protocols import MediaOptions


def check_shape(height: int, width: int, max_ratio: float) -> None:
    """Raises InvalidMedia for an empty or too elongated frame; the ratio itself is allowed."""
    if height < 1 or width < 1:
        raise InvalidMedia(f"a frame must have at least one pixel, got {width} x {height}")
    ratio = max(height, width) / min(height, width)
    if ratio > max_ratio:
        raise InvalidMedia(
            f"the long side must be at most {max_ratio:g} times the short side, got {ratio:.6g} "
            f"({width} x {height})"
        )


@dataclass(frozen=True)
class AreaSizing:
    """Keeps the area within bounds; both sides rounded to the alignment, half to even.

    A side of at most half the alignment rounds to 0, the area is then 0 and the lower bound
    decides, which shrinks the long side of a thin image. The reference does so, hence this does.
    """

    name: ClassVar[str] = "area"

    alignment: int
    """pixels"""
    min_area: int
    """pixels squared"""
    max_area: int
    """pixels squared"""
    max_ratio: float = 200.0

    def size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) in pixels; InvalidMedia if refused."""
        check_shape(height, width, self.max_ratio)
        step = self.alignment
        new_height = round(height / step) * step
        new_width = round(width / step) * step
        if new_height * new_width > self.max_area:
            shrink = math.sqrt((height * width) / self.max_area)
            new_height = max(step, math.floor(height / shrink / step) * step)
            new_width = max(step, math.floor(width / shrink / step) * step)
        elif new_height * new_width < self.min_area:
            grow = math.sqrt(self.min_area / (height * width))
            new_height = math.ceil(height * grow / step) * step
            new_width = math.ceil(width * grow / step) * step
        return new_height, new_width

    def to_dict(self) -> dict[str, Any]:
        """Name and numbers, JSON-ready."""
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True)
class LongSideSizing:
    """Caps the long side; else lifts a short side below `min_short_side` up to it."""

    name: ClassVar[str] = "long_side"

    alignment: int
    """pixels"""
    long_side: int
    """pixels"""
    max_area: int
    """pixels squared after resizing; above it the medium is refused"""
    min_short_side: int = 112
    """pixels"""
    cap_growth: bool = False
    """whether lifting the short side stops where the long side reaches `long_side`"""
    max_ratio: float = 200.0

    def size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) in pixels; InvalidMedia if refused."""
        check_shape(height, width, self.max_ratio)
        long, short = max(height, width), min(height, width)
        scale = 1.0
        if long > self.long_side:
            scale = self.long_side / long
        elif short < self.min_short_side:
            scale = self.min_short_side / short
            if self.cap_growth:
                scale = min(scale, self.long_side / long)
        step = self.alignment
        new_height = max(step, round(height * scale / step) * step)
        new_width = max(step, round(width * scale / step) * step)
        if new_height * new_width > self.max_area:
            raise InvalidMedia(
                f"{width} x {height} becomes {new_width} x {new_height} pixels, more than "
                f"{self.max_area}"
            )
        return new_height, new_width

    def to_dict(self) -> dict[str, Any]:
        """Name and numbers, JSON-ready."""
        return {"name": self.name, **asdict(self)}


SIZING_POLICIES = {policy.name: policy for policy in (AreaSizing, LongSideSizing)}


def sizing_from_dict(values: dict[str, Any]) -> AreaSizing | LongSideSizing:
    """The policy that `to_dict` described."""
    numbers = dict(values)
    return SIZING_POLICIES[numbers.pop("name")](**numbers)


def wanted_long_side(
    options: MediaOptions, tiers: Mapping[str, int | None], alignment: int, bounds: tuple[int, int]
) -> int | None:
    """The long side a request asks for, in pixels; None if it leaves that to the family.

    Args:
        options: of the medium; `max_long_side_pixel` counts more than `detail`.
        tiers: from `detail` to a long side.
        alignment: pixels, of which the long side is a multiple.
        bounds: smallest and largest long side, pixels.

    Raises:
        InvalidParameter: of the wrong type or out of range.
    """
    detail, side = options.detail, options.max_long_side_pixel
    if detail is not None and (not isinstance(detail, str) or detail not in tiers):
        raise InvalidParameter(
            f"detail must be one of {', '.join(tiers)}, got {detail!r}", param="detail"
        )
    if side is None:
        return None if detail is None else tiers[detail]
    if isinstance(side, bool) or not isinstance(side, int):
        raise InvalidParameter(
            f"max_long_side_pixel must be an integer, got {type(side).__name__}",
            param="max_long_side_pixel",
        )
    low, high = bounds
    if not low <= side <= high or side % alignment:
        raise InvalidParameter(
            f"max_long_side_pixel must be a multiple of {alignment} from {low} to {high}, "
            f"got {side}",
            param="max_long_side_pixel",
        )
    return side
