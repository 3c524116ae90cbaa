"""Prompt expansion: brackets, stamps, ranges, and user text that imitates special tokens."""

import re

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

pytest.importorskip("PIL")

from gateway_media import GOLDEN, LetterTokenizer

from examples.m3_serving.gateway.errors import PromptMismatch, PromptTooLong
from examples.m3_serving.gateway.expand import Expander
from examples.m3_serving.gateway.families import Qwen2VLFamily, minimax_m3, qwen2_vl
from examples.m3_serving.gateway.families.minimax_m3 import MiniMaxM3Family
from examples.m3_serving.gateway.protocols import MediaSlot, PreparedItem, TemplateText, UserText

SPECIALS = ["]~b]", "]~b]x", *MiniMaxM3Family.placeholder_tokens, *MiniMaxM3Family.bracket_tokens]
TOKENIZER = LetterTokenizer(SPECIALS)
EXPANDER = Expander(MiniMaxM3Family(), TOKENIZER)
IMAGE, VIDEO = f"⟪{minimax_m3.IMAGE}⟫", f"⟪{minimax_m3.VIDEO}⟫"
START, END = f"⟪{minimax_m3.START}⟫", f"⟪{minimax_m3.END}⟫"


def item(modality, grid, timestamps=(0.0,)):
    rows = int(np.prod(grid))
    empty = np.zeros((rows, 0), np.uint8)
    return PreparedItem(modality, "key", empty, tuple(grid), rows // 4, tuple(timestamps))


def test_image_and_clip_in_the_order_of_the_prompt():
    parts = [
        TemplateText("]~b]user\n"),
        MediaSlot(0),
        UserText("what?"),
        MediaSlot(1),
        TemplateText("]~b]"),
    ]
    items = [item("image", (1, 2, 4)), item("video", (2, 2, 2), (0.0, 1.0, 2.05))]
    prompt = EXPANDER.expand(parts, items, 1000)
    assert TOKENIZER.show(prompt.token_ids) == (
        f"⟪]~b]⟫user\n{START}{IMAGE}{IMAGE}{END}what?"
        f"]<]0.0 seconds[>[{START}{VIDEO}{END}]<]2.0 seconds[>[{START}{VIDEO}{END}⟪]~b]⟫"
    )
    for placed, count in zip(prompt.items, (1, 2), strict=True):
        assert len(placed.placeholders) == count
        pad = TOKENIZER.special_tokens[minimax_m3.IMAGE if count == 1 else minimax_m3.VIDEO]
        for offset, length in placed.placeholders:
            assert prompt.token_ids[offset : offset + length] == [pad] * length


@pytest.mark.parametrize("case", GOLDEN["videos"], ids=lambda case: case["name"])
def test_golden_stamps(case):
    times = [index / case["src_fps"] for index in case["indices"]]
    prompt = EXPANDER.expand([MediaSlot(0)], [item("video", case["grid_thw"], times)], 10**6)
    frames, gh, gw = case["grid_thw"]
    shown = TOKENIZER.show(prompt.token_ids)
    block = START + VIDEO * (gh * gw // 4) + END
    assert shown == "".join(stamp + block for stamp in case["stamps"])
    assert len(prompt.items[0].placeholders) == frames


def test_stamps_round_half_to_even_on_the_binary_value():
    grid, times = (3, 2, 2), (0.25, 0, 2.05, 0, 0.35, 0)
    shown = TOKENIZER.show(
        EXPANDER.expand([MediaSlot(0)], [item("video", grid, times)], 99).token_ids
    )
    assert re.findall(r"]<]([0-9.]+) seconds", shown) == ["0.2", "2.0", "0.3"]


@settings(deadline=None)
@given(st.lists(st.sampled_from([*SPECIALS, "a", "]", "<", "[>[", "\n"]), max_size=6).map("".join))
def test_user_text_never_becomes_a_special_token(text):
    parts = [TemplateText("]~b]"), UserText(text), MediaSlot(0), UserText(text)]
    prompt = EXPANDER.expand(parts, [item("image", (1, 2, 2))], 10**4)
    plain = TOKENIZER.encode_plain(text)
    specials = TOKENIZER.special_tokens
    image = [specials[token] for token in (minimax_m3.START, minimax_m3.IMAGE, minimax_m3.END)]
    assert prompt.token_ids == [specials["]~b]"], *plain, *image, *plain]


def test_a_special_string_is_not_put_together_from_template_and_user_text():
    parts = [TemplateText("]~"), UserText("b]")]
    assert EXPANDER.expand(parts, [], 99).token_ids == TOKENIZER.encode_plain("]~b]")
    parts = [TemplateText("]~"), TemplateText("b]")]
    assert EXPANDER.expand(parts, [], 99).token_ids == [0]


def test_the_longest_special_string_wins():
    assert EXPANDER.expand([TemplateText("]~b]x]~b]")], [], 99).token_ids == [1, 0]


def test_text_between_media_is_encoded_as_one_string():
    class Recorder(LetterTokenizer):
        def encode_plain(self, text):
            seen.append(text)
            return super().encode_plain(text)

    seen: list[str] = []
    parts = [TemplateText("]~b]user\n"), UserText("a"), UserText("b"), TemplateText("\nend]~b]")]
    Expander(MiniMaxM3Family(), Recorder(SPECIALS)).expand(parts, [], 99)
    assert seen == ["user\nab\nend"]


@pytest.mark.parametrize(
    ("parts", "count"),
    [
        ([], 1),
        ([MediaSlot(0)], 0),
        ([MediaSlot(0)], 2),
        ([MediaSlot(0), MediaSlot(0)], 1),
        ([MediaSlot(1), MediaSlot(0)], 2),
        ([TemplateText(minimax_m3.IMAGE)], 0),
        ([MediaSlot(0), TemplateText(minimax_m3.VIDEO)], 1),
    ],
)
def test_places_and_media_must_correspond(parts, count):
    with pytest.raises(PromptMismatch) as caught:
        EXPANDER.expand(parts, [item("image", (1, 2, 2))] * count, 99)
    assert caught.value.status == 400


def test_too_long_prompts_are_refused_by_the_count_that_is_sent():
    parts, items = [UserText("abc"), MediaSlot(0)], [item("image", (1, 2, 2))]
    assert len(EXPANDER.expand(parts, items, 6).token_ids) == 6
    with pytest.raises(PromptTooLong, match="5 tokens, this one has 6"):
        EXPANDER.expand(parts, items, 5)


def test_a_tokenizer_without_the_familys_tokens_is_refused():
    with pytest.raises(ValueError, match="lacks"):
        Expander(Qwen2VLFamily(), TOKENIZER)


def test_second_family_has_other_brackets_and_no_stamps():
    family = Qwen2VLFamily()
    tokenizer = LetterTokenizer([*family.placeholder_tokens, *family.bracket_tokens])
    clip = item("video", (2, 2, 4), (0.0, 0.5, 1.0))
    prompt = Expander(family, tokenizer).expand([UserText("x"), MediaSlot(0)], [clip], 99)
    start, end = f"⟪{qwen2_vl.START}⟫", f"⟪{qwen2_vl.END}⟫"
    assert tokenizer.show(prompt.token_ids) == f"x{start}{f'⟪{qwen2_vl.VIDEO}⟫' * 4}{end}"
    assert prompt.items[0].placeholders == ((2, 4),)
