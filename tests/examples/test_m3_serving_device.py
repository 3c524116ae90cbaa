"""The engine in bfloat16 on each device: its tokens against those of the CPU's operators."""

import dataclasses

import pytest
import torch

from examples.m3_serving import Engine, SamplingParams
from examples.m3_serving.cache import make_layer_caches, pages_for
from examples.m3_serving.config import ModelConfig
from examples.m3_serving.media import Medium
from examples.m3_serving.model import Model
from examples.m3_serving.sampling import sample
from examples.m3_serving.vision import VisionTower
from examples.m3_serving.weights import tensor_shapes
from msa_kernels import Batch
from tests.examples.conftest import IMAGE_ID, TEXT_CONFIG, poisoned

NEW = 40
NEAR = 0.1
"""of the logits' standard deviation: what rounding to bfloat16 may turn around"""
SHARE = 0.7
"""of an answer's tokens. Rounding now and then picks another block or expert in some row, and then
the logits differ by more: half a unit in the last place on every linear's result leaves 0.78 to 1.
A model with a mistake that matters to the answer comes to 0.6 at most."""


def random_model(heads: int) -> Model:
    """On the CPU; made without transformers."""
    fields = {"num_attention_heads": heads, "model_type": "minimax_m3_vl_text"}
    config = ModelConfig.from_dict({**TEXT_CONFIG, **fields, "dtype": "bfloat16"})
    draw = torch.Generator().manual_seed(3)
    weights = {}
    for name, shape in tensor_shapes(config).items():
        is_small = name.endswith(("norm.weight", "e_score_correction_bias"))
        tensor = torch.randn(shape, generator=draw) * (0.2 if is_small else 0.25)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            tensor += 1.0
        kept = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        weights[name] = tensor.to(kept)
    return Model(config, weights)


def on(device: str, model: Model) -> Model:
    return Model(model.config, {name: tensor.to(device) for name, tensor in model.weights.items()})


def random_tokens(*counts: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (count,), generator=draw).tolist() for count in counts]


def agreement(model: Model, request, tower: VisionTower | None = None) -> float:
    """Share of an answer's tokens that `model`, given all before them, would have picked too.

    Logits closer than NEAR to those of its own pick count as the same.
    """
    tokens, prompt = request.tokens[:-1], len(request.prompt)
    count, pages = len(tokens), pages_for(len(tokens))
    rows, features = [], []
    for index, medium in enumerate(request.media.media):
        features.append(tower.encode(medium.patches, medium.grid))
        pieces = request.media.pieces(0, prompt)
        rows += [p.position + i for p in pieces if p.medium == index for i in range(p.count)]
    batch = Batch(
        block_table=torch.arange(pages, dtype=torch.int32)[None],
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        slot_mapping=torch.arange(count),
    )
    logits = model.forward(
        torch.tensor(tokens),
        torch.arange(count),
        batch,
        make_layer_caches(model.config, pages, dtype=model.dtype),
        torch.arange(prompt - 1, count),
        torch.tensor(rows) if rows else None,
        torch.cat(features) if rows else None,
    )
    near = NEAR * float(logits.std())
    same = 0
    for index, (row, token) in enumerate(zip(logits, request.generated, strict=True)):
        pick = sample(row, request.sampling, request.seed, index)
        same += abs(float(row[pick] - row[token])) <= near
    return same / len(request.generated)


def serve_mixed(model: Model) -> list:
    """Prompts in chunks beside answers, a prefix that is shared, a draw, and a preemption."""
    one, edge, long, tail, longest = random_tokens(1, 120, 513, 200, 1500)
    # Pages for all at first: 1 + 1 + 5 + 2 (and 2 that are shared) + 12. Then `edge` needs another.
    engine = poisoned(Engine(model, cache_tokens=21 * 128, max_step_tokens=150))
    options = {"max_new_tokens": NEW, "ignore_eos": True}
    requests = [engine.add_request(prompt, **options) for prompt in (one, edge, long)]
    while requests[-1].statistics.first_token is None:
        engine.step()
    drawn = SamplingParams(temperature=1.0, top_p=0.9, seed=11)
    requests.append(engine.add_request(long[:256] + tail, sampling=drawn, **options))
    requests.append(engine.add_request(longest, **options))
    while engine.has_work:
        engine.step()
    assert engine.pool.held == 0
    assert [request.statistics.cached_tokens for request in requests] == [0, 0, 0, 256, 0]
    assert [request.statistics.preemptions for request in requests] == [0, 0, 0, 0, 1]
    return requests


@pytest.mark.parametrize("heads", [4, 32], ids=["2 heads a KV head", "16 heads a KV head"])
def test_tokens_are_those_of_the_cpu_within_rounding(device, require, heads):
    require("sparse_prefill")
    model = random_model(heads)
    for request in serve_mixed(on(device, model)):
        assert len(request.generated) == NEW
        assert agreement(model, request) >= SHARE, request.order


@pytest.mark.parametrize(
    ("negated", "changed"),
    [
        ("layers.0.self_attn.v_proj.weight", {}),
        ("layers.1.self_attn.indexer.k_proj.weight", {}),
        (None, {"topk_blocks": 3}),
        (None, {"local_blocks": 0}),
    ],
)
def test_another_model_does_not_agree(device, require, negated, changed):
    """Else the test above would prove little."""
    require("sparse_prefill")
    model = random_model(4)
    other = on(device, Model(dataclasses.replace(model.config, **changed), model.weights))
    if negated:
        other.weights[negated].neg_()
        model = random_model(4)  # on the CPU the two share their weights
    (request,) = Engine(other).generate(random_tokens(1500), max_new_tokens=NEW, ignore_eos=True)
    assert agreement(model, request) < SHARE


def test_an_image_is_seen(device, require, media_checkpoint):
    require("sparse_prefill")
    require("normalize_patches")
    options = {"dtype": torch.bfloat16, "vision": True, "cache_tokens": 1024}
    engine = poisoned(Engine.from_folder(media_checkpoint, device=device, **options))
    draw = torch.Generator().manual_seed(1)
    patches = torch.randint(0, 256, (280, 588), generator=draw, dtype=torch.uint8)
    medium = Medium("a", ((100, 70),), patches, (1, 14, 20))
    before, after = random_tokens(100, 30)
    request = engine.add_request(
        [*before, *[IMAGE_ID] * 70, *after], media=[medium], max_new_tokens=NEW, ignore_eos=True
    )
    while engine.has_work:
        engine.step()
    cpu = Engine.from_folder(media_checkpoint, **options)
    assert agreement(cpu.model, request, cpu.tower) >= SHARE
    other = Medium("b", medium.spans, 255 - patches, medium.grid)
    request.media.media = (other,)
    assert agreement(cpu.model, request, cpu.tower) < SHARE


def test_a_model_without_kernels_is_refused_at_the_start():
    with pytest.raises(ValueError, match="model: msa_kernels runs on cpu and cuda devices, not on"):
        Engine(on("meta", random_model(4)))


def test_float32_is_refused_at_the_start_where_it_has_no_kernels(device, require):
    require("sparse_prefill")
    model = random_model(4)
    weights = {name: tensor.float().to(device) for name, tensor in model.weights.items()}
    if device == "cpu":
        (request,) = Engine(Model(model.config, weights)).generate([[1]], max_new_tokens=1)
        assert request.finish_reason
        return
    with pytest.raises(ValueError, match="no cuda kernel of paged_decode for float32/float32"):
        Engine(Model(model.config, weights))
