"""What a request may say: OpenAI's chat completion body, checked field by field.

Every field is known and meant, known and only accepted where it changes nothing (`n` of 1), or
refused by name: a field that is silently ignored would answer another question than was asked.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from pydantic_core import from_json

from ..errors import InvalidBody, InvalidParameter, UnsupportedParameter
from ..protocols import MediaItem, MediaOptions, MediaSlot, MediaSource, Modality, SamplingOptions
from .template import Message

MAX_MESSAGES = MAX_PARTS = 4096
"""of a request; parts are those of all its messages"""
MAX_STOPS, MAX_STOP_CHARS = 4, 1024

T = TypeVar("T")
Check = Callable[[Any, str], T]

# Fields that are refused unless they say what happens anyway.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
_JSON_BYTES = {ord("{"): 160, ord("["): 72, ord(","): 60, ord(":"): 60}
"""of memory for what each stands for"""
_ROLES = {
    "assistant": "assistant",
    "developer": "system",  # the same by a newer name, which templates do not know
    "system": "system",
    "user": "user",
}
_MEDIA: dict[str, Modality] = {"image_url": "image", "video_url": "video"}


@dataclass(frozen=True)
class ChatRequest:
    """A checked request."""

    model: str
    messages: tuple[Message, ...]
    media: tuple[MediaItem, ...]
    """in the order of the messages' slots"""
    sampling: SamplingOptions
    max_tokens: int | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    ignore_eos: bool


def parse_json(body: bytes | bytearray) -> Any:
    """The value of a JSON text. Raises InvalidBody: broken UTF-8 and NaN are no JSON either."""
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidBody(f"the body is not JSON: {error}") from error


def parsed_bytes(body: bytearray) -> int:
    """What the values of a JSON text take at most, about.

    A body of nothing but brackets becomes thirty times as large.
    """
    total = 2 * len(body)
    for at in range(0, len(body), 1 << 20):
        letters = np.frombuffer(body[at : at + (1 << 20)], np.uint8)  # a copy: the body stays free
        for letter, cost in _JSON_BYTES.items():
            total += cost * int(np.count_nonzero(letters == letter))
    return total


def _named(value: Any) -> str:
    """A value's type in JSON's words."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    names |= {list: "an array", dict: "an object", type(None): "null"}
    return names.get(type(value), "something else")


def _object(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidParameter(f"{param} must be an object, got {_named(value)}", param=param)
    return value


def _array(value: Any, param: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        got = "an empty one" if value == [] else _named(value)
        raise InvalidParameter(f"{param} must be an array with entries, got {got}", param=param)
    return value


def _boolean(value: Any, param: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidParameter(f"{param} must be true or false, got {_named(value)}", param=param)
    return value


def _string(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise InvalidParameter(f"{param} must be a string, got {_named(value)}", param=param)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidParameter(
                f"{param} has half of a surrogate pair at character {error.start}", param=param
            ) from error
    return value


def _integer(low: int, high: int) -> Check[int]:
    def check(value: Any, param: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidParameter(f"{param} must be an integer, got {_named(value)}", param=param)
        if not low <= value <= high:
            raise InvalidParameter(
                f"{param} must be at least {low} and at most {high}, got {_short(value)}",
                param=param,
            )
        return value

    return check


def _number(low: float, high: float, *, above: bool = False) -> Check[float]:
    def check(value: Any, param: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidParameter(f"{param} must be a number, got {_named(value)}", param=param)
        fits = low < value <= high if above else low <= value <= high
        if not fits:  # NaN and infinities too
            bound = "above" if above else "at least"
            raise InvalidParameter(
                f"{param} must be {bound} {low:g} and at most {high:g}, got {_short(value)}",
                param=param,
            )
        return float(value)

    return check


def _short(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


class _Fields:
    """An object's fields, each to be taken once; what is left over was not expected."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self._left = {name: value for name, value in values.items() if value is not None}
        self._path = path

    def param(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def take(self, name: str, check: Check[T]) -> T | None:
        """The checked value; None where the field is missing or null."""
        value = self._left.pop(name, None)
        return None if value is None else check(value, self.param(name))

    def need(self, name: str, check: Check[T]) -> T:
        """The checked value of a field that must be there."""
        value = self.take(name, check)
        if value is None:
            raise InvalidParameter(f"{self.param(name)} is missing", param=self.param(name))
        return value

    def raw(self, name: str) -> Any:
        """A value that somebody else checks."""
        return self._left.pop(name, None)

    def neutral(self, name: str, allowed: tuple[Any, ...]) -> None:
        """Refuses the field unless it asks for what happens anyway."""
        value = self._left.pop(name, None)
        same = any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed
        )
        if value is not None and not same:
            choices = " or ".join(json.dumps(one) for one in allowed)
            raise UnsupportedParameter(
                f"{self.param(name)} is not supported other than as {choices}",
                param=self.param(name),
            )

    def end(self) -> None:
        """Refuses what is left."""
        for name in self._left:
            shown = self.param(name if len(name) <= 64 else name[:61] + "...")
            shown = shown.encode("utf-8", "replace").decode()
            raise UnsupportedParameter(f"{shown} is not supported", param=shown)


def parse_chat(body: Any) -> ChatRequest:
    """Checks a body.

    Raises:
        InvalidBody, InvalidParameter, UnsupportedParameter: their `param` is the field's path.
    """
    if not isinstance(body, dict):
        raise InvalidBody(f"the body must be a JSON object, got {_named(body)}")
    fields = _Fields(body, "")
    model = fields.need("model", _string)
    stream = bool(fields.take("stream", _boolean))
    include_usage = _stream_options(fields, stream)
    sampling = SamplingOptions(
        temperature=fields.take("temperature", _number(0, 2)),
        top_p=fields.take("top_p", _number(0, 1, above=True)),
        seed=fields.take("seed", _integer(-(1 << 63), (1 << 63) - 1)),
    )
    max_tokens = _max_tokens(fields)
    stops = fields.take("stop", _stops) or ()
    ignore_eos = bool(fields.take("ignore_eos", _boolean))
    fields.take("user", _string)  # says who asks, and changes no answer
    for name, allowed in _NEUTRAL.items():
        fields.neutral(name, allowed)
    media: list[MediaItem] = []
    messages = tuple(
        _message(message, f"messages[{i}]", media)
        for i, message in enumerate(fields.need("messages", _messages))
    )
    fields.end()
    return ChatRequest(
        model,
        messages,
        tuple(media),
        sampling,
        max_tokens,
        stops,
        stream,
        include_usage,
        ignore_eos,
    )


def _stream_options(fields: _Fields, stream: bool) -> bool:
    options = fields.take("stream_options", _object)
    if options is None:
        return False
    if not stream:
        raise InvalidParameter("stream_options needs stream to be true", param="stream_options")
    inner = _Fields(options, "stream_options")
    include_usage = bool(inner.take("include_usage", _boolean))
    inner.neutral("include_obfuscation", (False,))
    inner.end()
    return include_usage


def _max_tokens(fields: _Fields) -> int | None:
    old = fields.take("max_tokens", _integer(1, 1 << 31))
    new = fields.take("max_completion_tokens", _integer(1, 1 << 31))
    if old is not None and new is not None and old != new:
        raise InvalidParameter(
            f"max_tokens and max_completion_tokens must not differ, got {old} and {new}",
            param="max_tokens",
        )
    return new if old is None else old


def _stops(value: Any, param: str) -> tuple[str, ...]:
    if isinstance(value, list):
        if len(value) > MAX_STOPS:
            raise InvalidParameter(
                f"{param} may have {MAX_STOPS} strings, got {len(value)}", param=param
            )
        stops = tuple(_string(one, f"{param}[{i}]") for i, one in enumerate(value))
    else:
        stops = (_string(value, param),)
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidParameter(
                f"{param} strings must have 1 to {MAX_STOP_CHARS} characters, got {len(stop)}",
                param=param,
            )
    return stops


def _messages(value: Any, param: str) -> list[Any]:
    messages = _array(value, param)
    if len(messages) > MAX_MESSAGES:
        raise InvalidParameter(
            f"{param} may have {MAX_MESSAGES} entries, got {len(messages)}", param=param
        )
    parts = 0
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        parts += len(content) if isinstance(content, list) else 0
        if parts > MAX_PARTS:
            path = f"{param}[{i}].content"
            raise InvalidParameter(
                f"{path}: a request may have {MAX_PARTS} parts, got {parts} up to here", param=path
            )
    return messages


def _message(value: Any, path: str, media: list[MediaItem]) -> Message:
    fields = _Fields(_object(value, path), path)
    role = fields.need("role", _string)
    if role in ("tool", "function"):
        raise UnsupportedParameter(
            f"{path}.role: tools are not supported, got {role!r}", param=f"{path}.role"
        )
    if role not in _ROLES:
        raise InvalidParameter(
            f"{path}.role must be one of {', '.join(_ROLES)}, got {_short(role)}",
            param=f"{path}.role",
        )
    extra = {"name": fields.take("name", _string)}
    if role == "assistant":
        extra["reasoning_content"] = fields.take("reasoning_content", _string)
    content = fields.raw("content")
    if content is None and role != "assistant":
        raise InvalidParameter(f"{path}.content is missing", param=f"{path}.content")
    pieces = None if content is None else _content(content, f"{path}.content", media)
    fields.neutral("tool_calls", ([],))
    fields.end()
    texts = {name: text for name, text in extra.items() if text is not None}
    return Message(_ROLES[role], pieces, texts)


def _content(value: Any, path: str, media: list[MediaItem]) -> tuple[str | MediaSlot, ...]:
    if isinstance(value, str):
        return (_string(value, path),)
    if not isinstance(value, list) or not value:
        got = "an empty array" if value == [] else _named(value)
        raise InvalidParameter(
            f"{path} must be a string or an array of parts, got {got}", param=path
        )
    return tuple(_part(part, f"{path}[{i}]", media) for i, part in enumerate(value))


def _part(value: Any, path: str, media: list[MediaItem]) -> str | MediaSlot:
    fields = _Fields(_object(value, path), path)
    kind = fields.need("type", _string)
    if kind == "text":
        text = fields.need("text", _string)
        fields.end()
        return text
    if kind not in _MEDIA:
        raise UnsupportedParameter(
            f"{path}.type must be one of text, {', '.join(_MEDIA)}, got {_short(kind)}",
            param=f"{path}.type",
        )
    inner_path = fields.param(kind)
    inner = _Fields(fields.need(kind, _object), inner_path)
    url = inner.need("url", _string)
    options = MediaOptions(
        detail=inner.raw("detail"),
        fps=inner.raw("fps"),
        max_long_side_pixel=inner.raw("max_long_side_pixel"),
    )
    inner.end()
    fields.end()
    media.append(MediaItem(_MEDIA[kind], MediaSource(url=url), options, inner_path))
    return MediaSlot(len(media) - 1)
