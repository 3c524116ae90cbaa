"""Patches against the golden values and against a plain statement of their layout."""

import hashlib

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

pytest.importorskip("PIL")

from gateway_media import FAMILY, GEOMETRY, GOLDEN, MEAN, STD, normalise, pattern

from examples.m3_serving.gateway.pixels import PatchWriter, resize_frame
from examples.m3_serving.gateway.protocols import MediaOptions

LEVEL = 1 / (255 * 0.26)
"""one step of a byte, after normalising"""

RESAMPLERS_DIFFER = 0.011
"""share of samples in which the golden floats' resampler is a level off Pillow's, at most"""


def sha(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def rows_of(frames: list[np.ndarray], size: tuple[int, int]) -> tuple[np.ndarray, tuple]:
    writer = PatchWriter(len(frames), *size, GEOMETRY)
    for i, frame in enumerate(frames):
        writer.put(i, frame)
    return writer.finish(), writer.grid


@pytest.mark.parametrize(
    "case", GOLDEN["images"], ids=lambda case: "x".join(map(str, case["src_hw"]))
)
def test_golden_images(case):
    source = pattern(*case["src_hw"])
    size = FAMILY.sizing("image", MediaOptions()).size(*source.shape[:2])
    assert list(size) == case["resized_hw"]
    resized = resize_frame(source, *size)
    assert sha(resized.transpose(2, 0, 1)) == case["sha_u8_pil"]
    patches, grid = rows_of([source], size)
    assert list(grid) == case["grid_thw"] and list(patches.shape) == case["patches"]
    assert len(patches) // 4 == case["tokens"]
    values = normalise(patches)
    if case["sha_u8"] == case["sha_u8_pil"]:
        # The golden floats come from a resampler that here gave the same bytes: equal to the bit.
        assert sha(values) == case["sha_f32"]
    else:
        assert (
            abs(values.sum(dtype=np.float64) - case["sum"])
            < RESAMPLERS_DIFFER * values.size * LEVEL
        )
    np.testing.assert_allclose(values.ravel()[:4], case["head"], atol=1.1 * LEVEL)


@pytest.mark.parametrize("case", GOLDEN["videos"], ids=lambda case: case["name"])
def test_golden_clips(case):
    times = [i / case["src_fps"] for i in range(case["frames"])]
    indices = FAMILY.sampler(MediaOptions(fps=case["fps"])).choose(times)
    assert indices == case["indices"]
    size = FAMILY.sizing("video", MediaOptions()).size(*case["src_hw"])
    assert list(size) == case["resized_hw"]
    frames = [pattern(*case["src_hw"], index) for index in indices]
    patches, grid = rows_of(frames, size)
    assert list(grid) == case["grid_thw"] and list(patches.shape) == case["patches"]
    assert len(patches) // 4 == case["pad_tokens"]
    values = normalise(patches)
    resized = np.stack([resize_frame(frame, *size) for frame in frames]).transpose(0, 3, 1, 2)
    if sha(resized) == case["sha_u8"]:
        assert sha(values) == case["sha_f32"]
    else:
        assert case["name"] != "D"  # nothing to resize
        assert (
            abs(values.sum(dtype=np.float64) - case["sum"])
            < RESAMPLERS_DIFFER * values.size * LEVEL
        )
    np.testing.assert_allclose(values.ravel()[:4], case["head"], atol=1.1 * LEVEL)
    np.testing.assert_allclose(values.ravel()[-4:], case["tail"], atol=1.1 * LEVEL)


@pytest.mark.parametrize(
    "case", GOLDEN["images"], ids=lambda case: "x".join(map(str, case["src_hw"]))
)
def test_images_are_those_of_transformers_own_processor(case):
    """Its PIL one: in every golden case, also where the golden floats' resampler rounds apart."""
    pytest.importorskip("transformers")
    from examples.m3_serving.demo_media import patches_of

    source = pattern(*case["src_hw"])
    patches, grid = rows_of([source], case["resized_hw"])
    expected, expected_grid = patches_of(source)
    assert list(grid) == expected_grid
    np.testing.assert_allclose(normalise(patches), expected.numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", "ACDF")
def test_clips_are_those_of_transformers_own_processor(name):
    """Those whose frames have the same size under the bounds of images."""
    pytest.importorskip("transformers")
    from examples.m3_serving.demo_media import clip_patches_of

    case = next(case for case in GOLDEN["videos"] if case["name"] == name)
    frames = [pattern(*case["src_hw"], index) for index in case["indices"]]
    patches, grid = rows_of(frames, case["resized_hw"])
    expected, expected_grid = clip_patches_of(np.stack(frames))
    assert list(grid) == expected_grid
    np.testing.assert_allclose(normalise(patches), expected.numpy(), rtol=0, atol=1e-6)


@settings(deadline=None, max_examples=25)
@given(
    frames=st.integers(1, 5),
    blocks=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_and_columns_are_where_the_layout_says(frames, blocks, seed):
    height, width = 28 * blocks[0], 28 * blocks[1]
    clip = np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), np.uint8)
    patches, (t, gh, gw) = rows_of(list(clip), (height, width))
    assert t == (frames + 1) // 2
    rows = patches.reshape(t, gh // 2, gw // 2, 2, 2, 3, 2, 14, 14)
    rng = np.random.default_rng(seed)
    for _ in range(50):
        f, y, x, c = (int(rng.integers(n)) for n in (2 * t, height, width, 3))
        inside = rows[f // 2, y // 28, x // 28, y // 14 % 2, x // 14 % 2, c, f % 2, y % 14, x % 14]
        assert inside == clip[min(f, frames - 1), y, x, c]


def test_normalise_is_the_affine_per_channel():
    patches = np.random.default_rng(1).integers(0, 256, (7, GEOMETRY.row_width), np.uint8)
    mean, std = np.repeat(MEAN, 392), np.repeat(STD, 392)
    expected = (patches / 255 - mean) / std
    got = normalise(patches)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("size", [(60, 56), (56, 60), (14, 28)])
def test_sizes_off_the_alignment_are_refused(size):
    with pytest.raises(ValueError, match="multiples of 28"):
        PatchWriter(1, *size, GEOMETRY)
