"""From messages to prompt parts by a Jinja chat template, keeping apart who wrote what.

A template gives one string, but the expander must know which of its letters are the request's: in
those, special strings are only text. So text of the request goes through the template as `Marked`
strings, which carry their origin through what templates do with them (concatenate, cut, trim,
split, filter) and put it into the output as marks: lone surrogates, which no request can contain.
Whatever does not carry marks along gives a result that counts as the request's text as a whole. If
a template cuts through marks, the request is refused: never is text of the request taken for the
template's.
"""

import datetime
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import BuiltinMethodType
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import GatewayError, InvalidParameter, PromptMismatch
from ..protocols import MediaSlot, Modality, ModelFamily, PromptPart, TemplateText, UserText

_OPEN, _CLOSE, _SLOT, _SLOT_END = "\udc00", "\udc01", "\udc02", "\udc03"
_MARK = re.compile(f"{_OPEN}|{_CLOSE}|{_SLOT}([0-9]+){_SLOT_END}|[\ud800-\udfff]")

# Filters through which marks pass unharmed. The result of all others is text of the request if an
# argument was.
_TRANSPARENT = frozenset(
    (
        *("abs", "attr", "batch", "capitalize", "count", "d", "default", "dictsort", "first"),
        *("float", "format", "groupby", "int", "items", "join", "last", "length", "list", "lower"),
        *("map", "max", "min", "random", "reject", "rejectattr", "replace", "reverse", "round"),
        *("select", "selectattr", "slice", "sort", "string", "sum", "trim", "truncate", "unique"),
        *("upper", "wordcount"),
    )
)


@dataclass(frozen=True)
class Message:
    """One message of a conversation, checked."""

    role: str
    content: tuple[str | MediaSlot, ...] | None
    """text and media in order; None of an assistant that said nothing"""
    extra: Mapping[str, str]
    """other texts, by the request's name of them"""


def _encoded(text: str) -> str:
    return f"{_OPEN}{text}{_CLOSE}"


class Marked(str):
    """Text of the request on its way through a template."""

    def __str__(self) -> str:
        """How it is written out: between marks."""
        return _encoded(str.__str__(self))

    def __repr__(self) -> str:
        """Inside a list that is written out as a whole."""
        return _encoded(str.__repr__(self))

    def __format__(self, spec: str) -> str:
        """Inside a formatted string."""
        return _encoded(str.__format__(self, spec))

    def __html__(self) -> str:
        """Where a template escapes: letters stay as they are, this is no HTML."""
        return str(self)

    def __add__(self, other: Any) -> Any:
        """Mixed text, each piece still known."""
        return str(self) + str(other) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        """Mixed text, each piece still known."""
        return str(other) + str(self) if isinstance(other, str) else NotImplemented

    def __iter__(self) -> Iterator["Marked"]:
        """Letter by letter."""
        return map(Marked, str.__iter__(self))


def _keeps_marks(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    @wraps(method)
    def marked(*arguments: Any, **options: Any) -> Any:
        return _mark(method(*arguments, **options))

    return marked


for _name in (
    *("__getitem__", "__mod__", "__mul__", "__rmul__", "capitalize", "casefold", "center"),
    *("expandtabs", "join", "ljust", "lower", "lstrip", "partition", "removeprefix"),
    *("removesuffix", "replace", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines"),
    *("strip", "swapcase", "title", "translate", "upper", "zfill"),
):
    setattr(Marked, _name, _keeps_marks(_name))


def _mark(value: Any) -> Any:
    """The value with every string in it marked."""
    if isinstance(value, str):
        return value if isinstance(value, Marked) else Marked(value)
    if isinstance(value, list | tuple):
        return type(value)(map(_mark, value))
    if isinstance(value, dict):
        return {name: _mark(item) for name, item in value.items()}
    return value


def _is_marked(value: Any) -> bool:
    """Whether text of the request is in it."""
    if isinstance(value, str):
        return isinstance(value, Marked) or _OPEN in value
    if isinstance(value, list | tuple):
        return any(map(_is_marked, value))
    if isinstance(value, dict):
        return any(map(_is_marked, value.values()))
    return False


def _opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, its result marked if an argument was."""

    @wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        return _mark(result) if _is_marked([arguments, options]) else result

    return wrapped


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja without a way out of the sandbox, nor a way to lose marks."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Not what would turn marked text into bytes, or use it as a format."""
        if isinstance(obj, Marked) and attr in ("encode", "format", "format_map"):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, obj: Any, *arguments: Any, **options: Any) -> Any:
        """Methods of the template's own strings read marked arguments' letters only."""
        result_of = super().call
        method = isinstance(obj, BuiltinMethodType) and isinstance(obj.__self__, str)
        if not method or not _is_marked(arguments) or obj.__name__ in ("format", "format_map"):
            return result_of(context, obj, *arguments, **options)
        if obj.__name__ == "join" and isinstance(arguments[0], list | tuple):
            pieces = [str(item) if isinstance(item, str) else item for item in arguments[0]]
            return result_of(context, obj, pieces, **options)
        return _mark(result_of(context, obj, *arguments, **options))


class _Refused(Exception):
    """The template's own `raise_exception`."""


def _raise_exception(message: Any) -> None:
    raise _Refused(str(message))


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _without_marks(text: str) -> str:
    return _MARK.sub("", text)


class ChatTemplate:
    """A checkpoint's chat template, or its family's."""

    def __init__(
        self, source: str, family: ModelFamily, variables: Mapping[str, str] | None = None
    ) -> None:
        """Compiles, and tries one short conversation.

        Args:
            source: Jinja.
            family: whose placeholders the template writes.
            variables: more of what it can use, such as bos_token.

        Raises:
            ValueError: it is no template, or cannot render the conversation.
        """
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], autoescape=False
        )
        environment.filters["tojson"] = _tojson
        for name, function in environment.filters.items():
            if name not in _TRANSPARENT:
                environment.filters[name] = _opaque(function)
        environment.globals.update(
            raise_exception=_raise_exception, strftime_now=_opaque(_strftime_now)
        )
        self._variables = dict(variables or {})
        modalities: tuple[Modality, ...] = ("image", "video")
        self._modality_of = dict(zip(family.placeholder_tokens, modalities, strict=True))
        pads = "|".join(map(re.escape, family.placeholder_tokens))
        start, end = map(re.escape, family.bracket_tokens)
        # Some templates write the brackets around a medium, which are the family's to write.
        self._placeholder = re.compile(f"{start}(?P<inner>{pads}){end}|(?P<bare>{pads})")
        try:
            self._template = environment.from_string(source)
            self.render([Message("user", ("Hello",), {})], [])
        except (TemplateError, GatewayError) as error:
            raise ValueError(f"the chat template cannot be used: {error}") from error

    def render(
        self, messages: Sequence[Message], modalities: Sequence[Modality]
    ) -> list[PromptPart]:
        """The prompt's parts; their slots are 0, 1, ... in order.

        Media are given to the template as parts, for which it writes placeholders. A template that
        only knows content as one string gets one, with the media's places in it.

        Args:
            messages: whose slots count the request's media.
            modalities: of the media.

        Raises:
            InvalidParameter: the template refuses the conversation.
            PromptMismatch: it loses, doubles or moves media, or cuts through the request's text.
        """
        try:
            return self._render(messages, modalities, as_string=False)
        except GatewayError as error:
            if not modalities:
                raise
            try:
                return self._render(messages, modalities, as_string=True)
            except GatewayError:
                raise error from None

    def _render(
        self, messages: Sequence[Message], modalities: Sequence[Modality], as_string: bool
    ) -> list[PromptPart]:
        values = [_template_value(message, modalities, as_string) for message in messages]
        try:
            text = self._template.render(
                messages=values, add_generation_prompt=True, **self._variables
            )
        except _Refused as error:
            raise InvalidParameter(
                f"the chat template refuses these messages: {_without_marks(str(error))}",
                param="messages",
            ) from error
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise InvalidParameter(
                f"the chat template cannot render these messages: {_without_marks(str(error))}",
                param="messages",
            ) from error
        parts = self._with_slots(_parts(text), modalities)
        slots = [part.index for part in parts if isinstance(part, MediaSlot)]
        if slots != list(range(len(modalities))):
            raise PromptMismatch(
                f"the chat template has places for media {slots}, the request has "
                f"{len(modalities)} media",
                param="messages",
            )
        return parts

    def _with_slots(
        self, parts: Sequence[PromptPart], modalities: Sequence[Modality]
    ) -> list[PromptPart]:
        """The template's own placeholders become slots in the order they come."""
        result: list[PromptPart] = []
        found = 0
        for part in parts:
            if not isinstance(part, TemplateText):
                result.append(part)
                continue
            end = 0
            for match in self._placeholder.finditer(part.text):
                modality = self._modality_of[match["inner"] or match["bare"]]
                if found >= len(modalities) or modalities[found] != modality:
                    raise PromptMismatch(
                        f"the chat template puts {modality}s where the request has none",
                        param="messages",
                    )
                if match.start() > end:
                    result.append(TemplateText(part.text[end : match.start()]))
                result.append(MediaSlot(found))
                found += 1
                end = match.end()
            if end < len(part.text):
                result.append(TemplateText(part.text[end:]))
        return result


def _template_value(
    message: Message, modalities: Sequence[Modality], as_string: bool
) -> dict[str, Any]:
    """A message as templates know it."""
    value: dict[str, Any] = {"role": message.role, "content": None}
    value.update((name, Marked(text)) for name, text in message.extra.items())
    content = message.content
    if content is None:
        return value
    if as_string or not any(isinstance(piece, MediaSlot) for piece in content):
        value["content"] = Marked(
            "".join(
                f"{_SLOT}{piece.index}{_SLOT_END}" if isinstance(piece, MediaSlot) else piece
                for piece in content
            )
        )
    else:
        value["content"] = [
            {"type": modalities[piece.index]}
            if isinstance(piece, MediaSlot)
            else {"type": "text", "text": Marked(piece)}
            for piece in content
        ]
    return value


def _parts(rendered: str) -> list[PromptPart]:
    """The parts of a template's output, neighbours of one kind joined."""
    parts: list[PromptPart] = []

    def add(text: str, depth: int) -> None:
        kind = UserText if depth else TemplateText
        if not text:
            return
        if parts and type(parts[-1]) is kind:
            text = parts.pop().text + text
        parts.append(kind(text))

    depth = end = 0
    for match in _MARK.finditer(rendered):
        add(rendered[end : match.start()], depth)
        end = match.end()
        mark = match.group()
        if match[1] is not None:
            parts.append(MediaSlot(int(match[1])))
            continue
        depth += {_OPEN: 1, _CLOSE: -1}.get(mark, -(1 << 30))
        if depth < 0:
            raise PromptMismatch("the chat template cuts through the messages' text")
    if depth:
        raise PromptMismatch("the chat template cuts through the messages' text")
    add(rendered[end:], 0)
    return parts


def load_template(folder: Path, family: ModelFamily, override: Path | None = None) -> ChatTemplate:
    """The override, else chat_template.jinja, else the one in tokenizer_config.json, else the
    family's.

    Raises:
        ValueError: a file cannot be read, or holds no usable template.
    """
    try:
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        variables = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                variables[name] = token
        path = override or folder / "chat_template.jinja"
        if override or path.is_file():
            source = path.read_text(encoding="utf-8")
        else:
            source = config.get("chat_template")
            if isinstance(source, list):  # several with names
                named = {entry.get("name"): entry.get("template") for entry in source}
                source = named.get("default")
            source = source or family.chat_template
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"the chat template of {folder} cannot be read: {error}") from error
    return ChatTemplate(source, family, variables)
