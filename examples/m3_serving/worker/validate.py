"""What a request must be before anything of it is used.

The gateway is ours, but it may be another version, it may have a fault, and a wrong offset here
would not crash: it would answer from the wrong pixels. All numbers are Python's, so none overflows.
"""

import math
import re
from dataclasses import dataclass

from ..gateway.wire import shared_memory
from ..gateway.wire import worker_pb2 as pb
from ..gateway.wire.methods import PROTOCOL

_KEY = re.compile(r"[0-9a-f]{64}")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,200}")
_ITEM_BYTES = {pb.DTYPE_UINT8: 1, pb.DTYPE_BFLOAT16: 2}
_MODALITIES = (pb.MODALITY_IMAGE, pb.MODALITY_VIDEO)
_MAX_SIDE = 1 << 16


class Refused(Exception):
    """A request that cannot be served: the field it is about, and what is wrong."""

    def __init__(self, field: str, message: str) -> None:
        """`field` by its path in worker.proto."""
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True)
class ModelFacts:
    """What the checks need to know of the model."""

    vocab_size: int
    max_positions: int
    cache_tokens: int
    """that the engine's pages hold"""
    image_token_id: int | None
    """None: the model has no vision tower"""
    video_token_id: int | None
    frame_width: int
    """numbers in a row of an image"""
    row_width: int
    """numbers in a row of a clip"""
    merge: int


@dataclass(frozen=True)
class RequestLimits:
    """What one request may ask for, whatever the gateway allows."""

    max_items: int = 256
    max_payload_bytes: int = 1 << 30


@dataclass(frozen=True)
class ItemSpec:
    """A checked item; its patches have still to come."""

    key: str
    """content key, modality and dtype: what decides the tower's output"""
    dtype: int
    shape: tuple[int, int]
    grid: tuple[int, int, int]
    spans: tuple[tuple[int, int], ...]
    num_bytes: int


@dataclass(frozen=True)
class RequestSpec:
    """A checked request."""

    prompt: list[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    ignore_eos: bool
    items: tuple[ItemSpec, ...]

    @property
    def payload_bytes(self) -> int:
        """Of all patches."""
        return sum(item.num_bytes for item in self.items)


def check_start(start: pb.Start, model: ModelFacts, limits: RequestLimits) -> RequestSpec:
    """Checks everything that the first message says.

    Raises:
        Refused: names the first field that is wrong.
    """
    _require(start.protocol == PROTOCOL, "protocol", PROTOCOL, start.protocol)
    _require(
        _REQUEST_ID.fullmatch(start.request_id) is not None,
        "request_id",
        "1 to 200 visible ASCII characters",
        start.request_id[:220],
    )
    prompt = list(start.prompt)
    _require(bool(prompt), "prompt", "at least one token", "none")
    largest = max(prompt)
    _require(largest < model.vocab_size, "prompt", f"ids below {model.vocab_size}", largest)
    new = start.max_new_tokens
    _require(new >= 1, "max_new_tokens", "at least 1", new)
    _require(
        len(prompt) + new <= model.max_positions,
        "prompt",
        f"at most {model.max_positions} tokens together with max_new_tokens",
        f"{len(prompt)} + {new}",
    )
    # The last token of an answer is never computed, so it needs no slot.
    _require(
        len(prompt) + new - 1 <= model.cache_tokens,
        "prompt",
        f"at most {model.cache_tokens} tokens, the cache's, together with max_new_tokens less one",
        f"{len(prompt)} + {new} - 1",
    )
    temperature, top_p, seed = _check_sampling(start.sampling)
    _require(
        len(start.items) <= limits.max_items,
        "items",
        f"at most {limits.max_items}",
        len(start.items),
    )
    items = tuple(
        _check_item(item, f"items[{index}]", prompt, model)
        for index, item in enumerate(start.items)
    )
    _check_together(items, prompt, model)
    spec = RequestSpec(prompt, new, temperature, top_p, seed, start.ignore_eos, items)
    _require(
        spec.payload_bytes <= limits.max_payload_bytes,
        "items",
        f"at most {limits.max_payload_bytes} bytes of patches together",
        spec.payload_bytes,
    )
    return spec


def _require(holds: bool, field: str, expected: object, got: object) -> None:
    if not holds:
        raise Refused(field, f"must be {expected}, got {got}")


def _check_sampling(sampling: pb.Sampling) -> tuple[float, float, int | None]:
    temperature = sampling.temperature if sampling.HasField("temperature") else 0.0
    _require(
        0.0 <= temperature < math.inf,
        "sampling.temperature",
        "at least 0 and finite",
        temperature,
    )
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    _require(0.0 < top_p <= 1.0, "sampling.top_p", "above 0 and at most 1", top_p)
    return temperature, top_p, sampling.seed if sampling.HasField("seed") else None


def _check_item(item: pb.Item, at: str, prompt: list[int], model: ModelFacts) -> ItemSpec:
    _require(item.modality in _MODALITIES, f"{at}.modality", "an image or a video", item.modality)
    is_image = item.modality == pb.MODALITY_IMAGE
    token = model.image_token_id if is_image else model.video_token_id
    _require(token is not None, at, "absent: this model has no vision tower", "an item")
    _require(
        _KEY.fullmatch(item.content_key) is not None,
        f"{at}.content_key",
        "64 hexadecimal digits in lower case",
        repr(item.content_key[:80]),
    )
    _require(item.dtype in _ITEM_BYTES, f"{at}.dtype", "uint8 or bfloat16", item.dtype)

    grid = tuple(item.grid)
    _require(
        len(grid) == 3 and all(1 <= side <= _MAX_SIDE for side in grid),
        f"{at}.grid",
        f"three numbers from 1 to {_MAX_SIDE}",
        list(grid),
    )
    frames, gh, gw = grid
    _require(
        gh % model.merge == 0 and gw % model.merge == 0,
        f"{at}.grid",
        f"of height and width that are multiples of {model.merge}",
        list(grid),
    )
    _require(not is_image or frames == 1, f"{at}.grid", "of one frame for an image", list(grid))

    rows = frames * gh * gw
    width = model.frame_width if is_image else model.row_width
    shape = tuple(item.shape)
    _require(
        shape == (rows, width),
        f"{at}.shape",
        f"[{rows}, {width}] for {'an image' if is_image else 'a video'} of the grid {list(grid)}",
        list(shape),
    )
    num_bytes = rows * width * _ITEM_BYTES[item.dtype]
    _check_payload(item, at, num_bytes)
    tokens = rows // model.merge**2
    spans = _check_placeholders(item, at, prompt, token, tokens)
    return ItemSpec(
        key=f"{item.content_key}:{item.modality}:{item.dtype}",
        dtype=item.dtype,
        shape=shape,
        grid=grid,
        spans=spans,
        num_bytes=num_bytes,
    )


def _check_payload(item: pb.Item, at: str, num_bytes: int) -> None:
    kind = item.WhichOneof("payload")
    _require(kind is not None, f"{at}.payload", "inline, chunked or in shared memory", "none")
    got = len(item.inline) if kind == "inline" else getattr(item, kind).num_bytes
    _require(got == num_bytes, f"{at}.{kind}", f"{num_bytes} bytes for its shape and dtype", got)
    if kind == "shared_memory":
        name = item.shared_memory.name
        _require(
            shared_memory.is_name(name),
            f"{at}.shared_memory.name",
            "the name of a file of the gateway's",
            repr(name[:100]),
        )
        offset = item.shared_memory.offset
        _require(offset < 1 << 62, f"{at}.shared_memory.offset", "below 2**62", offset)


def _check_placeholders(
    item: pb.Item, at: str, prompt: list[int], token: int, tokens: int
) -> tuple[tuple[int, int], ...]:
    field = f"{at}.placeholders"
    spans = tuple((span.offset, span.length) for span in item.placeholders)
    _require(bool(spans), field, "at least one", "none")
    end = 0
    for offset, length in spans:
        _require(length >= 1, field, "not empty", (offset, length))
        _require(offset >= end, field, f"in order, from {end} on", (offset, length))
        end = offset + length
        _require(end <= len(prompt), field, f"inside {len(prompt)} tokens", (offset, length))
        if prompt[offset:end].count(token) != length:
            raise Refused(field, f"must point at token {token} only, got {(offset, length)}")
    placed = sum(length for _, length in spans)
    _require(placed == tokens, field, f"{tokens} tokens for the grid {list(item.grid)}", placed)
    return spans


def _check_together(items: tuple[ItemSpec, ...], prompt: list[int], model: ModelFacts) -> None:
    end = 0
    grids: dict[str, tuple[int, int, int]] = {}
    for index, item in enumerate(items):
        field = f"items[{index}].placeholders"
        _require(
            item.spans[0][0] >= end, field, f"after the last item's, from {end} on", item.spans
        )
        end = item.spans[-1][0] + item.spans[-1][1]
        known = grids.setdefault(item.key, item.grid)
        _require(known == item.grid, f"items[{index}].content_key", "of one medium", "two grids")
    if model.image_token_id is None:
        return
    placed = sum(length for item in items for _, length in item.spans)
    found = prompt.count(model.image_token_id) + prompt.count(model.video_token_id)
    _require(found == placed, "prompt", f"of {placed} placeholder tokens, as its items say", found)
