"""Images and clips in the engine: equal to transformers, however the steps cut through them."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from examples.m3_serving import SamplingParams
from examples.m3_serving.cache import page_key
from examples.m3_serving.media import FeatureCache, Medium, PromptMedia
from examples.m3_serving.scheduler import State
from examples.m3_serving.vision import VisionConfig, segments_of
from tests.examples.conftest import IMAGE_ID, VIDEO_ID, transformers_answer

START, END = 260, 261
NEW = 12
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=3)


def make_medium(offset_spans, grid, seed, key=None):
    draw = torch.Generator().manual_seed(seed)
    rows = grid[0] * grid[1] * grid[2]
    patches = torch.randint(0, 256, (rows, 1176), generator=draw, dtype=torch.uint8)
    return Medium(key or f"{seed}:{grid}", tuple(offset_spans), patches, grid)


class Prompt:
    """Text and media in order; media as ("image" or "video", grid, seed)."""

    def __init__(self, *parts):
        self.ids, self.media, self.kinds = [], [], []
        for part in parts:
            if isinstance(part, int):  # so much text
                draw = torch.Generator().manual_seed(part)
                self.ids += torch.randint(0, 256, (part,), generator=draw).tolist()
                continue
            kind, grid, seed = part
            token = IMAGE_ID if kind == "image" else VIDEO_ID
            spans = []
            for _ in range(grid[0]):
                self.ids.append(START)
                spans.append((len(self.ids), grid[1] * grid[2] // 4))
                self.ids += [token] * spans[-1][1]
                self.ids.append(END)
            self.media.append(make_medium(spans, grid, seed))
            self.kinds.append(kind)

    def for_transformers(self, tower) -> dict:
        inputs = {}
        for kind, pixels, grids in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        ):
            media = [m for m, k in zip(self.media, self.kinds, strict=True) if k == kind]
            if media:
                inputs[pixels] = torch.cat([tower.normalise(m.patches) for m in media])
                inputs[grids] = torch.tensor([row for m in media for row in segments_of(m.grid)])
        return inputs


IMAGE, OTHER_IMAGE = ("image", (1, 14, 20), 1), ("image", (1, 14, 20), 2)  # 70 tokens
CLIP = ("video", (5, 4, 6), 3)  # 5 times 6 tokens and brackets, two segments
PROMPTS = {
    "image": Prompt(90, IMAGE, 40),
    "other image": Prompt(90, OTHER_IMAGE, 40),
    "clip": Prompt(7, CLIP, 30),
    "both": Prompt(60, IMAGE, 5, CLIP, ("image", (1, 10, 22), 4), 200),
    "first": Prompt(IMAGE, 3),
}


@pytest.fixture(scope="module")
def reference(media_oracle, media_engine):
    """Greedy answers of transformers."""
    tower = media_engine(cache_tokens=128).tower
    return {
        name: transformers_answer(media_oracle, prompt.ids, NEW, **prompt.for_transformers(tower))
        for name, prompt in PROMPTS.items()
    }


def add(engine, prompt, **options):
    options = {"max_new_tokens": NEW, "ignore_eos": True} | options
    return engine.add_request(prompt.ids, media=prompt.media, **options)


def serve(engine, *prompts, **options):
    requests = [add(engine, prompt, **options) for prompt in prompts]
    while engine.has_work:
        engine.step()
    assert engine.pool.held == 0 and not any(request.features for request in requests)
    return requests


@pytest.mark.parametrize("name", PROMPTS)
def test_answers_are_those_of_transformers(media_engine, reference, name):
    engine = media_engine(cache_tokens=1024, max_step_tokens=1024)
    (request,) = serve(engine, PROMPTS[name])
    assert request.generated == reference[name]


def test_logits_are_those_of_transformers(media_engine, media_oracle):
    """The whole forward pass on text, images and a clip; tokens alone would hide small faults."""
    prompt = PROMPTS["both"]
    engine = media_engine(cache_tokens=1024, max_step_tokens=1024)
    seen = []
    logits = media_oracle(
        torch.tensor([prompt.ids]), **prompt.for_transformers(engine.tower)
    ).logits[0, -1]
    engine.model = Recorder(engine.model, seen)
    serve(engine, prompt, max_new_tokens=1)
    torch.testing.assert_close(seen[0][0], logits, atol=2e-4, rtol=2e-4)


class Recorder:
    """A model that keeps its logits."""

    def __init__(self, inner, seen):
        self.inner, self.seen = inner, seen

    def forward(self, *arguments):
        self.seen.append(self.inner.forward(*arguments))
        return self.seen[-1]

    def __getattr__(self, name):
        return getattr(self.inner, name)


def test_another_image_or_other_frames_give_another_answer(reference):
    """The two prompts are the same token ids."""
    assert PROMPTS["image"].ids == PROMPTS["other image"].ids
    assert reference["image"] != reference["other image"]


def test_order_of_rows_and_time_matters(media_engine, reference):
    def shuffled(medium):
        return dataclasses.replace(medium, key="x", patches=medium.patches.flip(0))

    for name in ("image", "clip"):
        prompt = PROMPTS[name]
        engine = media_engine(cache_tokens=1024)
        request = engine.add_request(
            prompt.ids, media=[shuffled(prompt.media[0])], max_new_tokens=NEW, ignore_eos=True
        )
        while engine.has_work:
            engine.step()
        assert request.generated != reference[name]


@pytest.mark.parametrize(
    ("name", "step_tokens"),
    [("image", 1), *[(name, n) for name in ("image", "both") for n in (13, 64, 100, 128, 157)]],
)
def test_a_step_may_cut_through_an_image(media_engine, reference, name, step_tokens):
    engine = media_engine(cache_tokens=1024, max_step_tokens=step_tokens, feature_bytes=0)
    prompt = PROMPTS[name]
    request = add(engine, prompt)
    cut = 0
    while engine.has_work:
        engine.step()
        inside = any(o < request.num_computed < o + n for m in prompt.media for o, n in m.spans)
        cut += inside
        # Held while it is needed and no longer; each tower run happens once, cache or not.
        assert set(request.features) == {
            index
            for index, medium in enumerate(prompt.media)
            if medium.spans[0][0] < request.num_computed < request.media.ends[index]
        }
    assert request.generated == reference[name]
    assert engine.features.misses == len(prompt.media)
    assert cut or step_tokens > 100


def test_requests_with_media_share_steps(media_engine, reference):
    engine = media_engine(cache_tokens=4096, max_step_tokens=150)
    requests = serve(engine, *PROMPTS.values())
    assert [request.generated for request in requests] == list(reference.values())


def test_preempted_requests_see_their_media_again(media_engine, reference):
    names = ["image", "other image", "clip"]
    for feature_bytes in (0, 1 << 20):
        engine = media_engine(cache_tokens=384, max_step_tokens=500, feature_bytes=feature_bytes)
        wanted = {"max_new_tokens": 70}
        requests = serve(engine, *(PROMPTS[name] for name in names), **wanted)
        assert sum(request.statistics.preemptions for request in requests) > 0
        for name, request in zip(names, requests, strict=True):
            (alone,) = serve(media_engine(cache_tokens=1024), PROMPTS[name], **wanted)
            assert request.generated == alone.generated
            assert request.generated[:NEW] == reference[name]


def test_a_request_preempted_in_the_middle_of_an_image(media_engine, reference):
    """An older request's growth takes the pages of one whose image is half computed."""
    text = Prompt(122)
    # 3 pages: the text has one and will need a second, the image's prompt takes two.
    engine = media_engine(cache_tokens=384, max_step_tokens=20, feature_bytes=0)
    first = add(engine, text, max_new_tokens=12)
    while first.num_remaining > 1:
        engine.step()
    second = add(engine, PROMPTS["image"])
    middle = False
    while engine.has_work:
        before = bool(second.features) and second.statistics.preemptions == 0
        engine.step()
        middle |= before and second.statistics.preemptions == 1
    assert second.statistics.preemptions == 1 and middle
    assert second.generated == reference["image"]
    assert engine.features.misses == 2  # nothing kept it: it was computed again


def test_aborting_frees_pages_and_features(media_engine):
    engine = media_engine(cache_tokens=1024, max_step_tokens=100)
    request = add(engine, PROMPTS["image"])
    engine.step()
    assert request.features and engine.pool.held
    engine.abort(request)
    assert request.state is State.FINISHED and not request.features and not engine.pool.held


def test_the_same_image_is_reused_and_another_is_not(media_engine, reference):
    """Both prompts are the same token ids: the page's key must tell them apart."""
    engine = media_engine(cache_tokens=2048)
    for name, cached, misses in (
        ("image", 0, 1),
        ("image", 128, 1),
        ("other image", 0, 2),
        ("other image", 128, 2),
        ("image", 128, 2),
    ):
        (request,) = serve(engine, PROMPTS[name])
        assert request.generated == reference[name]
        assert request.statistics.cached_tokens == cached
        assert engine.features.misses == misses


def test_a_medium_that_lies_in_cached_pages_is_not_computed_at_all(media_engine, reference):
    engine = media_engine(cache_tokens=2048, feature_bytes=0)
    long = Prompt(20, IMAGE, 60)
    first, second = serve(engine, long)[0], serve(engine, long)[0]
    assert second.statistics.cached_tokens == 128
    assert engine.features.misses == 1 and first.generated == second.generated


def test_text_before_an_image_is_shared_whatever_the_image(media_engine):
    engine = media_engine(cache_tokens=2048)
    serve(engine, Prompt(140, IMAGE, 9))
    (request,) = serve(engine, Prompt(140, OTHER_IMAGE, 9))
    assert request.statistics.cached_tokens == 128


def test_a_sampled_answer_does_not_depend_on_company(media_engine):
    (alone,) = serve(media_engine(cache_tokens=1024), PROMPTS["clip"], sampling=SAMPLED)
    engine = media_engine(cache_tokens=2048, max_step_tokens=33)
    together = serve(engine, PROMPTS["image"], PROMPTS["clip"], sampling=SAMPLED)
    assert together[1].generated == alone.generated


def test_page_keys_name_content_row_place_and_length():
    tokens = [IMAGE_ID] * 128
    names = [
        (),
        [("a", 0, 0, 128)],
        [("b", 0, 0, 128)],
        [("a", 1, 0, 128)],
        [("a", 0, 1, 127)],
        [("a", 0, 0, 127)],
        [("a", 0, 0, 64), ("a", 0, 64, 64)],
        [("a", 0, 0, 64), ("b", 0, 64, 64)],
        [("b", 0, 0, 64), ("a", 0, 64, 64)],
    ]
    assert len({page_key(b"", tokens, name) for name in names}) == len(names)
    assert page_key(b"", tokens, ()) == page_key(b"", tokens)


def test_pieces_cut_spans_at_both_sides():
    media = PromptMedia(
        [make_medium([(2, 3), (7, 3)], (2, 2, 6), 0, "a"), make_medium([(12, 4)], (1, 4, 4), 1)], 20
    )
    cut = [(p.medium, p.row, p.position, p.count) for p in media.pieces(3, 14)]
    assert cut == [(0, 1, 3, 2), (0, 3, 7, 3), (1, 0, 12, 2)]
    assert media.names(8, 9) == [("a", 4, 0, 1)]
    assert media.pieces(5, 7) == media.pieces(16, 20) == media.pieces(0, 2) == []
    assert media.ends == [10, 16]
    every = [p for i in range(20) for p in media.pieces(i, i + 1)]
    assert [p.position for p in every] == [2, 3, 4, 7, 8, 9, 12, 13, 14, 15]
    assert [p.row for p in every] == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spans": ((91, 69),)}, r"media\[0\]: spans must hold 70 tokens .*, got 69"),
        ({"spans": ((91, 70), (100, 0))}, "must hold tokens and not overlap"),
        ({"spans": ((91, 40), (100, 30))}, "must hold tokens and not overlap"),
        ({"spans": ((-1, 70),)}, "must hold tokens and not overlap"),
        ({"spans": ((150, 70),)}, "must lie in the prompt of 202 tokens, got one that ends at 220"),
        ({"grid": (1, 7, 40)}, r"media\[0\]: grid must be positive, its sides multiples of 2"),
        ({"grid": (0, 14, 20)}, r"media\[0\]: grid must be positive"),
        ({"grid": (2, 14, 20)}, r"media\[0\]: patches must be \[560, 1176\] .*, got \[280, 1176\]"),
        (
            {"patches": torch.zeros(280, 392, dtype=torch.uint8)},
            r"must be \[280, 1176\] or \[280, 588\] for the grid \(1, 14, 20\), got \[280, 392\]",
        ),
        (
            {"grid": (2, 14, 10), "patches": torch.zeros(280, 588, dtype=torch.uint8)},
            r"must be \[280, 1176\] for the grid \(2, 14, 10\), got \[280, 588\]",
        ),
    ],
)
def test_media_that_do_not_fit_are_refused(media_engine, change, message):
    engine = media_engine(cache_tokens=1024)
    prompt = PROMPTS["image"]
    medium = dataclasses.replace(prompt.media[0], **change)
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt.ids, media=[medium])
    assert not engine.has_work


def test_an_engine_without_a_tower_refuses_media(media_engine):
    with pytest.raises(ValueError, match="no vision tower"):
        add(media_engine(tower=None, cache_tokens=1024), PROMPTS["image"])


def test_features_are_kept_within_a_bound_of_bytes():
    cache, made = FeatureCache(100), []

    def get(key, num_bytes):
        def make():
            made.append(key)
            return torch.zeros(num_bytes, dtype=torch.uint8)

        assert cache.get(key, make).nbytes == num_bytes
        assert cache.num_bytes <= 100

    for key, size in [("a", 40), ("b", 40), ("a", 40), ("c", 40), ("a", 40), ("b", 40)]:
        get(key, size)
    assert made == ["a", "b", "c", "b"]  # `b` was the oldest use when `c` came
    get("large", 101)
    get("large", 101)
    assert made[-2:] == ["large", "large"] and cache.num_bytes == 80
    assert (cache.hits, cache.misses) == (2, 6)


def test_uint8_and_normalised_patches_give_the_same_features(media_engine):
    tower = media_engine(cache_tokens=128).tower
    medium = PROMPTS["clip"].media[0]
    floats = tower.normalise(medium.patches)
    assert torch.equal(tower.encode(medium.patches, medium.grid), tower.encode(floats, medium.grid))


def test_an_image_may_come_with_its_frame_once(media_engine):
    """As pixels and as numbers: features to the bit of those with the frame twice."""
    tower = media_engine(cache_tokens=128).tower
    medium = PROMPTS["image"].media[0]
    once = medium.patches.view(-1, 3, 2, 196)[:, :, :1]
    twice = once.expand(-1, -1, 2, -1).flatten(1)
    once = once.flatten(1)
    wanted = tower.encode(twice, medium.grid)
    assert torch.equal(tower.encode(once, medium.grid), wanted)
    floats = tower.normalise(once).view(-1, 3, 2, 196)[:, :, 0].flatten(1)
    assert floats.shape == (280, 588)
    assert torch.equal(tower.encode(floats, medium.grid), wanted)
    prompt = PROMPTS["image"]
    answers = []
    for patches in (once, twice):
        engine = media_engine(cache_tokens=1024)
        media = [dataclasses.replace(medium, patches=patches)]
        request = engine.add_request(prompt.ids, media=media, max_new_tokens=NEW, ignore_eos=True)
        while engine.has_work:
            engine.step()
        answers.append(request.generated)
    assert answers[0] == answers[1]


def test_segments_are_the_reference_processors():
    golden = Path(__file__).with_name("gateway") / "golden.json"
    for clip in json.loads(golden.read_text())["videos"]:
        assert list(map(list, segments_of(tuple(clip["grid_thw"])))) == clip["hf_chunk_rows"]
    assert segments_of((9, 2, 6)) == [(4, 2, 6), (4, 2, 6), (1, 2, 6)]


def test_vision_config(media_checkpoint):
    config = VisionConfig.from_folder(media_checkpoint)
    assert (config.image_token_id, config.video_token_id) == (IMAGE_ID, VIDEO_ID)
    assert (config.frame_width, config.row_width) == (588, 1176)
