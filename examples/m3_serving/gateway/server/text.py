"""Text to token ids and back, piece by piece."""

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from ..errors import PromptMismatch

REPLACEMENT = "\ufffd"
"""what a tokenizer shows for bytes that are no character, or not one yet"""
_MAX_PARTS = 4
"""tokens that one character may be spread over: as many as it has bytes"""
_MAX_PENDING = 64
"""tokens held back at most; no tokenizer needs so many for a character"""


class TextTokenizer:
    """A checkpoint's tokenizer.json."""

    def __init__(self, serialized: str) -> None:
        """Reads the text of a tokenizer.json; ValueError if it is none."""
        try:
            self._tokenizer = FastTokenizer.from_str(serialized)
            without = json.loads(serialized)
            without.update(added_tokens=[], truncation=None, padding=None)
            self._plain = FastTokenizer.from_str(json.dumps(without))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"tokenizer.json cannot be read: {error}") from error
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens = {token.content: index for index, token in added.items()}
        self._special_ids = frozenset(added)

    @classmethod
    def from_folder(cls, folder: Path) -> "TextTokenizer":
        """Of a checkpoint; ValueError without a tokenizer.json."""
        path = folder / "tokenizer.json"
        try:
            return cls(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{folder} must hold tokenizer.json: {error.strerror}") from error

    def encode_plain(self, text: str) -> list[int]:
        """Ids of ordinary text: special strings in it are spelled out, nothing is added.

        Raises:
            PromptMismatch: the vocabulary cannot spell one out.
        """
        # The batch call, for one text: the single one keeps Python's lock all the while, and a long
        # prompt would stop every other request.
        (encoding,) = self._plain.encode_batch_fast([text], add_special_tokens=False)
        ids = encoding.ids
        if not self._special_ids.isdisjoint(ids):
            raise PromptMismatch("the text contains a string that this model reserves")
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


class TextStream:
    """Token ids in, text out as soon as it is certain: never half a character.

    A tokenizer may show a token differently at the start of a text (without its leading space), so
    every look includes the tokens before the new ones.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Takes the decoder of whole sequences."""
        self._decode = decode
        self._ids: list[int] = []  # from the last look's start on
        self._read = 0  # of these, how many have been shown

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that has become certain with these tokens."""
        self._ids.extend(token_ids)
        return self._take(final=False)

    def finish(self) -> str:
        """What was held back."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._decode(self._ids[: self._read])
        text = self._decode(self._ids)
        end = len(self._ids)
        if not final and text.endswith(REPLACEMENT) and end - self._read <= _MAX_PENDING:
            end, text = self._certain(text)
        if end == self._read:
            return ""
        del self._ids[: self._read]
        self._read = end - self._read
        return text[len(before) :]

    def _certain(self, text: str) -> tuple[int, str]:
        """How many ids can no longer change, and their text, where the whole ends unclear.

        Bytes that never become a character would otherwise be held back for ever.
        """
        for end in range(len(self._ids) - _MAX_PARTS + 1, self._read, -1):
            left = self._decode(self._ids[:end])
            if left + self._decode(self._ids[end:]) == text:
                return end, left
        return self._read, ""


class StopFilter:
    """Ends a text before the first stop string in it, however the text is cut into pieces.

    The first is the one that is complete first; of two that end together, the longer.
    """

    def __init__(self, stops: Collection[str]) -> None:
        """Takes strings that are not empty."""
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What may be shown now; sets `stopped` if a stop string is complete."""
        self._held += text
        found = [
            (at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) != -1
        ]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)[1]], ""
            return shown
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        for length in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:length]):
                return length
        return 0

    def finish(self) -> str:
        """What was held back, once no more comes."""
        shown, self._held = self._held, ""
        return shown
