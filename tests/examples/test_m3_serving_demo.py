"""The demo's second part can fail; its side of the comparison is held to the golden values."""

import contextlib
import copy
import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")
pytest.importorskip("av")
sys.path.insert(0, str(Path(__file__).with_name("gateway")))

from gateway_media import FAMILY, GEOMETRY, GOLDEN, normalise, pattern
from tokenizers import Tokenizer

from examples.m3_serving import demo_media
from examples.m3_serving.demo_checkpoint import SPECIALS, VIDEO, byte_letters, byte_tokenizer
from examples.m3_serving.gateway.pixels import PatchWriter
from examples.m3_serving.gateway.protocols import MediaOptions


def gateways_patches(frames):
    writer = PatchWriter(len(frames), *frames[0].shape[:2], GEOMETRY)
    for index, frame in enumerate(frames):
        writer.put(index, frame)
    return normalise(writer.finish()), list(writer.grid)


def test_the_clips_reference_is_what_the_golden_values_pin():
    """Three frames need no resizing, so that the golden tensor is that of either resampler."""
    golden = next(clip for clip in GOLDEN["videos"] if clip["grid_thw"] == [2, 4, 4])
    clip = np.stack([pattern(56, 56, t) for t in range(3)])
    pinned, _ = gateways_patches(list(clip))
    assert hashlib.sha256(pinned.tobytes()).hexdigest() == golden["sha_f32"]
    rows, grid = demo_media.clip_patches_of(clip)
    assert grid == [2, 4, 4]
    np.testing.assert_allclose(rows.numpy(), pinned, atol=1e-6)
    # The demo's own clip: more than one segment, an odd number of frames.
    clip = demo_media.moving_square()
    rows, grid = demo_media.clip_patches_of(clip)
    pinned, own_grid = gateways_patches(list(clip))
    assert grid == own_grid == [5, 8, 10]
    np.testing.assert_allclose(rows.numpy(), pinned, atol=1e-6)


def test_the_images_reference_has_the_gateways_grid():
    rows, grid = demo_media.patches_of(demo_media.picture(1))
    height, width = FAMILY.sizing("image", MediaOptions()).size(300, 420)
    assert grid == [1, height // 14, width // 14] and rows.shape == (grid[1] * grid[2], 1176)


def test_prompts_have_a_placeholder_for_every_row():
    for ask in demo_media.requests().values():
        ids, inputs = demo_media.prompt_of(ask)
        pixels = [value for name, value in inputs.items() if name.startswith("pixel")]
        rows = sum(len(value) for value in pixels)
        assert sum(token in (VIDEO, VIDEO - 1) for token in ids) == rows // 4
        for name, value in inputs.items():
            if name.endswith("grid_thw"):
                assert int(value.prod(-1).sum()) == rows


def test_the_tokenizer_writes_every_byte_differently():
    tokenizer = Tokenizer.from_str(byte_tokenizer())
    text = "bytes are tokens, also in ünïcöde: 漢\n"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert {tokenizer.token_to_id(token): token for token in SPECIALS} == {
        index: token for token, index in SPECIALS.items()
    }
    every = list(range(263))
    assert tokenizer.decode(every) == demo_media.text_of(every) == "".join(byte_letters())
    assert len(set(byte_letters())) == 256


REFERENCES = {
    name: ([1, 2, 3], [ord(name[0]), 65], 0.5) for name in ("text", "image", "other image", "clip")
}


def answer(tokens, prompt=3, cached=0):
    details = {"cached_tokens": cached, "image_tokens": 1, "video_tokens": 0}
    return {
        "choices": [{"message": {"content": demo_media.text_of(tokens)}}],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": len(tokens),
            "prompt_tokens_details": details,
        },
    }


def good_answers():
    answers = {name: answer(tokens) for name, (_, tokens, _) in REFERENCES.items()}
    return answers | {"image again": answer(REFERENCES["image"][1], cached=128)}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("clip", answer([67, 65]), "clip: the answer to 3 tokens must be 2 tokens, 'cA'"),
        ("text", answer([ord("t"), 65, 260]), "got 3 to 3"),  # a token that leaves no trace
        ("image", answer([ord("i"), 65], prompt=4), "got 2 to 4"),
        ("image again", answer([ord("i"), 65], cached=0), "from the prefix cache, got none"),
    ],
)
def test_what_differs_is_named(name, change, message):
    _, failures = demo_media.check_and_tabulate(good_answers(), REFERENCES)
    assert failures == []
    _, (failure,) = demo_media.check_and_tabulate({**good_answers(), name: change}, REFERENCES)
    assert message in failure


def test_an_image_without_influence_is_a_failure():
    references = copy.deepcopy(REFERENCES)
    references["other image"] = references["image"]
    answers = good_answers() | {"other image": answer(REFERENCES["image"][1])}
    _, failures = demo_media.check_and_tabulate(answers, references)
    assert failures == ["images: another image must give another answer, got the same tokens"]


def test_a_process_that_does_not_start_says_why(tmp_path):
    with contextlib.ExitStack() as stack:
        servers = demo_media.Servers(stack, tmp_path)
        with pytest.raises(RuntimeError, match=r"(?s)worker did not start.*must hold config.json"):
            servers.url()


def test_reference_patches_do_not_come_from_the_gateway(monkeypatch):
    """Else the demo would compare the gateway with itself."""
    monkeypatch.setitem(sys.modules, "examples.m3_serving.gateway", None)
    rows, _ = demo_media.patches_of(demo_media.picture(3, 56, 56))
    assert rows.dtype == torch.float32
