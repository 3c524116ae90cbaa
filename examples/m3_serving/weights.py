"""Safetensors to the tensors of model.py, from either of the two layouts that checkpoints come in.

    released:      language_model.model.layers.3.block_sparse_moe.experts.7.w1.weight
    transformers:  model.layers.3.mlp.experts.gate_up_proj  (all experts, gate rows above up rows)

Both are brought to one name per tensor, `layers.3.mlp.experts.gate_up_proj`, and a tensor that is
stored in parts is filled part by part. Nothing is guessed: a missing, unknown, repeated or
mis-shaped tensor is an error.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .config import MSA_ATTENTION, ModelConfig

_PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.")
_VISION = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector|patch_merge_mlp)\.")
_UNUSED = re.compile(r"(^|\.)mtp\.")  # multi-token prediction
_RENAMES = (
    (
        re.compile(r"\.block_sparse_moe\.e_score_correction_bias$"),
        ".mlp.gate.e_score_correction_bias",
    ),
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"\.self_attn\.index_([qk])_(proj|norm)\."), r".self_attn.indexer.\1_\2."),
)
_VISION_RENAMES = (
    (re.compile(r"^model\."), ""),
    (
        re.compile(r"^vision_tower\.vision_model\.embeddings\.patch_embedding\."),
        "vision_tower.embeddings.proj.",
    ),
    (re.compile(r"^vision_tower\.vision_model\.(encoder\.)?"), "vision_tower."),
    (re.compile(r"^patch_merge_mlp\."), "multi_modal_projector.merge_"),
)
_ROUTER_BIAS = ".e_score_correction_bias"
_LISTED = 6  # names an error message lists before it only counts


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the language model by name, and its shape: linear weights are [out, in]."""
    hidden, head_dim = config.hidden_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        at = f"layers.{layer}"
        shapes[f"{at}.input_layernorm.weight"] = (hidden,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        attention = f"{at}.self_attn"
        shapes[f"{attention}.q_proj.weight"] = (config.num_heads * head_dim, hidden)
        shapes[f"{attention}.k_proj.weight"] = (config.num_kv_heads * head_dim, hidden)
        shapes[f"{attention}.v_proj.weight"] = (config.num_kv_heads * head_dim, hidden)
        shapes[f"{attention}.o_proj.weight"] = (hidden, config.num_heads * head_dim)
        shapes[f"{attention}.q_norm.weight"] = (head_dim,)
        shapes[f"{attention}.k_norm.weight"] = (head_dim,)
        if config.layer_types[layer] == MSA_ATTENTION:
            index_dim = config.index_dim
            shapes[f"{attention}.indexer.q_proj.weight"] = (config.index_heads * index_dim, hidden)
            shapes[f"{attention}.indexer.k_proj.weight"] = (index_dim, hidden)
            shapes[f"{attention}.indexer.q_norm.weight"] = (index_dim,)
            shapes[f"{attention}.indexer.k_norm.weight"] = (index_dim,)
        if config.mlp_layer_types[layer] == "dense":
            shapes[f"{at}.mlp.gate_up_proj.weight"] = (2 * config.dense_size, hidden)
            shapes[f"{at}.mlp.down_proj.weight"] = (hidden, config.dense_size)
            continue
        experts, size, shared = config.num_experts, config.expert_size, config.shared_expert_size
        shapes[f"{at}.mlp.gate.weight"] = (experts, hidden)
        shapes[f"{at}.mlp.gate{_ROUTER_BIAS}"] = (experts,)
        shapes[f"{at}.mlp.experts.gate_up_proj"] = (experts, 2 * size, hidden)
        shapes[f"{at}.mlp.experts.down_proj"] = (experts, hidden, size)
        shapes[f"{at}.mlp.shared_experts.gate_up_proj.weight"] = (2 * shared, hidden)
        shapes[f"{at}.mlp.shared_experts.down_proj.weight"] = (hidden, shared)
    return shapes


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Loads the language part of a checkpoint.

    Args:
        folder: holds `model.safetensors`, or `model.safetensors.index.json` and its shards.
        config: of the same checkpoint.
        dtype: of the result, by default `config.dtype`; the router's selection bias is always
            float32.
        device: of the result.

    Returns:
        The tensors of `tensor_shapes(config)`; with tied embeddings, `lm_head.weight` is
        `embed_tokens.weight`.

    Raises:
        ValueError: no weights, a broken file, or a tensor missing, unknown, repeated or mis-shaped.
    """
    weights: dict[str, Tensor] = {}
    places: dict[str, Tensor] = {}  # name in a checkpoint, brought to one spelling: where it goes
    for name, shape in tensor_shapes(config).items():
        kept = torch.float32 if name.endswith(_ROUTER_BIAS) else dtype or config.dtype
        weights[name] = torch.empty(shape, dtype=kept, device=device)
        places |= _places(name, weights[name])
    if config.tie_word_embeddings:  # some savers write the tied copy as well
        places["lm_head.weight"] = torch.empty_like(weights["embed_tokens.weight"])

    filled = _fill(places, _stored_tensors(Path(folder), vision=False), _one_spelling)
    _check_complete(weights, filled)
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    return weights


def load_vision_weights(
    folder: str | Path,
    shapes: dict[str, tuple[int, ...]],
    *,
    dtype: torch.dtype,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Loads the vision part of a checkpoint, of either layout.

    Args:
        folder: as in `load_weights`.
        shapes: every tensor by its name in transformers' modules, `vision_tower.` or
            `multi_modal_projector.` in front.
        dtype: of the result.
        device: of the result.

    Returns:
        The tensors of `shapes`.

    Raises:
        ValueError: as `load_weights`.
    """
    weights = {
        name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()
    }
    filled = _fill(weights, _stored_tensors(Path(folder), vision=True), _one_vision_spelling)
    missing = [name for name in weights if name not in filled]
    if missing:
        raise ValueError(f"checkpoint: missing tensors: {_listed(missing)}")
    return weights


def _fill(
    places: dict[str, Tensor],
    stored: Iterable[tuple[str, Tensor]],
    one_spelling: Callable[[str], str],
) -> dict[str, str]:
    """Copies stored tensors to their places; (place: stored name) of those that were filled."""
    filled: dict[str, str] = {}
    unknown = []
    for stored_name, tensor in stored:
        name = one_spelling(stored_name)
        if name not in places:
            unknown.append(stored_name)
            continue
        if name in filled:
            raise ValueError(
                f"checkpoint: {name} must be stored once, got {filled[name]} and {stored_name}"
            )
        if tensor.shape != places[name].shape:
            expected, got = list(places[name].shape), list(tensor.shape)
            raise ValueError(f"checkpoint: {stored_name} must be {expected}, got {got}")
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ValueError(
                f"checkpoint: {stored_name} must be float32, bfloat16 or float16, "
                f"got {tensor.dtype}"
            )
        places[name].copy_(tensor)
        filled[name] = stored_name
    if unknown:
        raise ValueError(
            f"checkpoint: tensors that a model of this config.json has not: {_listed(unknown)}"
        )
    return filled


def _places(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The whole tensor under its name, and its parts under their names in the released layout."""
    places = {name: tensor}
    if name.endswith(".experts.gate_up_proj"):
        at, half = name.removesuffix("gate_up_proj"), tensor.size(1) // 2
        for expert in range(tensor.size(0)):
            places[f"{at}{expert}.w1.weight"] = tensor[expert, :half]
            places[f"{at}{expert}.w3.weight"] = tensor[expert, half:]
    elif name.endswith(".experts.down_proj"):
        at = name.removesuffix("down_proj")
        for expert in range(tensor.size(0)):
            places[f"{at}{expert}.w2.weight"] = tensor[expert]
    elif name.endswith("gate_up_proj.weight"):
        at, half = name.removesuffix("gate_up_proj.weight"), tensor.size(0) // 2
        places[f"{at}gate_proj.weight"] = tensor[:half]
        places[f"{at}up_proj.weight"] = tensor[half:]
    return places


def _one_spelling(stored_name: str) -> str:
    prefix = next((p for p in _PREFIXES if stored_name.startswith(p)), "")
    name = stored_name.removeprefix(prefix)
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def _one_vision_spelling(stored_name: str) -> str:
    for pattern, replacement in _VISION_RENAMES:
        stored_name = pattern.sub(replacement, stored_name)
    return stored_name


def _check_complete(weights: dict[str, Tensor], filled: dict[str, str]) -> None:
    missing = []
    for name, tensor in weights.items():
        parts = [part for part in _places(name, tensor) if part != name]
        if name in filled:
            twice = [part for part in parts if part in filled]
            if twice:
                raise ValueError(
                    f"checkpoint: {name} must be stored whole or in parts, got {filled[name]} and "
                    f"{filled[twice[0]]}"
                )
        else:
            missing += [part for part in parts if part not in filled] or ([] if parts else [name])
    if missing:
        raise ValueError(f"checkpoint: missing tensors: {_listed(missing)}")


def _listed(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _stored_tensors(folder: Path, *, vision: bool) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the vision part or of the language part, one at a time."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shard_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(shard_of.values()))
    else:
        shard_of, files = None, ["model.safetensors"]
    for file in files:
        if not (folder / file).is_file():
            raise ValueError(f"checkpoint: {file} must be in the folder, got none in {folder}")
        try:
            with safe_open(folder / file, framework="pt") as shard:
                stored = list(shard.keys())
                lost = [
                    n for n, f in (shard_of or {}).items() if f == file and n not in set(stored)
                ]
                if lost:
                    raise ValueError(
                        f"checkpoint: {file} must hold {lost[0]}, as its index says; got none"
                    )
                for name in stored:
                    if bool(_VISION.search(name)) == vision and not _UNUSED.search(name):
                        yield name, shard.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(
                f"checkpoint: {file} must be a safetensors file, got: {error}"
            ) from error
