"""Which frames of a clip are looked at, decided on real presentation times.

A rule on frame numbers and an average rate is right for constant-rate clips alone: a screen
recording that stands still for ten seconds has one frame there, and the model would neither see it
nor get the right time stamps. For a constant rate both give the same indices.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, ClassVar

from .errors import InvalidMedia, InvalidParameter

MIN_FPS, MAX_FPS = 0.2, 5.0
TIME_SLACK_S = 1e-4
"""a frame this much early still counts as one interval after the last"""


def check_fps(fps: Any) -> float:
    """The wanted frames a second as a float; InvalidParameter unless a number in [0.2, 5]."""
    if isinstance(fps, bool) or not isinstance(fps, int | float):
        raise InvalidParameter(f"fps must be a number, got {type(fps).__name__}", param="fps")
    if not MIN_FPS <= fps <= MAX_FPS:  # NaN fails too
        raise InvalidParameter(
            f"fps must be at least {MIN_FPS} and at most {MAX_FPS:g}, got {fps}", param="fps"
        )
    return float(fps)


@dataclass(frozen=True)
class SpacedSampler:
    """The first frame, then always the next that is at least 1/fps after the last one kept."""

    name: ClassVar[str] = "spaced"

    fps: float
    """frames a second"""
    keep_last: bool = False
    """whether the clip's last frame is kept whatever its distance"""

    def __post_init__(self) -> None:
        """InvalidParameter for fps out of range."""
        check_fps(self.fps)

    def choose(self, times: Sequence[float]) -> list[int]:
        """Indices of the frames kept, ascending, none twice.

        Args:
            times: presentation times in seconds, finite and ascending (equal ones allowed).

        Raises:
            InvalidMedia: no frame, or times that are neither.
        """
        if not times:
            raise InvalidMedia("the clip has no frame")
        if not all(map(math.isfinite, times)) or any(a > b for a, b in pairwise(times)):
            raise InvalidMedia("the clip's presentation times must be finite and ascending")
        kept = [0]
        while True:
            wanted = times[kept[-1]] + 1 / self.fps - TIME_SLACK_S
            index = bisect_left(times, wanted, kept[-1] + 1)
            if index == len(times):
                break
            kept.append(index)
        last = len(times) - 1
        if self.keep_last and times[last] > times[kept[-1]] + TIME_SLACK_S:
            kept.append(last)
        return kept

    def to_dict(self) -> dict[str, Any]:
        """Name and numbers, JSON-ready."""
        return {"name": self.name, **asdict(self)}


SAMPLERS = {SpacedSampler.name: SpacedSampler}


def sampler_from_dict(values: dict[str, Any]) -> SpacedSampler:
    """The sampler that `to_dict` described."""
    numbers = dict(values)
    return SAMPLERS[numbers.pop("name")](**numbers)


def times_from_ticks(
    ticks: Sequence[int], time_base: Fraction, rate: Fraction | None
) -> tuple[float, ...]:
    """Seconds after the first frame.

    A container with coarse ticks (1 ms in Matroska) rounds every time, so that a frame at 1/3 s
    says 0.333 and looks 0.3 ms too early, more than the sampler's slack. Where all times agree with
    the stated rate to one tick the clip has that constant rate, and the exact times are used.

    Args:
        ticks: ascending.
        time_base: seconds a tick.
        rate: frames a second that the container states, None if it does not.
    """
    offsets = [tick - ticks[0] for tick in ticks]
    if rate:
        ticks_a_frame = 1 / (rate * time_base)
        if all(abs(offset - i * ticks_a_frame) <= 1 for i, offset in enumerate(offsets)):
            return tuple(float(i / rate) for i in range(len(offsets)))
    return tuple(float(offset * time_base) for offset in offsets)
