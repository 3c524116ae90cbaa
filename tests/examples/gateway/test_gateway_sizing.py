"""Sizes: the table of the rules, rounding, and what is refused."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from examples.m3_serving.gateway.errors import InvalidMedia, InvalidParameter
from examples.m3_serving.gateway.families import MiniMaxM3Family, Qwen2VLFamily
from examples.m3_serving.gateway.protocols import MediaOptions
from examples.m3_serving.gateway.sizing import AreaSizing, LongSideSizing, sizing_from_dict

AREA = AreaSizing(28, 3136, 451_584)
LONG = LongSideSizing(28, 2016, 3584**2)
LONG_CAPPED = LongSideSizing(28, 2016, 3584**2, cap_growth=True)

# source height, width; area; long side; long side with growth capped
TABLE = [
    ((672, 672), (672, 672), (672, 672), (672, 672)),
    ((480, 640), (476, 644), (476, 644), (476, 644)),
    ((1080, 1920), (504, 896), (1092, 1932), (1092, 1932)),
    ((3000, 4000), (560, 756), (1512, 2016), (1512, 2016)),
    ((1, 1), (56, 56), (112, 112), (112, 112)),
    ((20, 30), (56, 84), (112, 168), (112, 168)),
    ((42, 70), (56, 56), (112, 196), (112, 196)),
    ((400, 40), (392, 28), (1120, 112), (1120, 112)),
    ((10, 1000), (28, 560), (112, 11200), (28, 2016)),
    ((13, 2600), (28, 812), (28, 2016), (28, 2016)),
    ((100, 20000), (28, 9492), (28, 2016), (28, 2016)),
    ((3584, 3584), (672, 672), (2016, 2016), (2016, 2016)),
]


@pytest.mark.parametrize(("source", "area", "long", "capped"), TABLE)
def test_table_of_rules(source, area, long, capped):
    assert AREA.size(*source) == area
    assert LONG.size(*source) == long
    assert LONG_CAPPED.size(*source) == capped


@pytest.mark.parametrize(("side", "rounded"), [(14 * 28, 392), (406, 392), (434, 448), (70, 56)])
def test_halves_round_to_the_even_multiple(side, rounded):
    assert AREA.size(side, 448)[0] == rounded
    assert LONG.size(max(side, 112), 448)[0] == max(rounded, 112)


@pytest.mark.parametrize("policy", [AREA, LONG, LONG_CAPPED])
@settings(deadline=None)
@given(height=st.integers(1, 9000), width=st.integers(1, 9000))
def test_every_size_is_refused_or_aligned_and_bounded(policy, height, width):
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(InvalidMedia, match="200 times"):
            policy.size(height, width)
        return
    try:
        new_height, new_width = policy.size(height, width)
    except InvalidMedia:
        assert policy is LONG  # growth without a cap can pass the area
        return
    assert new_height >= 28 and new_width >= 28
    assert new_height % 28 == 0 and new_width % 28 == 0
    if policy is AREA:
        assert new_height * new_width >= 3136
        assert new_height * new_width <= max(451_584, 28 * max(new_height, new_width))
    if policy is LONG_CAPPED:
        assert max(new_height, new_width) <= 2016


@pytest.mark.parametrize("policy", [AREA, LONG])
@pytest.mark.parametrize(
    ("shape", "ratio"), [((1, 201), "201"), ((401, 2), "200.5"), ((0, 5), None), ((5, 0), None)]
)
def test_thin_and_empty_shapes_are_refused_with_their_numbers(policy, shape, ratio):
    with pytest.raises(InvalidMedia, match=f"got {ratio}" if ratio else "at least one pixel"):
        policy.size(*shape)


def test_ratio_of_exactly_200_passes():
    assert AREA.size(10, 2000)
    assert AREA.size(400, 2)


def test_long_side_refuses_an_area_that_the_model_cannot_take():
    with pytest.raises(InvalidMedia, match="more than"):
        LongSideSizing(28, 3584, 1_000_000).size(3584, 3584)


@pytest.mark.parametrize("policy", [AREA, LONG, LONG_CAPPED])
def test_policies_survive_the_way_to_a_child(policy):
    assert sizing_from_dict(policy.to_dict()) == policy


@pytest.mark.parametrize(
    "value", [True, 1008.0, "1008", 0, -28, 84, 100, 1007, 2030, 3612, 10**30, [1008]]
)
def test_bad_long_sides_are_the_requests_fault(value):
    with pytest.raises(InvalidParameter) as caught:
        MiniMaxM3Family().sizing("image", MediaOptions(max_long_side_pixel=value))
    assert caught.value.status == 400 and caught.value.param == "max_long_side_pixel"


@pytest.mark.parametrize("value", ["LOW", "", "medium", 1, True, ["low"], {"low": 1}])
def test_bad_details_are_the_requests_fault(value):
    for family in (MiniMaxM3Family(), Qwen2VLFamily()):
        with pytest.raises(InvalidParameter) as caught:
            family.sizing("video", MediaOptions(detail=value))
        assert caught.value.param == "detail"


def test_request_options_choose_the_policy():
    family = MiniMaxM3Family()
    assert family.sizing("image", MediaOptions()) == AREA
    assert family.sizing("image", MediaOptions(detail="auto")) == AREA
    assert family.sizing("video", MediaOptions()) == AreaSizing(28, 3136, 602_112)
    assert family.sizing("image", MediaOptions(max_long_side_pixel=252)).long_side == 252
    both = MediaOptions(detail="high", max_long_side_pixel=504)
    assert family.sizing("video", both).long_side == 504
    with pytest.raises(InvalidParameter):
        Qwen2VLFamily().sizing("image", MediaOptions(max_long_side_pixel=252))


def test_tiers_of_a_clip_cost_strictly_more_each():
    family = MiniMaxM3Family(default_sizing="long_side")
    areas = []
    for detail in ("low", "default", "high"):
        height, width = family.sizing("video", MediaOptions(detail=detail)).size(1080, 1920)
        areas.append(height * width)
    assert areas == sorted(set(areas))
