"""Qwen2-VL: other bounds, other brackets, no time stamps; nothing outside this file knows it."""

from ..errors import InvalidParameter
from ..protocols import (
    FrameSampler,
    MediaOptions,
    MediaPiece,
    Modality,
    Pads,
    PreparedItem,
    SizingPolicy,
    Special,
)
from ..sampling import SpacedSampler, check_fps
from ..sizing import AreaSizing
from .shared import PATCHES_14, server_limits

IMAGE = "<|image_pad|>"
VIDEO = "<|video_pad|>"
START = "<|vision_start|>"
END = "<|vision_end|>"

DEFAULT_FPS = 2.0

# (smallest, largest) area in pixels: the defaults of transformers 5.24's processors.
AREAS = {"image": (56 * 56, 1280 * 28 * 28), "video": (128 * 28 * 28, 768 * 28 * 28)}

CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- elif message.content -%}
        {%- for part in message.content -%}
            {{- part.text if part.type == 'text' else '<|' ~ part.type ~ '_pad|>' -}}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


class Qwen2VLFamily:
    """The family of `qwen2_vl` checkpoints."""

    model_type = "qwen2_vl"
    geometry = PATCHES_14
    limits = server_limits(max_images=64, max_videos=8)
    placeholder_tokens = (IMAGE, VIDEO)
    bracket_tokens = (START, END)
    chat_template = CHAT_TEMPLATE

    def sizing(self, modality: Modality, options: MediaOptions) -> SizingPolicy:
        """The area rule; a request cannot choose another."""
        if options.max_long_side_pixel is not None:
            raise InvalidParameter(
                f"{self.model_type} has no max_long_side_pixel", param="max_long_side_pixel"
            )
        if options.detail not in (None, "auto"):
            raise InvalidParameter(
                f"detail must be auto for {self.model_type}, got {options.detail!r}", param="detail"
            )
        return AreaSizing(self.geometry.alignment, *AREAS[modality])

    def sampler(self, options: MediaOptions) -> FrameSampler:
        """The `spaced` rule, which is not the reference's; it only counts frames."""
        return SpacedSampler(DEFAULT_FPS if options.fps is None else check_fps(options.fps))

    def pieces(self, item: PreparedItem) -> list[MediaPiece]:
        """One bracketed block, of an image or of all frames of a clip."""
        pad = IMAGE if item.modality == "image" else VIDEO
        return [Special(START), Pads(pad, item.tokens), Special(END)]
