"""From text and media to the token ids that the worker reads.

Special strings become special tokens only where the chat template or the family wrote them. Text of
the request that contains one is encoded as the letters it is: otherwise a user could place anchors,
and every later image would stand in the wrong place.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from .errors import PromptMismatch, PromptTooLong
from .protocols import (
    ExpandedPrompt,
    MediaSlot,
    ModelFamily,
    Pads,
    PreparedItem,
    PromptPart,
    Special,
    Stamp,
    TemplateText,
    Tokenizer,
    UserText,
)


class Expander:
    """Expands prompts of one family with one tokenizer."""

    def __init__(self, family: ModelFamily, tokenizer: Tokenizer) -> None:
        """ValueError if the tokenizer lacks a token that the family writes."""
        self._family, self._tokenizer = family, tokenizer
        specials = tokenizer.special_tokens
        missing = [
            token
            for token in (*family.placeholder_tokens, *family.bracket_tokens)
            if token not in specials
        ]
        if missing:
            raise ValueError(f"the tokenizer of {family.model_type} lacks {', '.join(missing)}")
        self._placeholder_ids = {specials[token] for token in family.placeholder_tokens}
        # Longest first: one special string may begin with another.
        ordered = sorted(specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, ordered)))

    def expand(
        self, parts: Sequence[PromptPart], items: Sequence[PreparedItem], max_tokens: int
    ) -> ExpandedPrompt:
        """Token ids, and where in them each medium's rows go.

        Text between two media is encoded as one string, whoever wrote its pieces, so that it gives
        the same ids as encoding the rendered template at once.

        Args:
            parts: in order; slot i stands for items[i], and the slots come in that order.
            items: prepared media.
            max_tokens: that the expanded prompt may have.

        Raises:
            PromptMismatch: slots and media do not correspond, or something else in the prompt
                became a placeholder.
            PromptTooLong: more than max_tokens.
        """
        slots = [part.index for part in parts if isinstance(part, MediaSlot)]
        if slots != list(range(len(items))):
            raise PromptMismatch(
                f"the prompt has places for media {slots}, the request has {len(items)} media"
            )
        ids: list[int] = []
        placed: list[PreparedItem] = []
        run: list[TemplateText | UserText] = []
        for part in parts:
            if not isinstance(part, MediaSlot):
                run.append(part)
                continue
            ids += self._encode_run(run)
            run = []
            placed.append(self._place(items[part.index], ids))
        ids += self._encode_run(run)
        pads = sum(item.tokens for item in placed)
        found = sum(token in self._placeholder_ids for token in ids)
        if found != pads:
            raise PromptMismatch(
                f"the media take {pads} placeholder tokens, the prompt has {found}"
            )
        if len(ids) > max_tokens:
            raise PromptTooLong(f"a prompt may have {max_tokens} tokens, this one has {len(ids)}")
        return ExpandedPrompt(ids, placed)

    def _place(self, item: PreparedItem, ids: list[int]) -> PreparedItem:
        """Appends a medium's tokens to `ids`; the item with its ranges."""
        specials = self._tokenizer.special_tokens
        ranges = []
        for piece in self._family.pieces(item):
            match piece:
                case Special(token):
                    ids.append(specials[token])
                case Pads(token, count):
                    ranges.append((len(ids), count))
                    ids.extend([specials[token]] * count)
                case Stamp(text):
                    ids.extend(self._tokenizer.encode_plain(text))
        placed = sum(count for _, count in ranges)
        if placed != item.tokens:
            raise PromptMismatch(f"a medium of {item.tokens} tokens was given {placed} places")
        return replace(item, placeholders=tuple(ranges))

    def _encode_run(self, run: Sequence[TemplateText | UserText]) -> list[int]:
        """Ids of text without media: cut at the template's special strings, the rest plain."""
        ids: list[int] = []
        plain = ""
        template = ""  # of neighbouring template parts, not yet searched

        def search_template() -> None:
            nonlocal plain, template
            end = 0
            for match in self._special.finditer(template):
                plain += template[end : match.start()]
                flush_plain()
                ids.append(self._tokenizer.special_tokens[match.group()])
                end = match.end()
            plain += template[end:]
            template = ""

        def flush_plain() -> None:
            nonlocal plain
            if plain:
                ids.extend(self._tokenizer.encode_plain(plain))
            plain = ""

        for part in run:
            if isinstance(part, TemplateText):
                template += part.text
            else:
                search_template()
                plain += part.text
        search_template()
        flush_plain()
        return ids
