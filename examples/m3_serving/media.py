"""Images and clips inside prompts: which token's embedding comes from which row of the tower.

A medium stands in the prompt as runs of a placeholder token, one token for each row of its
features. A step may compute any stretch of the prompt, so it may cut through a run: what it needs
is then a few rows in the middle of a medium.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Medium:
    """One image or clip of a prompt."""

    key: str
    """equal keys mean equal features: names content, policy and dtype"""
    spans: tuple[tuple[int, int], ...]
    """(offset, length) in the prompt of its placeholders, in tokens; rows are given out in order"""
    patches: Tensor
    """[rows, row width] uint8 pixels, or floating and normalised; an image's may hold one frame a
    row, see `VisionTower.encode`"""
    grid: tuple[int, int, int]
    """[T, gh, gw] in patches; rows = T * gh * gw"""

    @property
    def tokens(self) -> int:
        """Placeholder tokens."""
        return sum(length for _, length in self.spans)


@dataclass(frozen=True)
class Piece:
    """A stretch of tokens whose embeddings are consecutive rows of one medium."""

    medium: int
    """index in the prompt's media"""
    row: int
    """first row of the medium's features"""
    position: int
    """of the first token in the prompt"""
    count: int


class PromptMedia:
    """The media of one prompt by position."""

    def __init__(self, media: Sequence[Medium] = (), prompt_tokens: int = 0) -> None:
        """ValueError unless all spans lie in the prompt and none overlaps another."""
        self.media = tuple(media)
        pieces = []
        for index, medium in enumerate(self.media):
            row = 0
            for offset, length in medium.spans:
                pieces.append(Piece(index, row, offset, length))
                row += length
        self._pieces = sorted(pieces, key=lambda piece: piece.position)
        end = 0
        for piece in self._pieces:
            if piece.count < 1 or piece.position < end:
                raise ValueError(
                    f"media: spans must hold tokens and not overlap, got {piece.count} tokens at "
                    f"{piece.position} after one that ends at {end}"
                )
            end = piece.position + piece.count
        if end > prompt_tokens:
            raise ValueError(
                f"media: spans must lie in the prompt of {prompt_tokens} tokens, got one that ends "
                f"at {end}"
            )
        self._starts = [piece.position for piece in self._pieces]
        self.ends = [max((o + n for o, n in m.spans), default=0) for m in self.media]
        """for each medium, the position after its last placeholder"""

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """The pieces of tokens start .. stop - 1, cut to that, in order."""
        result = []
        for piece in self._pieces[max(0, bisect_right(self._starts, start) - 1) :]:
            if piece.position >= stop:
                break
            skipped = max(0, start - piece.position)
            count = min(piece.count, stop - piece.position) - skipped
            if count > 0:
                row, position = piece.row + skipped, piece.position + skipped
                result.append(Piece(piece.medium, row, position, count))
        return result

    def names(self, start: int, stop: int) -> list[tuple[str, int, int, int]]:
        """What besides the token ids decides the embeddings of tokens start .. stop - 1.

        Returns:
            (medium's key, first row, first token counted from start, tokens) of each piece.
        """
        return [
            (self.media[p.medium].key, p.row, p.position - start, p.count)
            for p in self.pieces(start, stop)
        ]


NO_MEDIA = PromptMedia()


class FeatureCache:
    """Features of media seen lately, by key, within a bound of bytes; oldest use goes first."""

    def __init__(self, max_bytes: int) -> None:
        """Bytes that the features kept here may have together; 0 keeps none."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.hits = 0
        self.misses = 0
        self._features: OrderedDict[str, Tensor] = OrderedDict()

    def get(self, key: str, compute: Callable[[], Tensor]) -> Tensor:
        """The features under a key, computed if they are not here."""
        features = self._features.get(key)
        if features is not None:
            self.hits += 1
            self._features.move_to_end(key)
            return features
        self.misses += 1
        features = compute()
        if features.nbytes <= self.max_bytes:
            self._features[key] = features
            self.num_bytes += features.nbytes
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= self._features.popitem(last=False)[1].nbytes
        return features
