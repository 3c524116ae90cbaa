"""The vision part of a checkpoint: both layouts, what is refused, and the pixels' affine."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.m3_serving.vision import VisionConfig, VisionTower

CONV = "vision_tower.vision_model.embeddings.patch_embedding.weight"
GRID = (5, 4, 6)
PATCHES = torch.randint(
    0, 256, (120, 1176), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
)


@pytest.fixture
def copy_of(media_checkpoint, tmp_path):
    def make(change_tensors=lambda tensors: None, **config):
        folder = tmp_path / "copy"
        shutil.copytree(media_checkpoint, folder)
        tensors = load_file(folder / "model.safetensors")
        tensors = change_tensors(tensors) or tensors
        save_file({key: t.contiguous() for key, t in tensors.items()}, folder / "model.safetensors")
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return folder

    return make


def test_features_are_those_of_transformers_in_both_layouts(
    media_checkpoint, media_oracle, copy_of
):
    tower = VisionTower.from_folder(media_checkpoint)
    grid_rows = torch.tensor([[4, 4, 6], [1, 4, 6]])
    with torch.inference_mode():
        wanted = media_oracle.get_image_features(tower.normalise(PATCHES), grid_rows).pooler_output
    features = tower.encode(PATCHES, GRID)
    torch.testing.assert_close(features, torch.cat(wanted), atol=1e-5, rtol=1e-4)

    own_names = {f"model.{n}": t for n, t in media_oracle.model.state_dict().items()}
    other = VisionTower.from_folder(copy_of(lambda _: own_names))
    assert torch.equal(other.encode(PATCHES, GRID), features)


def test_dtype(media_checkpoint):
    tower = VisionTower.from_folder(media_checkpoint, dtype=torch.bfloat16)
    features = tower.encode(PATCHES, GRID)
    assert features.dtype == torch.bfloat16 and features.shape == (30, 48)
    wide = VisionTower.from_folder(media_checkpoint).encode(PATCHES, GRID)
    assert float((features.float() - wide).abs().mean()) < 0.05 * float(wide.abs().mean())


def test_the_affine_is_that_of_the_golden_values(media_checkpoint):
    """Bit for bit the function that turns the gateway's rows into them."""
    pytest.importorskip("PIL")
    from tests.examples.gateway.gateway_media import normalise

    tower = VisionTower.from_folder(media_checkpoint)
    wanted = normalise(PATCHES.numpy())
    np.testing.assert_array_equal(tower.normalise(PATCHES).numpy(), wanted)
    narrow = VisionTower.from_folder(media_checkpoint, dtype=torch.bfloat16)
    assert torch.equal(narrow.normalise(PATCHES), torch.from_numpy(wanted).bfloat16())


def test_the_checkpoints_pixel_statistics_count(copy_of):
    folder = copy_of()
    (folder / "preprocessor_config.json").write_text(
        '{"image_mean": [0.5, 0.25, 0], "image_std": [0.5, 0.5, 1]}'
    )
    rows = torch.full((1, 1176), 255, dtype=torch.uint8)
    channels = VisionTower.from_folder(folder).normalise(rows).view(3, -1)
    assert channels[:, 0].tolist() == [1.0, 1.5, 1.0]


def test_pixel_statistics_that_cannot_be_are_refused_at_the_start(copy_of):
    folder = copy_of()
    (folder / "preprocessor_config.json").write_text('{"image_std": [0.5, 0, 1]}')
    with pytest.raises(ValueError, match=r"std\[1\] must be from 1e-06 to 1, got 0"):
        VisionTower.from_folder(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(CONV) is None, r"missing tensors: vision_tower.embeddings.proj.weight$"),
        (
            lambda t: t.pop("patch_merge_mlp.linear_2.bias") is None,
            r"missing tensors: multi_modal_projector.merge_linear_2.bias$",
        ),
        (
            lambda t: t.update({"vision_tower.vision_model.extra": torch.zeros(1)}),
            r"has not: vision_tower.vision_model.extra$",
        ),
        (
            lambda t: t.update({CONV: torch.zeros(32, 3, 1, 14, 14)}),
            r"patch_embedding.weight must be \[32, 3, 2, 14, 14\], got \[32, 3, 1, 14, 14\]$",
        ),
        (
            lambda t: t.update({"model.vision_tower.embeddings.proj.weight": t[CONV].clone()}),
            r"vision_tower.embeddings.proj.weight must be stored once, got .* and ",
        ),
    ],
)
def test_wrong_tensors_are_named(copy_of, change, message):
    with pytest.raises(ValueError, match=message):
        VisionTower.from_folder(copy_of(change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config": None}, r"vision_config must be an object, got None"),
        ({"image_token_index": 262}, r"image_token_id must be 0 to 261, got 262"),
        ({"video_token_index": -1}, r"video_token_id must be 0 to 261, got -1"),
        ({"video_token_index": "x"}, r"video_token_id must be 0 to 261, got 'x'"),
        ({"vision_config": {"patch_size": 0}}, r"patch must be 1 to 1024, got 0"),
        ({"vision_config": {"num_channels": 1}}, r"must take three channels"),
    ],
)
def test_wrong_fields_are_named(copy_of, change, message):
    with pytest.raises(ValueError, match=message):
        VisionConfig.from_folder(copy_of(**change))
