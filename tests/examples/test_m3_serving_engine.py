"""The engine's answers: equal to transformers', whatever else happens around a request."""

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from examples.m3_serving import Engine, SamplingParams
from examples.m3_serving.config import DENSE_ATTENTION
from examples.m3_serving.demo_reference import load_reference
from examples.m3_serving.model import Model
from examples.m3_serving.scheduler import State
from tests.examples.conftest import NEW_TOKENS, transformers_answer

DRAWN = SamplingParams(temperature=1.0, top_p=0.9, seed=11)


def serve(engine, texts, **options):
    options = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True} | options
    return engine.generate(texts, **options)


@pytest.fixture(scope="session")
def oracle(checkpoints):
    return load_reference(checkpoints["released"])


@pytest.mark.parametrize("name", ["one", "edge", "a", "b", "c", "d"])
def test_answers_are_those_of_transformers(oracle, texts, answers, name):
    assert answers[name] == transformers_answer(oracle, texts[name], NEW_TOKENS)


def test_selection_and_experts_matter_to_these_answers(model, texts, answers):
    """If all blocks, or another expert, gave the same tokens, the tests here would prove little."""
    changes = {
        "layer_types": (DENSE_ATTENTION,) * 3,
        "experts_per_token": 1,
        "rotary_dim": 128,
        "swiglu_alpha": 1.0,
        "local_blocks": 0,
        "init_blocks": 1,
    }
    for field, value in changes.items():
        changed = Model(dataclasses.replace(model.config, **{field: value}), model.weights)
        (request,) = serve(Engine(changed, cache_tokens=1024), [texts["b"]])
        assert request.generated != answers["b"], field


@pytest.mark.parametrize("step_tokens", [1, 7, 64, 128, 200, 513])
def test_chunks_of_any_size_give_the_same_tokens(make_engine, texts, answers, step_tokens):
    name = "a" if step_tokens == 1 else "b"
    engine = make_engine(cache_tokens=1024, max_step_tokens=step_tokens)
    (request,) = serve(engine, [texts[name]])
    assert request.generated == answers[name]
    assert engine.num_steps == -(-len(texts[name]) // step_tokens) + NEW_TOKENS - 1


def test_requests_served_together_get_the_answers_they_get_alone(make_engine, texts, answers):
    engine = make_engine(cache_tokens=4096, max_step_tokens=150)
    requests = serve(engine, list(texts.values()))
    assert [request.generated for request in requests] == list(answers.values())
    assert engine.pool.held == 0


def test_preempted_requests_lose_nothing(make_engine, texts, answers):
    engine = make_engine(cache_tokens=640, max_step_tokens=600)
    names = ["edge", "a", "d"]
    texts = [texts[name] + answers[name][:4] for name in names]  # so that all grow over an edge
    texts[0] = texts[0][:120]
    (alone,) = serve(make_engine(cache_tokens=640, max_step_tokens=600), texts[:1])
    requests = serve(engine, texts, max_new_tokens=NEW_TOKENS - 4)
    filler = serve(make_engine(cache_tokens=384, max_step_tokens=600), texts, max_new_tokens=20)
    assert sum(request.statistics.preemptions for request in filler) > 0
    for result in (requests, filler):
        assert result[0].generated == alone.generated[: NEW_TOKENS - 4]
        assert result[1].generated == answers["a"][4:]
        assert result[2].generated == answers["d"][4:]
    assert engine.pool.held == 0


def test_a_preempted_request_draws_the_same_random_tokens(make_engine, texts):
    prompts = [texts["edge"][:120], texts["edge"][:118], texts["a"][:115]]
    options = {"sampling": DRAWN, "max_new_tokens": 20}
    alone = [serve(make_engine(cache_tokens=512), [prompt], **options)[0] for prompt in prompts]
    together = serve(make_engine(cache_tokens=384), prompts, **options)
    assert sum(request.statistics.preemptions for request in together) > 0
    assert [r.generated for r in together] == [r.generated for r in alone]


def test_a_prefix_is_reused_and_changes_nothing(make_engine, texts, answers):
    engine = make_engine(cache_tokens=2048)
    for name, cached in (("b", 0), ("b", 512), ("c", 256), ("d", 0)):
        (request,) = serve(engine, [texts[name]])
        assert request.generated == answers[name]
        assert request.statistics.cached_tokens == cached
        assert request.statistics.computed_tokens == len(texts[name]) - cached + NEW_TOKENS - 1
    follow_up = texts["b"] + answers["b"] + texts["c"][:200]  # a chat's next turn
    (request,) = serve(engine, [follow_up])
    assert request.statistics.cached_tokens == 512
    (alone,) = serve(make_engine(cache_tokens=2048), [follow_up])
    assert request.generated == alone.generated


def test_reused_pages_are_read_and_not_computed_again(make_engine, texts, answers):
    """Spoiling the cached index keys, or the values, must spoil an answer that reuses them."""
    for spoiled in ("index_k", "v"):
        engine = make_engine(cache_tokens=2048)
        serve(engine, [texts["b"]])
        for cache in engine.caches[1:]:
            getattr(cache, spoiled).neg_()
        (request,) = serve(engine, [texts["b"]])
        assert request.statistics.cached_tokens == 512
        assert request.generated != answers["b"], spoiled


def test_requests_in_flight_share_a_prefix_that_is_done(make_engine, texts, answers):
    engine = make_engine(cache_tokens=1024, max_step_tokens=512)
    options = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    first = engine.add_request(texts["b"], **options)
    engine.step()
    second = engine.add_request(texts["c"], **options)
    while engine.has_work:
        engine.step()
        assert first.state is State.FINISHED or second.pages[:2] in ([], first.pages[:2])
    assert second.statistics.cached_tokens == 256
    assert first.generated == answers["b"]
    assert second.generated == answers["c"]


def test_a_full_cache_makes_requests_wait(make_engine, texts, answers):
    engine = make_engine(cache_tokens=640)
    first, second = serve(engine, [texts["b"], texts["c"]])
    assert second.statistics.started >= first.statistics.finished
    assert (first.generated, second.generated) == (answers["b"], answers["c"])


def test_impossible_requests_are_refused_and_others_go_on(make_engine, texts, answers):
    engine = make_engine(cache_tokens=512, max_step_tokens=100)
    running = engine.add_request(texts["a"], max_new_tokens=NEW_TOKENS, ignore_eos=True)
    engine.step()
    refusals = {
        r"fit into the cache of 4 pages of 128 tokens, got 500 \+ 14 .* 5 pages": ([1] * 500, 14),
        r"at most 4096 tokens \(max_position_embeddings\), got 4096 \+ 1": ([1] * 4096, 1),
        r"prompt must hold at least one token, got none": ([], 1),
        r"prompt must hold token ids 0 to 257, got 258": ([1, 258], 1),
        r"prompt must hold token ids 0 to 257, got -1": ([-1], 1),
        r"max_new_tokens must be at least 1, got 0": ([1], 0),
    }
    for message, (prompt, count) in refusals.items():
        with pytest.raises(ValueError, match=message):
            engine.add_request(prompt, max_new_tokens=count)
    with pytest.raises(ValueError, match="got none"):
        engine.generate([texts["one"], []])
    assert not engine.scheduler.waiting  # nothing of the refused `generate` is left
    while engine.has_work:
        engine.step()
    assert running.generated == answers["a"]
    assert engine.pool.held == 0


@pytest.mark.parametrize("steps", [0, 1, 4, 9])
def test_abort_frees_pages_and_disturbs_nobody(make_engine, texts, answers, steps):
    engine = make_engine(cache_tokens=1024, max_step_tokens=130)
    options = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    kept = engine.add_request(texts["a"], **options)
    aborted = engine.add_request(texts["b"], **options)
    for _ in range(steps):
        engine.step()
    engine.abort(aborted)
    engine.abort(aborted)  # twice is the same as once
    assert aborted.finish_reason == "abort"
    assert engine.pool.held == len(kept.pages)
    while engine.has_work:
        engine.step()
    assert aborted.generated == answers["b"][: len(aborted.generated)]
    assert kept.generated == answers["a"]
    assert engine.pool.held == 0


def test_stop_tokens_end_an_answer_and_are_its_last(make_engine, texts, answers):
    stop = answers["a"][6]
    length = answers["a"].index(stop) + 1
    (request,) = serve(make_engine(), [texts["a"]], stop_ids=[stop])
    assert request.generated == answers["a"][:length]
    assert request.finish_reason == "stop"
    (request,) = serve(make_engine(), [texts["a"]], max_new_tokens=3)
    assert (request.generated, request.finish_reason) == (answers["a"][:3], "length")


def test_the_checkpoints_own_stop_token(make_engine, model, texts, answers):
    stop = answers["a"][6]
    config = dataclasses.replace(model.config, eos_token_ids=frozenset([stop]))
    engine = Engine(Model(config, model.weights))
    stopped, ignored = (
        engine.generate([texts["a"]], max_new_tokens=NEW_TOKENS, ignore_eos=ignore)[0]
        for ignore in (False, True)
    )
    assert stopped.generated == answers["a"][: answers["a"].index(stop) + 1]
    assert ignored.generated == answers["a"]


def test_sampling_is_the_requests_own(make_engine, texts):
    """The same seed gives the same tokens alone, in company, in chunks and from a reused prefix."""
    (alone,) = serve(make_engine(), [texts["a"]], sampling=DRAWN)
    engine = make_engine(max_step_tokens=40)
    together = serve(engine, [texts["b"], texts["a"], texts["one"]], sampling=DRAWN)
    (again,) = serve(engine, [texts["a"]], sampling=DRAWN)
    assert again.statistics.cached_tokens == 128
    assert together[1].generated == again.generated == alone.generated
    other = SamplingParams(temperature=1.0, top_p=0.9, seed=12)
    assert serve(engine, [texts["a"]], sampling=other)[0].generated != alone.generated
    unseeded = [
        serve(engine, [texts["a"]], sampling=SamplingParams(temperature=1.0))[0] for _ in range(2)
    ]
    assert unseeded[0].generated != unseeded[1].generated


def test_streams_yield_the_answer_and_may_be_mixed(make_engine, texts, answers):
    engine = make_engine(max_step_tokens=100)
    options = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    streams = [engine.stream(texts[name], **options) for name in ("a", "b")]
    mixed = list(zip(*streams, strict=True))
    assert [list(tokens) for tokens in zip(*mixed, strict=True)] == [answers["a"], answers["b"]]
    stopped = engine.stream(texts["a"], stop_ids=[answers["a"][2]], **options)
    assert list(stopped) == answers["a"][: answers["a"].index(answers["a"][2]) + 1]


def test_a_closed_stream_aborts_its_request(make_engine, texts):
    engine = make_engine()
    tokens = engine.stream(texts["a"])
    next(tokens)
    assert engine.pool.held == 2
    tokens.close()
    assert engine.pool.held == 0
    assert not engine.has_work
    with pytest.raises(ValueError, match="got none"):
        engine.stream([])  # refused at once, not at the first token


def test_statistics(make_engine, texts):
    engine = make_engine(cache_tokens=1024, max_step_tokens=256)
    (request,) = serve(engine, [texts["b"]])
    numbers = request.statistics
    assert numbers.arrived <= numbers.started <= numbers.first_token <= numbers.finished
    assert numbers.time_to_first_token > 0
    assert numbers.tokens_per_second(NEW_TOKENS) > 0
    assert (numbers.preemptions, numbers.cached_tokens) == (0, 0)
    assert engine.blocks_of(request) == (5, 2)  # 536 tokens computed, topk 2


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from(["one", "edge", "a", "b", "c", "d"]), st.integers(0, 12)),
        min_size=1,
        max_size=6,
    ),
    pages=st.integers(5, 9),
    step_tokens=st.sampled_from([30, 128, 600]),
)
def test_any_traffic_gives_the_same_answers(
    make_engine, texts, answers, arrivals, pages, step_tokens
):
    engine = make_engine(cache_tokens=pages * 128, max_step_tokens=step_tokens)
    requests = []
    for name, wait in arrivals:
        for _ in range(wait):
            engine.step()
        requests.append(engine.add_request(texts[name], max_new_tokens=NEW_TOKENS, ignore_eos=True))
    while engine.has_work:
        engine.step()
    for (name, _), request in zip(arrivals, requests, strict=True):
        assert request.generated == answers[name]
    assert engine.pool.held == 0
