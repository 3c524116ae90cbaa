"""Checkpoints: both layouts, sharded or not, give the same tensors; what is wrong is named."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.m3_serving import Engine, ModelConfig
from examples.m3_serving.weights import load_weights, tensor_shapes

LAYER = "language_model.model.layers.1"


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture
def text_config(checkpoints) -> dict:
    return read_config(checkpoints["text"])


@pytest.fixture
def copy_of(checkpoints, tmp_path):
    """A copy of a checkpoint whose tensors `change` has edited in place."""

    def make(name: str, change=lambda tensors: None) -> Path:
        folder = tmp_path / name
        shutil.copytree(checkpoints[name], folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file({key: t.contiguous() for key, t in tensors.items()}, folder / "model.safetensors")
        return folder

    return make


def test_all_layouts_give_the_same_model(checkpoints):
    configs = {name: ModelConfig.from_folder(folder) for name, folder in checkpoints.items()}
    assert configs["released"] == configs["shards"] == configs["text"]
    assert len(list(checkpoints["shards"].glob("*.safetensors"))) > 2
    weights = {name: load_weights(folder, configs[name]) for name, folder in checkpoints.items()}
    for name in tensor_shapes(configs["text"]):
        assert torch.equal(weights["released"][name], weights["text"][name]), name
        assert torch.equal(weights["released"][name], weights["shards"][name]), name


def test_both_layouts_are_really_different(checkpoints):
    """What transformers writes today; if that changes, the layouts above are no longer covered."""
    released = load_file(checkpoints["released"] / "model.safetensors")
    text = load_file(checkpoints["text"] / "model.safetensors")
    assert f"{LAYER}.block_sparse_moe.experts.3.w1.weight" in released
    assert f"{LAYER}.self_attn.index_q_proj.weight" in released
    assert any(name.startswith("vision_tower.") for name in released)
    assert "model.layers.1.mlp.experts.gate_up_proj" in text
    assert "model.layers.1.self_attn.indexer.q_proj.weight" in text


def test_the_dtype_can_be_chosen_and_the_router_bias_stays_float32(checkpoints, texts):
    folder = checkpoints["released"]
    weights = load_weights(folder, ModelConfig.from_folder(folder), dtype=torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in weights.items()}
    bias = "layers.1.mlp.gate.e_score_correction_bias"
    assert dtypes.pop(bias) == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}
    engine = Engine.from_folder(folder, dtype=torch.bfloat16, cache_tokens=1024)
    assert engine.caches[1].k.dtype == torch.bfloat16
    (request,) = engine.generate([texts["b"]], max_new_tokens=3)
    assert len(request.generated) == 3


def test_tied_embeddings(copy_of):
    folder = copy_of("text", lambda tensors: tensors.pop("lm_head.weight"))
    config = read_config(folder) | {"tie_word_embeddings": True}
    weights = load_weights(folder, ModelConfig.from_dict(config))
    assert weights["lm_head.weight"] is weights["embed_tokens.weight"]


def test_multi_token_prediction_weights_are_ignored(copy_of):
    folder = copy_of("text", lambda t: t.update({"model.mtp.layers.0.x.weight": torch.zeros(2)}))
    load_weights(folder, ModelConfig.from_folder(folder))


def remove(name):
    return lambda tensors: tensors.pop(name)


def add(name, *shape, dtype=torch.float32):
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=dtype)})


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("text", remove("model.norm.weight"), r"missing tensors: norm.weight$"),
        ("text", remove("lm_head.weight"), r"missing tensors: lm_head.weight$"),
        (
            "released",
            remove(f"{LAYER}.block_sparse_moe.experts.2.w3.weight"),
            r"missing tensors: layers.1.mlp.experts.2.w3.weight$",
        ),
        (
            "released",
            remove(f"{LAYER}.self_attn.index_k_norm.weight"),
            r"missing tensors: layers.1.self_attn.indexer.k_norm.weight$",
        ),
        (
            "released",
            lambda tensors: [tensors.pop(n) for n in list(tensors) if ".experts." in n],
            r"missing tensors: .*experts.0.w1.weight.* and \d+ more$",
        ),
        (
            "text",
            add("model.layers.0.self_attn.sinks", 4),
            r"tensors that a model of this config.json has not: model.layers.0.self_attn.sinks$",
        ),
        (
            "released",
            add(f"{LAYER}.block_sparse_moe.experts.4.w1.weight", 32, 48),
            r"has not: .*experts.4.w1.weight$",
        ),
        (
            "text",
            add("model.layers.0.self_attn.q_proj.weight", 256, 48),
            r"model.layers.0.self_attn.q_proj.weight must be \[512, 48\], got \[256, 48\]$",
        ),
        (
            "released",
            add(f"{LAYER}.block_sparse_moe.experts.1.w2.weight", 32, 48),
            r"experts.1.w2.weight must be \[48, 32\], got \[32, 48\]$",
        ),
        (
            "text",
            add("model.norm.weight", 48, dtype=torch.float8_e4m3fn),
            r"norm.weight must be float32, bfloat16 or float16, got torch.float8_e4m3fn$",
        ),
        (
            "text",
            add("model.norm.weight", 48, dtype=torch.int32),
            r"norm.weight must be float32, bfloat16 or float16, got torch.int32$",
        ),
        (
            "text",
            add("language_model.model.norm.weight", 48),
            r"norm.weight must be stored once, got .*norm.weight and .*norm.weight$",
        ),
        (
            "text",
            add("model.layers.0.mlp.up_proj.weight", 64, 48),
            r"gate_up_proj.weight must be stored whole or in parts, got .* and .*up_proj.weight$",
        ),
    ],
)
def test_wrong_tensors_are_named(copy_of, layout, change, message):
    folder = copy_of(layout, change)
    with pytest.raises(ValueError, match=message):
        load_weights(folder, ModelConfig.from_folder(folder))


def test_broken_files_are_named(checkpoints, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(checkpoints["text"], folder)
    config = ModelConfig.from_folder(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model.safetensors must be a safetensors file, got: "):
        load_weights(folder, config)
    file.unlink()
    with pytest.raises(ValueError, match=r"model.safetensors must be in the folder, got none"):
        load_weights(folder, config)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"must hold config.json, got none"):
        ModelConfig.from_folder(folder)


def test_shards_are_checked_against_their_index(checkpoints, tmp_path):
    folder = tmp_path / "shards"
    shutil.copytree(checkpoints["shards"], folder)
    config = ModelConfig.from_folder(folder)
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    shard = index["weight_map"]["language_model.model.norm.weight"]
    index["weight_map"]["language_model.model.extra"] = shard
    index_file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"{shard} must hold language_model.model.extra, as its"):
        load_weights(folder, config)
    (folder / shard).unlink()
    with pytest.raises(ValueError, match=rf"{shard} must be in the folder, got none"):
        load_weights(folder, config)


def test_legacy_spellings_say_the_same(text_config):
    legacy = copy.deepcopy(text_config)
    rope = legacy.pop("rope_parameters")
    legacy |= {
        "rope_theta": rope["rope_theta"],
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "torch_dtype": legacy.pop("dtype"),
        "hidden_act": "swigluoai",
        "moe_layer_freq": [0, 1, 0],
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_num_index_heads": legacy.pop("index_n_heads"),
            "sparse_index_dim": legacy.pop("index_head_dim"),
            "sparse_block_size": legacy.pop("index_block_size"),
            "sparse_topk_blocks": legacy.pop("index_topk_blocks"),
            "sparse_local_block": legacy.pop("index_local_blocks"),
            "sparse_init_block": 0,
            "sparse_score_type": "max",
            "sparse_attention_freq": [0, 1, 1],
            "sparse_disable_index_value": [0, 1, 1],
        },
    }
    del legacy["layer_types"], legacy["mlp_layer_types"]
    assert ModelConfig.from_dict(legacy) == ModelConfig.from_dict(text_config)
    nested = {"model_type": "minimax_m3_vl", "text_config": legacy, "vision_config": {}}
    assert ModelConfig.from_dict(nested) == ModelConfig.from_dict(text_config)
    legacy["sparse_attention_config"]["sparse_init_block"] = 1
    assert ModelConfig.from_dict(legacy).init_blocks == 1


def test_stop_tokens_come_from_the_generation_config_where_there_is_one(checkpoints, tmp_path):
    folder = tmp_path / "stops"
    shutil.copytree(checkpoints["released"], folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert ModelConfig.from_folder(folder).eos_token_ids == {7, 9}
    (folder / "generation_config.json").unlink()
    assert ModelConfig.from_folder(folder).eos_token_ids == {257}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, r"model_type must be one of .*, got 'llama'"),
        ({"head_dim": 64}, r"head_dim must be 128, got 64"),
        ({"num_attention_heads": 6}, r"num_attention_heads must be one of \[2, 4, .*, got 6"),
        ({"num_attention_heads": None}, r"num_attention_heads must be a positive integer"),
        ({"index_block_size": 64}, r"index_block_size must be 128, got 64"),
        ({"index_head_dim": 64}, r"index_head_dim must be 128, got 64"),
        ({"index_n_heads": 4}, r"index_n_heads must be num_key_value_heads 2, got 4"),
        ({"index_topk_blocks": 33}, r"index_topk_blocks must be 1 to 32, got 33"),
        (
            {"index_local_blocks": 3},
            r"index_init_blocks and index_local_blocks must be .* 2, got \(0, 3\)",
        ),
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok must be at most .* 4, got 5"),
        ({"layer_types": ["full_attention"]}, r"layer_types must be num_hidden_layers 3 .* got 1"),
        (
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            r"layer_types\[1\] must be one of .*, got 'sliding_attention'",
        ),
        ({"mlp_layer_types": None}, r"mlp_layer_types must be a list of 3 entries, got None"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config must be one of"),
        ({"hidden_act": "gelu"}, r"hidden_act must be one of .*, got 'gelu'"),
        ({"dtype": "float16"}, r"dtype must be one of \('float32', 'bfloat16'\), got 'float16'"),
        ({"use_gemma_norm": False}, r"use_gemma_norm must be one of \(True,\), got False"),
        (
            {"rope_parameters": {"rope_type": "yarn", "partial_rotary_factor": 0.5}},
            r"rope_parameters.rope_type must be 'default', got 'yarn'",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4}},
            r"rotary_dim must be head_dim 128 \* partial_rotary_factor 1.0, got 64",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 1.5}},
            r"rope_parameters.partial_rotary_factor must be above 0, at most 1 .*, got 1.5",
        ),
        (
            {"sparse_attention_config": {"sparse_score_type": "mean"}},
            r"sparse_score_type must be one of \('max',\), got 'mean'",
        ),
        (
            {"sparse_attention_config": {"sparse_disable_index_value": False}},
            r"sparse_disable_index_value must be true in every sparse layer, got False",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(text_config, change, message):
    with pytest.raises(ValueError, match=rf"config.json: {message}"):
        ModelConfig.from_dict(text_config | change)
