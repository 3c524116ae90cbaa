"""Frame choice: the table of constant rates, and what holds for any presentation times."""

import math
from fractions import Fraction
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from examples.m3_serving.gateway.errors import InvalidMedia, InvalidParameter
from examples.m3_serving.gateway.families import MiniMaxM3Family, Qwen2VLFamily
from examples.m3_serving.gateway.protocols import MediaOptions
from examples.m3_serving.gateway.sampling import (
    SpacedSampler,
    check_fps,
    sampler_from_dict,
    times_from_ticks,
)

# frames, source rate, wanted fps; indices; how many with the last frame kept
TABLE = [
    (300, Fraction(30), 1, list(range(0, 271, 30)), 11),
    (299, Fraction(2997, 100), 1, list(range(0, 271, 30)), 11),
    (31, Fraction(30), 1, [0, 30], 2),
    (15, Fraction(30), 1, [0], 2),
    (240, Fraction(24), 5, list(range(0, 236, 5)), 49),
    (100, Fraction(24000, 1001), 2, list(range(0, 97, 12)), 10),
    (125, Fraction(25), 2, list(range(0, 118, 13)), 11),
    (10, Fraction(10), 0.2, [0], 2),
]


def constant(frames: int, rate: Fraction) -> list[float]:
    return [float(i / rate) for i in range(frames)]


@pytest.mark.parametrize(("frames", "rate", "fps", "indices", "with_last"), TABLE)
def test_table_of_constant_rates(frames, rate, fps, indices, with_last):
    times = constant(frames, rate)
    assert SpacedSampler(fps).choose(times) == indices
    kept = SpacedSampler(fps, keep_last=True).choose(times)
    assert len(kept) == with_last
    assert kept == (indices if indices[-1] == frames - 1 else [*indices, frames - 1])


@settings(deadline=None)
@given(
    frames=st.integers(1, 400),
    rate=st.sampled_from([10, 15, 23.976, 24, 25, 29.97, 30, 50, 59.94, 60]),
    fps=st.sampled_from([0.2, 0.5, 1, 2, 3, 4.5, 5]),
)
def test_constant_rate_is_the_rule_on_frame_numbers(frames, rate, fps):
    expected, index = [], 0
    while index < frames:
        expected.append(index)
        index = max(math.ceil((index / rate + 1 / fps - 1e-4) * rate), index + 1)
    assert SpacedSampler(fps).choose([i / rate for i in range(frames)]) == expected


times_strategy = st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=80).map(sorted)


@settings(deadline=None)
@given(times=times_strategy, fps=st.floats(0.2, 5), keep_last=st.booleans())
def test_any_times_give_spaced_frames_and_none_is_missed(times, fps, keep_last):
    kept = SpacedSampler(fps, keep_last).choose(times)
    assert kept[0] == 0 and kept == sorted(set(kept)) and kept[-1] < len(times)
    if keep_last:
        assert times[kept[-1]] >= times[-1] - 1e-4
    spaced = kept[:-1] if keep_last and kept[-1] == len(times) - 1 else kept
    gap = 1 / fps - 1e-4
    for a, b in pairwise(spaced):
        assert times[b] >= times[a] + gap
        assert all(times[i] < times[a] + gap for i in range(a + 1, b))


def test_variable_rate_sees_what_stands_still():
    """30 frames in the first second, then one a second: a rule on frame numbers sees two."""
    times = [i / 30 for i in range(30)] + [1.0 + i for i in range(10)]
    assert SpacedSampler(1.0).choose(times) == [0, *range(30, 40)]


def test_faster_than_the_source_takes_every_frame_once():
    assert SpacedSampler(5).choose([0.0, 1.0, 2.0]) == [0, 1, 2]


@pytest.mark.parametrize("times", [[], [0.0, math.nan], [0.0, math.inf], [1.0, 0.5]])
def test_broken_times_are_invalid_media(times):
    with pytest.raises(InvalidMedia):
        SpacedSampler(1).choose(times)


@pytest.mark.parametrize(
    "fps",
    [0, -1, 0.19, 5.01, 100, 10**400, math.nan, math.inf, -math.inf, True, "1", None, [1], {}],
)
def test_bad_fps_is_the_requests_fault(fps):
    with pytest.raises(InvalidParameter) as caught:
        check_fps(fps)
    assert caught.value.status == 400 and caught.value.param == "fps"
    if fps is not None:
        for family in (MiniMaxM3Family(), Qwen2VLFamily()):
            with pytest.raises(InvalidParameter):
                family.sampler(MediaOptions(fps=fps))


@pytest.mark.parametrize("fps", [0.2, 5, 1, 2.5])
def test_good_fps_reaches_the_sampler(fps):
    assert MiniMaxM3Family().sampler(MediaOptions(fps=fps)).fps == fps


def test_samplers_survive_the_way_to_a_child():
    sampler = SpacedSampler(2.5, keep_last=True)
    assert sampler_from_dict(sampler.to_dict()) == sampler


@settings(deadline=None)
@given(
    rate=st.sampled_from([Fraction(30), Fraction(30000, 1001), Fraction(24), Fraction(60)]),
    fps=st.sampled_from([1, 2, 3, 5]),
    start=st.integers(-500, 5000),
)
def test_times_rounded_to_milliseconds_choose_the_same_frames(rate, fps, start):
    """1/3 s is written as 333 ms, 0.3 ms before it is due."""
    ticks = [start + round(1000 * i / rate) for i in range(200)]
    times = times_from_ticks(ticks, Fraction(1, 1000), rate)
    assert times == tuple(constant(200, rate))
    assert SpacedSampler(fps).choose(times) == SpacedSampler(fps).choose(constant(200, rate))


def test_a_stated_rate_that_does_not_fit_is_not_believed():
    ticks = [0, 33, 67, 1000, 2000]
    expected = (0.0, 0.033, 0.067, 1.0, 2.0)
    assert times_from_ticks(ticks, Fraction(1, 1000), Fraction(30)) == expected
    assert times_from_ticks(ticks, Fraction(1, 1000), None) == expected
