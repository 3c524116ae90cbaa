"""Sampling against a plain computation of what it should be."""

import math
from collections import Counter

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from examples.m3_serving.sampling import SamplingParams, sample, top_p_probabilities, uniform

logits_strategy = st.lists(st.integers(-40, 40), min_size=1, max_size=12)


@settings(deadline=None)
@given(
    logits=logits_strategy,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_p=st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.999, 1.0]),
)
def test_top_p_keeps_the_fewest_most_likely_tokens_that_reach_it(logits, temperature, top_p):
    probabilities, ids = top_p_probabilities(torch.tensor(logits) / 4, temperature, top_p)
    weights = [math.exp((x - max(logits)) / 4 / temperature) for x in logits]
    exact = [weight / sum(weights) for weight in weights]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    assert ids.tolist() == order[: len(ids)]
    mass = sum(exact[i] for i in ids.tolist())
    assert mass >= top_p - 1e-9
    assert len(ids) == 1 or mass - exact[ids[-1]] < top_p + 1e-9
    assert probabilities.tolist() == pytest.approx([exact[i] / mass for i in ids.tolist()])


def test_tokens_are_drawn_as_often_as_they_are_likely():
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -30.0])
    params, draws = SamplingParams(temperature=1.0, top_p=0.95), 4000
    probabilities, ids = top_p_probabilities(logits, 1.0, 0.95)
    counts = Counter(sample(logits, params, seed=5, index=index) for index in range(draws))
    assert set(counts) == set(ids.tolist()) == {0, 1, 3}
    for token, probability in zip(ids.tolist(), probabilities.tolist(), strict=True):
        error = math.sqrt(probability * (1 - probability) / draws)
        assert abs(counts[token] / draws - probability) < 5 * error


def test_temperature_zero_is_the_most_likely_token():
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert {sample(logits, SamplingParams(seed=s), s, 0) for s in range(20)} == {1}
    cold = SamplingParams(temperature=1e-6)
    assert {sample(logits, cold, s, 0) for s in range(20)} == {1}
    narrow = SamplingParams(temperature=5.0, top_p=1e-9)
    assert {sample(logits, narrow, s, 0) for s in range(20)} == {1}


def test_uniform_is_a_function_of_seed_and_index():
    values = [uniform(seed, index) for seed in range(50) for index in range(50)]
    assert values == [uniform(seed, index) for seed in range(50) for index in range(50)]
    assert len(set(values)) == len(values)  # (1, 23) is not (12, 3)
    assert all(0 <= value < 1 for value in values)
    assert abs(sum(values) / len(values) - 0.5) < 5 / math.sqrt(12 * len(values))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature must be at least 0 and finite, got -0.1"),
        ({"temperature": math.inf}, r"temperature must be at least 0 and finite, got inf"),
        ({"temperature": math.nan}, r"temperature must be at least 0 and finite, got nan"),
        ({"top_p": 0.0}, r"top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, r"top_p must be above 0 and at most 1, got 1.1"),
        ({"top_p": math.nan}, r"top_p must be above 0 and at most 1, got nan"),
    ],
)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)
