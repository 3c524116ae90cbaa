"""MiniMax-M3: numbers and brackets as in transformers 5.24's `minimax_m3_vl` processors."""

from typing import Literal

from ..protocols import (
    FrameSampler,
    MediaOptions,
    MediaPiece,
    Modality,
    Pads,
    PreparedItem,
    SizingPolicy,
    Special,
    Stamp,
)
from ..sampling import SpacedSampler, check_fps
from ..sizing import AreaSizing, LongSideSizing, wanted_long_side
from .shared import PATCHES_14, server_limits

IMAGE = "]<]image[>["
VIDEO = "]<]video[>["
START = "]<]start of image[>["
END = "]<]end of image[>["

MIN_AREA = 4 * 28 * 28
MAX_IMAGE_AREA = 672 * 672
MAX_FRAME_AREA = 768 * 28 * 28
MAX_LONG_SIDE_AREA = 3584 * 3584

DEFAULT_LONG_SIDE = {"image": 2016, "video": 1008}
"""pixels, of the `long_side` policy"""
TIERS = {"low": 504, "high": 2016}
"""`detail` other than the default to a long side in pixels"""
LONG_SIDE_BOUNDS = (112, 3584)


CHAT_TEMPLATE = """\
{{- ']~!b[' -}}
{%- for message in messages -%}
    {{- ']~b]' ~ ('ai' if message.role == 'assistant' else message.role) ~ '\\n' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- elif message.content -%}
        {%- for part in message.content -%}
            {%- if part.type == 'image' -%}
                {{- ']<]image[>[' -}}
            {%- elif part.type == 'video' -%}
                {{- ']<]video[>[' -}}
            {%- else -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '[e~[\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- ']~b]ai\\n' -}}
{%- endif -%}
"""
"""Turns between the vocabulary's own marks; no default system text, no reasoning."""


class MiniMaxM3Family:
    """The family of `minimax_m3_vl` checkpoints."""

    model_type = "minimax_m3_vl"
    geometry = PATCHES_14
    limits = server_limits(max_images=200, max_videos=20)
    placeholder_tokens = (IMAGE, VIDEO)
    bracket_tokens = (START, END)
    chat_template = CHAT_TEMPLATE

    def __init__(
        self,
        *,
        default_sizing: Literal["area", "long_side"] = "area",
        default_fps: float = 1.0,
        keep_last: bool = False,
    ) -> None:
        """What requests get that do not say.

        Args:
            default_sizing: `area` gives the reference processor's tensors, `long_side` those of the
                vendor's service.
            default_fps: frames a second of a clip.
            keep_last: whether a clip's last frame is always kept. The known implementations differ
                in this.
        """
        if default_sizing not in ("area", "long_side"):
            raise ValueError(f"default_sizing must be area or long_side, got {default_sizing!r}")
        self._default_sizing = default_sizing
        self._default_fps = check_fps(default_fps)
        self._keep_last = keep_last

    def sizing(self, modality: Modality, options: MediaOptions) -> SizingPolicy:
        """`long_side` where the request names a side or a tier, else the default policy."""
        alignment = self.geometry.alignment
        tiers = {"auto": None, "default": None, **TIERS}
        side = wanted_long_side(options, tiers, alignment, LONG_SIDE_BOUNDS)
        if side is None and self._default_sizing == "area":
            max_area = MAX_IMAGE_AREA if modality == "image" else MAX_FRAME_AREA
            return AreaSizing(alignment, MIN_AREA, max_area)
        return LongSideSizing(alignment, side or DEFAULT_LONG_SIDE[modality], MAX_LONG_SIDE_AREA)

    def sampler(self, options: MediaOptions) -> FrameSampler:
        """The `spaced` rule at the request's fps."""
        fps = self._default_fps if options.fps is None else check_fps(options.fps)
        return SpacedSampler(fps, self._keep_last)

    def pieces(self, item: PreparedItem) -> list[MediaPiece]:
        """Image: one bracketed block. Clip: per temporal patch its time and a bracketed block.

        Clips stand in image brackets too; the vocabulary has brackets for video that the reference
        never writes.
        """
        frames, gh, gw = item.grid
        block = gh * gw // self.geometry.merge**2
        if item.modality == "image":
            return [Special(START), Pads(IMAGE, block), Special(END)]
        pieces: list[MediaPiece] = []
        for frame in range(frames):
            seconds = item.timestamps[frame * self.geometry.temporal]
            pieces += [
                Stamp(f"]<]{seconds:.1f} seconds[>["),
                Special(START),
                Pads(VIDEO, block),
                Special(END),
            ]
        return pieces
