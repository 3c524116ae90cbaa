"""Tokens to text piece by piece, stop strings across pieces, and tokenizers."""

import json
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

pytest.importorskip("PIL")
pytest.importorskip("av")
pytest.importorskip("tokenizers")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from gateway_server import CHAT_TOKENS, TOKENIZER, tokenizer_json
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from examples.m3_serving.gateway.errors import PromptMismatch
from examples.m3_serving.gateway.server.text import StopFilter, TextStream, TextTokenizer

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
ID_OF_BYTE = {}
for _text in (chr(i) for i in range(0x800)):
    for _byte, _id in zip(_text.encode(), TOKENIZER.encode_plain(_text), strict=True):
        ID_OF_BYTE[_byte] = _id


def pieces_of(items, cuts):
    """The sequence cut at these places."""
    places = sorted({0, len(items), *(cut for cut in cuts if cut < len(items))})
    return [items[a:b] for a, b in pairwise(places)]


def through(stream, pieces):
    shown = [stream.push(piece) for piece in pieces]
    return shown, stream.finish()


CUTS = st.sets(st.integers(0, 60))


@settings(deadline=None)
@given(st.text(max_size=20), CUTS)
def test_text_comes_whole_and_never_in_halves_of_a_character(text, cuts):
    ids = TOKENIZER.encode_plain(text)
    shown, rest = through(TextStream(TOKENIZER.decode), pieces_of(ids, cuts))
    assert "".join(shown) + rest == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(shown) and rest == ""


@settings(deadline=None)
@given(st.binary(max_size=40), CUTS)
def test_bytes_that_are_no_text_come_as_the_whole_would(data, cuts):
    known = [byte for byte in data if byte in ID_OF_BYTE]
    ids = [ID_OF_BYTE[byte] for byte in known]
    shown, rest = through(TextStream(TOKENIZER.decode), pieces_of(ids, cuts))
    assert "".join(shown) + rest == bytes(known).decode("utf-8", "replace")


def test_each_character_comes_with_its_last_byte():
    ids = TOKENIZER.encode_plain("aö€😀")
    shown, rest = through(TextStream(TOKENIZER.decode), [[i] for i in ids])
    assert shown == ["a", "", "ö", "", "", "€", "", "", "", "😀"] and rest == ""


def test_endless_rubbish_is_neither_held_back_nor_kept():
    stream = TextStream(TOKENIZER.decode)
    broken = ID_OF_BYTE[0xC3]
    shown = [stream.push([broken]) for _ in range(500)]
    assert sum(map(len, shown)) > 480
    assert len(stream._ids) < 20
    assert "".join(shown) + stream.finish() == "\ufffd" * 500


def test_long_answers_are_not_kept():
    stream = TextStream(TOKENIZER.decode)
    for _ in range(1000):
        stream.push(TOKENIZER.encode_plain("word "))
    assert len(stream._ids) <= 10


def test_a_decoder_that_drops_the_first_space_loses_none_inside():
    words = {"▁Hello": 0, "▁you": 1, "▁there": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="▁you"))
    tokenizer.decoder = decoders.Metaspace()

    shown, rest = through(TextStream(tokenizer.decode), [[0], [1], [2]])
    assert shown == ["Hello", " you", " there"] and rest == ""


def test_special_tokens_are_not_shown():
    ids = [TOKENIZER.special_tokens["]~b]"], *TOKENIZER.encode_plain("a"), 10**6]
    assert TOKENIZER.decode(ids) == "a"


STOPPED = [
    ("abcSTOPdef", ["STOP"], "abc"),
    ("abc", ["STOP"], "abc"),
    ("STOPabc", ["STOP"], ""),
    ("abcSTO", ["STOP"], "abcSTO"),
    ("aSSTOPb", ["STOP"], "aS"),
    ("xabcdy", ["abcd", "bc"], "xa"),  # the first to be complete
    ("xabcy", ["abc", "bc"], "x"),  # both at once: the longer
    ("aababc", ["abc"], "aab"),
    ("ö😀e", ["😀"], "ö"),
]


@pytest.mark.parametrize(("text", "stops", "shown"), STOPPED)
def test_stop_strings_end_the_text_before_them_wherever_it_is_cut(text, stops, shown):
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            filter = StopFilter(stops)
            got = ""
            for piece in (text[:first], text[first:second], text[second:]):
                got += filter.push(piece)
                if filter.stopped:
                    break
            assert filter.stopped == (shown != text)
            assert got + filter.finish() == shown


@settings(deadline=None)
@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.sets(st.integers(0, 12)),
)
def test_pieces_do_not_change_where_a_text_stops(text, stops, cuts):
    whole = StopFilter(stops)
    expected = "".join(whole.push(letter) for letter in text if not whole.stopped)
    expected += whole.finish()
    cut = StopFilter(stops)
    got = "".join(cut.push(piece) for piece in pieces_of(text, cuts) if not cut.stopped)
    assert got + cut.finish() == expected and cut.stopped == whole.stopped
    assert not any(stop in expected for stop in stops)


def test_only_what_may_become_a_stop_string_is_held_back():
    filter = StopFilter(["\n\n", "END"])
    assert filter.push("one\n") == "one"
    assert filter.push("two E") == "\ntwo "
    assert filter.push("N") == ""
    assert filter.push("T") == "ENT"


@pytest.mark.parametrize("token", [*CHAT_TOKENS, "]<]image[>["])
def test_special_strings_in_plain_text_are_letters(token):
    ids = TOKENIZER.encode_plain(f"a{token}b")
    assert not set(ids) & set(TOKENIZER.special_tokens.values())
    assert TOKENIZER.decode(ids) == f"a{token}b"


def test_a_vocabulary_that_cannot_spell_a_special_string_refuses_it():
    """Where the string is also an ordinary word, its letters merge to the special token's id."""
    content = json.loads(tokenizer_json(words=["image"]))
    merged = content["model"]["vocab"]["image"]
    content["added_tokens"] = [{**content["added_tokens"][0], "id": merged, "content": "image"}]
    tokenizer = TextTokenizer(json.dumps(content))
    assert tokenizer.special_tokens == {"image": merged}
    assert len(tokenizer.encode_plain("imag")) == 1
    with pytest.raises(PromptMismatch, match="reserves"):
        tokenizer.encode_plain("an image")


def test_settings_for_training_do_not_cut_or_fill_a_prompt():
    content = json.loads(tokenizer_json())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    assert len(TextTokenizer(json.dumps(content)).encode_plain("x" * 50)) == 50


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": 1}'])
def test_what_is_no_tokenizer_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        TextTokenizer(text)


def test_a_folder_without_a_tokenizer_is_a_value_error(tmp_path):
    with pytest.raises(ValueError, match=r"must hold tokenizer\.json"):
        TextTokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    assert TextTokenizer.from_folder(tmp_path).encode_plain("ab") == TOKENIZER.encode_plain("ab")
