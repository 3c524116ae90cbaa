"""The vision tower: patches of one image or clip to the embeddings of its placeholder tokens.

Tower and projector are transformers' own modules; what is here is what surrounds them: the
checkpoint, the pixels' affine, and the cut of a clip into segments.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import msa_kernels

from .config import ModelConfig, read_json
from .weights import load_vision_weights

SEGMENT_FRAMES = 4
"""temporal patches that attend to each other; the reference processor cuts clips so"""

# Of CLIP's towers, which are the checkpoint's too.
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class VisionConfig:
    """What has to be known of a tower to check and prepare its input."""

    image_token_id: int
    video_token_id: int
    patch: int
    """side of a patch, pixels"""
    merge: int
    """patches a side that share one token"""
    temporal: int
    """frames a patch spans"""
    mean: tuple[float, ...]
    """of R, G, B in [0, 1]"""
    std: tuple[float, ...]

    @property
    def frame_width(self) -> int:
        """Numbers in a row of patches that holds one frame: channel, y, x."""
        return len(self.mean) * self.patch**2

    @property
    def row_width(self) -> int:
        """Numbers in a row of patches: channel, frame, y, x."""
        return self.temporal * self.frame_width

    @classmethod
    def from_folder(cls, folder: str | Path) -> "VisionConfig":
        """Reads config.json, and the pixel statistics of preprocessor_config.json if it is there.

        Raises:
            ValueError: no vision tower, or one of another kind; names the field.
        """
        config = read_json(Path(folder) / "config.json")
        vision = config.get("vision_config")
        if not isinstance(vision, dict):
            raise ValueError(f"config.json: vision_config must be an object, got {vision!r}")
        file = Path(folder) / "preprocessor_config.json"
        pixels = read_json(file) if file.is_file() else {}
        vocabulary = config.get("text_config", config).get("vocab_size", 0)
        result = cls(
            image_token_id=config.get("image_token_index", 200025),
            video_token_id=config.get("video_token_index", 200026),
            patch=vision.get("patch_size", 14),
            merge=vision.get("spatial_merge_size", 2),
            temporal=vision.get("temporal_patch_size", 2),
            mean=tuple(pixels.get("image_mean", _MEAN)),
            std=tuple(pixels.get("image_std", _STD)),
        )
        for name in ("image_token_id", "video_token_id"):
            _check(name, getattr(result, name), 0, vocabulary - 1)
        for name in ("patch", "merge", "temporal"):
            _check(name, getattr(result, name), 1, 1024)
        if vision.get("num_channels", 3) != 3 or len(result.mean) != 3 or len(result.std) != 3:
            raise ValueError("the vision tower must take three channels, got another number")
        return result


def _check(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"config.json: {name} must be {low} to {high}, got {value!r}")


def segments_of(grid: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """One grid row of a medium to those of its segments, each an attention sequence of its own.

    Positions in time start again at 0 in every segment.
    """
    frames, gh, gw = grid
    return [
        (min(SEGMENT_FRAMES, frames - start), gh, gw) for start in range(0, frames, SEGMENT_FRAMES)
    ]


class VisionTower:
    """Tower and projector of one checkpoint. Holds weights and no state."""

    def __init__(self, config: VisionConfig, tower: nn.Module, projector: nn.Module) -> None:
        """Takes transformers' modules with their weights; these decide dtype and device."""
        self.config, self._tower, self._projector = config, tower, projector
        weight = next(tower.parameters())
        self.dtype, self.device = weight.dtype, weight.device
        # A geometry or dtype that the operator does not take is refused here, not in a request.
        self.normalise(torch.empty(0, config.row_width, dtype=torch.uint8, device=self.device))

    @classmethod
    def from_folder(
        cls, folder: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu"
    ) -> "VisionTower":
        """Loads the vision part of a checkpoint; `dtype` None is that of its language model.

        Raises:
            ValueError: as `VisionConfig.from_folder` and `load_vision_weights`.
        """
        from transformers import MiniMaxM3VLConfig, MiniMaxM3VLVisionModel
        from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as reference

        config = VisionConfig.from_folder(folder)
        full = MiniMaxM3VLConfig.from_dict(read_json(Path(folder) / "config.json"))
        full.vision_config._attn_implementation = "sdpa"
        dtype = dtype or ModelConfig.from_folder(folder).dtype
        with torch.device("meta"):  # no time and memory for weights that are overwritten
            tower = MiniMaxM3VLVisionModel(full.vision_config)
            projector = reference.MiniMaxM3VLMultiModalProjector(full)
        modules = nn.ModuleDict({"vision_tower": tower, "multi_modal_projector": projector})
        shapes = {name: tuple(t.shape) for name, t in modules.state_dict().items()}
        weights = load_vision_weights(folder, shapes, dtype=dtype, device=device)
        modules.load_state_dict(weights, assign=True)
        # Its frequencies are no part of the checkpoint, so they are still without memory.
        tower.rotary_emb = reference.MiniMaxM3VLVisionRotaryEmbedding(full.vision_config).to(device)
        return cls(config, tower.eval(), projector.eval())

    def normalise(self, patches: Tensor) -> Tensor:
        """(x - 255 mean) / (255 std) of each channel.

        Args:
            patches: [rows, row width] uint8, on the tower's device; or [rows, frame width].

        Returns:
            [rows, row width] of the tower's dtype, worked out in float32; a frame that is alone in
            its row is repeated.
        """
        config = self.config
        return msa_kernels.normalize_patches(
            patches.contiguous(),
            config.mean,
            config.std,
            patch=config.patch,
            temporal=config.temporal,
            dtype=self.dtype,
        )

    def _repeat_frames(self, patches: Tensor) -> Tensor:
        """The same of numbers that are normalised already."""
        config = self.config
        frames = patches.to(self.dtype).unflatten(1, (len(config.mean), -1, config.patch**2))
        return frames.expand(-1, -1, config.temporal, -1).flatten(1)

    @torch.inference_mode()
    def encode(self, patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """The embeddings of one medium's placeholder tokens.

        Segment by segment, so that memory for activations does not grow with a clip's length.

        Args:
            patches: [T * gh * gw, row width], uint8 pixels or normalised numbers, any device; an
                image's may be [gh * gw, frame width].
            grid: [T, gh, gw] in patches.

        Returns:
            [T * gh * gw / merge**2, hidden] of the tower's dtype.
        """
        features, start = [], 0
        for segment in segments_of(grid):
            rows = segment[0] * segment[1] * segment[2]
            part = patches[start : start + rows].to(self.device)
            start += rows
            prepare = self.normalise if part.dtype == torch.uint8 else self._repeat_frames
            grid_row = torch.tensor([segment], device=self.device)
            hidden = self._tower(prepare(part), grid_thw=grid_row).last_hidden_state
            features.append(self._projector(hidden.squeeze(0)))
        return torch.cat(features)
