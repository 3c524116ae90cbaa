"""Media from request to prepared items; content keys; the skeleton's independence."""

import ast
import asyncio
import base64
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("av")
pytest.importorskip("PIL")

from gateway_media import FAMILY, LetterTokenizer, clip_bytes, image_bytes, pattern

from examples.m3_serving.gateway.errors import (
    GatewayError,
    InvalidMedia,
    InvalidParameter,
    TooManyItems,
    WorkerRejected,
    error_from_code,
)
from examples.m3_serving.gateway.expand import Expander
from examples.m3_serving.gateway.families import MiniMaxM3Family, Qwen2VLFamily, default_registry
from examples.m3_serving.gateway.fetch import HttpFetcher
from examples.m3_serving.gateway.job_spec import make_job
from examples.m3_serving.gateway.pipeline import MediaPipeline, content_key
from examples.m3_serving.gateway.pool import DecodePool
from examples.m3_serving.gateway.protocols import (
    Decoded,
    MediaItem,
    MediaOptions,
    MediaSlot,
    MediaSource,
    TemplateText,
    UserText,
)
from examples.m3_serving.gateway.registry import FamilyRegistry

PACKAGE = Path(sys.modules[MediaPipeline.__module__].__file__).parent
IMAGE = image_bytes(pattern(480, 640))
CLIP = clip_bytes((pattern(48, 64, t) for t in range(30)), 10)


def item(data, modality="image", **options):
    return MediaItem(modality, MediaSource(data=data), MediaOptions(**options))


def prepare(items, family=FAMILY):
    async def main():
        pool = DecodePool(2)
        try:
            return await MediaPipeline(family, HttpFetcher(), pool).prepare(items)
        finally:
            await pool.close()

    return asyncio.run(main())


def test_a_request_end_to_end():
    url = "data:image/png;base64," + base64.b64encode(IMAGE).decode()
    items = [
        MediaItem("image", MediaSource(url=url)),
        item(CLIP, "video", fps=2),
        item(IMAGE, max_long_side_pixel=252),
    ]
    prepared = prepare(items)
    assert [medium.grid for medium in prepared] == [(1, 34, 46), (3, 4, 4), (1, 14, 18)]
    assert [medium.tokens for medium in prepared] == [391, 12, 63]
    assert prepared[1].timestamps == (0.0, 0.5, 1.0, 1.5, 2.0, 2.5)
    assert all(medium.patches.dtype == np.uint8 for medium in prepared)
    tokenizer = LetterTokenizer([*FAMILY.placeholder_tokens, *FAMILY.bracket_tokens])
    parts = [TemplateText("a"), MediaSlot(0), UserText("b"), MediaSlot(1), MediaSlot(2)]
    prompt = Expander(FAMILY, tokenizer).expand(parts, prepared, 10_000)
    for medium, frames in zip(prompt.items, (1, 2, 1), strict=True):
        assert sum(length for _, length in medium.placeholders) == medium.tokens
        assert medium.patches.shape == (4 * medium.tokens, frames * 588)
    assert [len(medium.placeholders) for medium in prompt.items] == [1, 3, 1]


def test_second_family_goes_through_the_same_skeleton():
    image, clip = prepare([item(IMAGE), item(CLIP, "video")], Qwen2VLFamily())
    assert image.grid == (1, 34, 46)
    # 128 tokens a frame at least: the family's own bounds.
    assert clip.grid[1] * clip.grid[2] >= 4 * 128 and clip.grid[0] == 3


def test_equal_items_are_decoded_once_and_counted_each(monkeypatch):
    decoded = []
    run = DecodePool.run

    async def counting(self, job, data):
        decoded.append(job)
        return await run(self, job, data)

    monkeypatch.setattr(DecodePool, "run", counting)
    prepared = prepare([item(IMAGE), item(IMAGE), item(IMAGE, max_long_side_pixel=252)])
    assert len(decoded) == 2
    assert prepared[0] is prepared[1] and prepared[2].content_key != prepared[0].content_key


@pytest.mark.parametrize(("modality", "limit"), [("image", 200), ("video", 20)])
def test_one_item_too_many_is_refused_before_fetching(modality, limit):
    class NeverFetched:
        async def fetch_all(self, items, limits, hold):
            raise AssertionError("fetched")

    pipeline = MediaPipeline(FAMILY, NeverFetched(), pool=None)
    items = [MediaItem(modality, MediaSource(url="http://host/"))] * (limit + 1)
    with pytest.raises(TooManyItems, match=f"{limit} {modality}s, got {limit + 1}"):
        asyncio.run(pipeline.prepare(items))
    with pytest.raises(AssertionError, match="fetched"):
        asyncio.run(pipeline.prepare(items[1:]))
    with pytest.raises(InvalidParameter):
        asyncio.run(pipeline.prepare([item(b"x", "video", fps=100)]))


def test_fps_of_an_image_is_refused():
    with pytest.raises(InvalidParameter, match="clips"):
        prepare([item(IMAGE, fps=1)])


def test_an_error_of_one_item_is_the_requests():
    with pytest.raises(InvalidMedia):
        prepare([item(IMAGE), item(b"<html>"), item(CLIP, "video")])


def test_a_wrong_modality_is_refused():
    with pytest.raises(InvalidMedia):
        prepare([item(CLIP)])
    with pytest.raises(InvalidMedia):
        prepare([item(IMAGE, "video")])


DECODED = Decoded(np.zeros((4, 0), np.uint8), (1, 2, 2), (0, 30), (0.0, 1.0), "1;pillow=13")


def job(modality="video", family=FAMILY, **options):
    options = MediaOptions(**options)
    sampler = family.sampler(options) if modality == "video" else None
    sizing = family.sizing(modality, options)
    return make_job(modality, family.geometry, sizing, sampler, family.limits)


def test_whatever_changes_the_tensor_changes_the_key():
    keys = [
        content_key("aa", job(), DECODED),
        content_key("ab", job(), DECODED),
        content_key("aa", job(fps=2), DECODED),
        content_key("aa", job(max_long_side_pixel=504), DECODED),
        content_key("aa", job(family=MiniMaxM3Family(keep_last=True)), DECODED),
        content_key("aa", job(family=MiniMaxM3Family(default_sizing="long_side")), DECODED),
        content_key("aa", job("image"), DECODED),
        content_key("aa", job(family=Qwen2VLFamily(), fps=1), DECODED),
        content_key("aa", job(), replace(DECODED, indices=(0, 31))),
        content_key("aa", job(), replace(DECODED, processor="2;pillow=13")),
        content_key("aa", job(), replace(DECODED, processor="1;pillow=14")),
    ]
    assert len(set(keys)) == len(keys)


def test_what_does_not_change_the_tensor_does_not_change_the_key():
    key = content_key("aa", job(), DECODED)
    assert content_key("aa", job(fps=1), DECODED) == key  # the default, said aloud
    limited = {**job(), "limits": {"video_pixels": 1}}
    assert content_key("aa", limited, DECODED) == key


def test_same_bytes_at_another_fps_have_another_key():
    slow, fast = prepare([item(CLIP, "video", fps=1), item(CLIP, "video", fps=2)])
    assert slow.content_key != fast.content_key
    # Even where both fall on the same frames: the stamps' policy is another.
    still = clip_bytes([pattern(56, 56)], Fraction(1))
    a, b = prepare([item(still, "video", fps=1), item(still, "video", fps=2)])
    np.testing.assert_array_equal(a.patches, b.patches)
    assert a.content_key != b.content_key


def test_registry_matches_exactly_and_refuses_duplicates():
    registry = default_registry()
    assert registry.names() == ["minimax_m3_vl", "qwen2_vl"]
    assert isinstance(registry.get("minimax_m3_vl"), MiniMaxM3Family)
    for name in ("minimax_m3", "minimax_m3_vl_2", "MiniMax_M3_VL", "qwen2", "qwen2_5_vl", ""):
        with pytest.raises(KeyError, match="registered: minimax_m3_vl, qwen2_vl"):
            registry.get(name)
    with pytest.raises(ValueError, match="already"):
        registry.register(MiniMaxM3Family())
    with pytest.raises(KeyError, match="registered: none"):
        FamilyRegistry().get("qwen2_vl")


def test_every_error_is_a_4xx_or_says_whose_fault_it_is():
    errors = GatewayError.__subclasses__()
    assert not any(error.__subclasses__() for error in errors)
    assert len({error.code for error in errors}) == len(errors) > 10
    for error in errors:
        others_fault = ("media_timeout", "worker_lost", "worker_unavailable", "worker_timeout")
        others_fault += ("shutting_down", "internal_error")
        assert 400 <= error.status < 500 or error.code in others_fault
        body = error("text", param="fps").to_openai()["error"]
        assert body["message"] == "text" and body["param"] == "fps" and body["code"] == error.code
        assert type(error_from_code(error.code, "x")) is error
    assert type(error_from_code(["?"], "x")) is InvalidMedia
    # What gateway and worker disagree about is not the client's mistake.
    assert (WorkerRejected("x", internal=True).status, WorkerRejected("x").status) == (500, 400)
    assert WorkerRejected("x", internal=True).to_openai()["error"]["type"] == "server_error"


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_the_skeleton_names_no_model_and_imports_no_engine(path):
    text = path.read_text().lower()
    for name in ("minimax", "qwen", "m3_vl", "]<]", "<|"):
        assert name not in text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert node.level < 2 and "families" not in (node.module or "")
            assert not (node.level == 0 and node.module.startswith(("torch", "examples", "msa")))
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & {"torch", "msa_kernels"}


def test_the_gateways_own_process_loads_no_decoder_and_no_torch():
    """Started by folder, as the pool starts its children, so that nothing else is imported."""
    script = (
        f"import sys; sys.path.append({str(PACKAGE.parent)!r})\n"
        f"import {PACKAGE.name}.pipeline, {PACKAGE.name}.fetch, {PACKAGE.name}.expand\n"
        f"import {PACKAGE.name}.families\n"
        "print(sorted({'torch', 'av', 'PIL', 'msa_kernels'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_the_engine_beside_it_is_loaded_on_use_only():
    script = (
        f"import sys; sys.path.insert(0, {str(PACKAGE.parents[2])!r})\n"
        "import examples.m3_serving.gateway.pipeline\n"
        "print(sorted({'torch', 'msa_kernels'} & set(sys.modules)))\n"
        "from examples.m3_serving import *\n"
        "print(Engine.__module__, Request.__module__)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    first, second = result.stdout.splitlines() or (result.stderr, "")
    assert first == "[]"
    assert second == "examples.m3_serving.engine examples.m3_serving.scheduler", result.stderr
