"""A tiny MiniMax-M3 in both checkpoint layouts, texts, and the answers of an undisturbed run.

All tests compare with those answers, which `test_m3_serving_engine.py` ties to transformers.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.m3_serving import Engine
from examples.m3_serving.config import ModelConfig
from examples.m3_serving.demo_reference import greedy_answer, load_reference
from examples.m3_serving.model import Model
from examples.m3_serving.weights import load_weights

NEW_TOKENS = 24

TEXT_CONFIG = {
    "vocab_size": 258,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    },
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "dense"],
    "dense_intermediate_size": 64,
    "intermediate_size": 32,
    "shared_intermediate_size": 40,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "index_n_heads": 2,
    "index_topk_blocks": 2,  # so few that selection decides from the third block on
    "initializer_range": 0.25,
}
VISION_CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
}


def poisoned(engine: Engine) -> Engine:
    """Fills its cache with NaN: what was not written must not reach an answer."""
    for cache in engine.caches:
        for pool in (cache.k, cache.v, cache.index_k):
            if pool is not None:
                pool.fill_(float("nan"))
    return engine


def transformers_answer(model, prompt: list[int], new_tokens: int, **inputs) -> list[int]:
    """The greedy answer of transformers, stop tokens and all, if rounding cannot decide it."""
    options = {"eos_token_id": None, "pad_token_id": 0, **inputs}
    answer, margins = greedy_answer(model, prompt, new_tokens, **options)
    assert float(margins.min()) > 1e-4
    return answer


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Matrices this small lose by threads, most of all where others want the cores too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights: the `released` layout, `shards` of it, and that of the `text` model."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.set_seed(5)
    config = transformers.MiniMaxM3VLConfig(
        text_config=TEXT_CONFIG, vision_config=VISION_CONFIG, projector_hidden_size=48
    )
    full = transformers.MiniMaxM3SparseForConditionalGeneration(config).float()
    with torch.no_grad():
        for name, tensor in full.model.language_model.state_dict().items():
            if name.endswith(("norm.weight", "e_score_correction_bias")):
                tensor.normal_(std=0.2)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                tensor.add_(1.0)
    text = transformers.MiniMaxM3VLForCausalLM(full.config.text_config)
    text.model.load_state_dict(full.model.language_model.state_dict())
    text.lm_head.load_state_dict(full.lm_head.state_dict())

    root = tmp_path_factory.mktemp("checkpoints")
    full.save_pretrained(root / "released")
    full.save_pretrained(root / "shards", max_shard_size="200KB")
    text.save_pretrained(root / "text")
    return {name: root / name for name in ("released", "shards", "text")}


IMAGE_ID, VIDEO_ID = 258, 259
MEDIA_CONFIG = {
    "text_config": {**TEXT_CONFIG, "vocab_size": 262},
    "vision_config": {**VISION_CONFIG, "num_hidden_layers": 2},
    "projector_hidden_size": 48,
    "image_token_index": IMAGE_ID,
    "video_token_index": VIDEO_ID,
}


@pytest.fixture(scope="session")
def media_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that can see: its tower's output is as large as its embeddings."""
    # Earlier ones write the vision tower's weights under other names.
    transformers = pytest.importorskip("transformers", minversion="5.24")
    transformers.utils.logging.disable_progress_bar()
    transformers.set_seed(6)
    config = transformers.MiniMaxM3VLConfig(**MEDIA_CONFIG)
    full = transformers.MiniMaxM3SparseForConditionalGeneration(config).float()
    with torch.no_grad():
        for name, tensor in full.model.language_model.state_dict().items():
            if name.endswith(("norm.weight", "e_score_correction_bias")):
                tensor.normal_(std=0.2)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                tensor.add_(1.0)
        for part in (full.model.vision_tower, full.model.multi_modal_projector):
            for name, tensor in part.state_dict().items():
                tensor.normal_(std=1.5 * tensor[0].numel() ** -0.5 if tensor.dim() > 1 else 0.2)
                if "norm" in name and name.endswith("weight"):
                    tensor.add_(1.0)
    folder = tmp_path_factory.mktemp("media") / "checkpoint"
    full.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def media_engine(media_checkpoint: Path):
    """An engine with a vision tower and a cache full of NaN; all share the weights."""
    first = Engine.from_folder(media_checkpoint, vision=True, cache_tokens=128)

    def make(**options) -> Engine:
        return poisoned(Engine(first.model, **({"tower": first.tower} | options)))

    return make


@pytest.fixture(scope="session")
def media_oracle(media_checkpoint: Path):
    """transformers' whole model of the same checkpoint."""
    return load_reference(media_checkpoint)


@pytest.fixture(scope="session")
def model(checkpoints: dict[str, Path]) -> Model:
    config = ModelConfig.from_folder(checkpoints["released"])
    return Model(config, load_weights(checkpoints["released"], config))


@pytest.fixture(scope="session")
def make_engine(model: Model):
    """An engine whose cache is full of NaN: what was not written must not reach an answer."""

    def make(**options) -> Engine:
        return poisoned(Engine(model, **options))

    return make


@pytest.fixture(scope="session")
def texts() -> dict[str, list[int]]:
    """Prompts around the block's edges; `c` has two blocks of `b` first, `d` half of one."""
    draw = torch.Generator().manual_seed(0)

    def random(count: int) -> list[int]:
        return torch.randint(0, 256, (count,), generator=draw).tolist()

    b = random(513)
    return {
        "one": random(1),
        "edge": random(128),
        "a": random(129),
        "b": b,
        "c": b[:256] + random(200),
        "d": b[:64] + random(70),
    }


@pytest.fixture(scope="session")
def answers(make_engine, texts: dict[str, list[int]]) -> dict[str, list[int]]:
    """Greedy answers of NEW_TOKENS tokens: each text alone in its engine, in one chunk."""
    result = {}
    for name, text in texts.items():
        engine = make_engine(cache_tokens=1024, max_step_tokens=1024)
        (request,) = engine.generate([text], max_new_tokens=NEW_TOKENS, ignore_eos=True)
        result[name] = request.generated
    return result
