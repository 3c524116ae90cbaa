"""config.json of a MiniMax-M3 checkpoint, checked: what the engine does not do is refused by name.

Three spellings are read: the text config alone (`minimax_m3_vl_text`), the full model's with
`text_config` inside (`minimax_m3_vl`), and in either the first release's names
(`sparse_attention_config`, `moe_layer_freq`, `rope_theta` and `partial_rotary_factor` beside the
other fields instead of in `rope_parameters`).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

BLOCK_TOKENS = 128
"""tokens of a selection block, which is also the page of the cache"""

DENSE_ATTENTION = "full_attention"
MSA_ATTENTION = "minimax_m3_sparse"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_MODEL_TYPES = ("minimax_m3_vl", "minimax_m3_vl_text")
_QUERY_HEADS_PER_KV_HEAD = (1, 2, 4, 8, 16)
_MAX_TOPK = 32

# current field: the same in `sparse_attention_config`
_LEGACY_INDEX_FIELDS = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
    "index_init_blocks": "sparse_init_block",
}

# Fields that some configs carry and that can say only one thing here; anything else would change
# the model.
_ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "hidden_act": ("silu", "swigluoai"),
    "use_gemma_norm": (True,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_head",),
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "n_shared_experts": (1,),
    "attention_output_gate": (False, None),
    "attention_bias": (False, None),
    "sliding_window": (None,),
    "sparse_score_type": ("max",),
    "use_sparse_attention": (True,),
}


@dataclass(frozen=True)
class ModelConfig:
    """One checkpoint's shapes and constants; sizes in elements, lists per layer."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_positions: int
    """tokens of the longest request, prompt and answer together"""
    layer_types: tuple[str, ...]
    """`full_attention` or `minimax_m3_sparse`"""
    mlp_layer_types: tuple[str, ...]
    """`dense` or `sparse` (mixture of experts)"""
    dense_size: int
    expert_size: int
    shared_expert_size: int
    num_experts: int
    experts_per_token: int
    routed_scale: float
    swiglu_alpha: float
    swiglu_limit: float
    index_heads: int
    index_dim: int
    topk_blocks: int
    init_blocks: int
    local_blocks: int
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]
    dtype: torch.dtype

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layer_types)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Reads `config.json`, and stop tokens from `generation_config.json` if it is there."""
        config = read_json(Path(folder) / "config.json")
        generation = Path(folder) / "generation_config.json"
        if generation.exists():
            stop = read_json(generation).get("eos_token_id")
            if stop is not None:
                text = config.get("text_config", config)
                text["eos_token_id"] = stop
        return cls.from_dict(config)

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "ModelConfig":
        """Checks a parsed config.json; ValueError names the field, the expected and the got."""
        model_type = config.get("model_type")
        _check("model_type", model_type in _MODEL_TYPES, f"one of {_MODEL_TYPES}", model_type)
        text = {**config, **config["text_config"]} if "text_config" in config else dict(config)
        legacy = text.get("sparse_attention_config") or {}
        for field, legacy_field in _LEGACY_INDEX_FIELDS.items():
            if legacy_field in legacy:
                text[field] = legacy[legacy_field]
        for field, values in _ONLY_VALUES.items():
            for source in (text, legacy):
                if field in source:
                    _check(field, source[field] in values, f"one of {values}", source[field])
        _check_no_index_values(legacy)

        layers = _positive(text, "num_hidden_layers")
        layer_types = _layer_types(
            text,
            "layer_types",
            legacy,
            "sparse_attention_freq",
            (DENSE_ATTENTION, MSA_ATTENTION),
            layers,
        )
        mlp_types = _layer_types(
            text, "mlp_layer_types", text, "moe_layer_freq", ("dense", "sparse"), layers
        )
        has_moe = "sparse" in mlp_types
        dtype = text.get("dtype") or text.get("torch_dtype") or "float32"
        _check("dtype", dtype in DTYPES, f"one of {tuple(DTYPES)}", dtype)
        eos = text.get("eos_token_id")
        eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
        head_dim = _positive(text, "head_dim")
        _check("head_dim", head_dim == 128, 128, head_dim)
        rotary_dim, rope_theta = _rotary(text, head_dim)

        result = cls(
            vocab_size=_positive(text, "vocab_size"),
            hidden_size=_positive(text, "hidden_size"),
            num_heads=_positive(text, "num_attention_heads"),
            num_kv_heads=_positive(text, "num_key_value_heads"),
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            rope_theta=rope_theta,
            rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            max_positions=_positive(text, "max_position_embeddings"),
            layer_types=layer_types,
            mlp_layer_types=mlp_types,
            dense_size=_positive(text, "dense_intermediate_size") if "dense" in mlp_types else 0,
            expert_size=_positive(text, "intermediate_size") if has_moe else 0,
            shared_expert_size=_positive(text, "shared_intermediate_size") if has_moe else 0,
            num_experts=_positive(text, "num_local_experts") if has_moe else 0,
            experts_per_token=_positive(text, "num_experts_per_tok") if has_moe else 0,
            routed_scale=float(text.get("routed_scaling_factor", 2.0)),
            swiglu_alpha=float(text.get("swiglu_alpha", 1.702)),
            swiglu_limit=float(text.get("swiglu_limit", 7.0)),
            index_heads=int(text.get("index_n_heads", 4)),
            index_dim=int(text.get("index_head_dim", 128)),
            topk_blocks=int(text.get("index_topk_blocks", 16)),
            init_blocks=int(text.get("index_init_blocks", 0)),
            local_blocks=int(text.get("index_local_blocks", 1)),
            tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
            eos_token_ids=frozenset(eos_ids),
            dtype=DTYPES[dtype],
        )
        result._check_shapes(int(text.get("index_block_size", BLOCK_TOKENS)))
        return result

    def _check_shapes(self, index_block_size: int) -> None:
        """What the operators take: `msa_kernels` refuses the same, but only at the first step."""
        groups = [self.num_kv_heads * g for g in _QUERY_HEADS_PER_KV_HEAD]
        _check(
            "num_attention_heads",
            self.num_heads in groups,
            f"one of {groups} for num_key_value_heads {self.num_kv_heads}",
            self.num_heads,
        )
        if self.num_experts:
            _check(
                "num_experts_per_tok",
                self.experts_per_token <= self.num_experts,
                f"at most num_local_experts {self.num_experts}",
                self.experts_per_token,
            )
        if MSA_ATTENTION not in self.layer_types:
            return
        _check("index_block_size", index_block_size == BLOCK_TOKENS, BLOCK_TOKENS, index_block_size)
        _check("index_head_dim", self.index_dim == 128, 128, self.index_dim)
        _check(
            "index_n_heads",
            self.index_heads == self.num_kv_heads,
            f"num_key_value_heads {self.num_kv_heads}",
            self.index_heads,
        )
        topk = self.topk_blocks
        _check("index_topk_blocks", 1 <= topk <= _MAX_TOPK, f"1 to {_MAX_TOPK}", topk)
        forced = (self.init_blocks, self.local_blocks)
        _check(
            "index_init_blocks and index_local_blocks",
            min(forced) >= 0 and sum(forced) <= topk,
            f"from 0, in all at most index_topk_blocks {topk}",
            forced,
        )


def _check(field: str, holds: bool, expected: object, got: object) -> None:
    if not holds:
        raise ValueError(f"config.json: {field} must be {expected}, got {got!r}")


def read_json(path: Path) -> dict[str, Any]:
    """A file of a checkpoint folder; ValueError if it is missing or no JSON."""
    if not path.is_file():
        raise ValueError(f"a checkpoint folder must hold {path.name}, got none at {path}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} must be JSON, got {error}") from error


def _positive(text: dict[str, Any], field: str) -> int:
    value = text.get(field)
    _check(field, isinstance(value, int) and value > 0, "a positive integer", value)
    return value


def _check_no_index_values(legacy: dict[str, Any]) -> None:
    """The indexer may have a value branch that adds to the output; this engine has none."""
    disabled = legacy.get("sparse_disable_index_value", True)
    flags = disabled if isinstance(disabled, list) else [disabled]
    sparse = legacy.get("sparse_attention_freq", [1] * len(flags))
    _check(
        "sparse_disable_index_value",
        all(flag or not layer for flag, layer in zip(flags, sparse, strict=False)),
        "true in every sparse layer",
        disabled,
    )


def _layer_types(
    text: dict[str, Any],
    field: str,
    legacy: dict[str, Any],
    legacy_field: str,
    names: tuple[str, str],
    layers: int,
) -> tuple[str, ...]:
    """The per-layer list, from its field or from a legacy list of 0 (first name) and 1."""
    types = text.get(field)
    if types is None and legacy.get(legacy_field) is not None:
        field, types = legacy_field, [names[bool(flag)] for flag in legacy[legacy_field]]
    _check(field, isinstance(types, list), f"a list of {layers} entries", types)
    _check(field, len(types) == layers, f"num_hidden_layers {layers} entries long", len(types))
    for layer, name in enumerate(types):
        _check(f"{field}[{layer}]", name in names, f"one of {names}", name)
    return tuple(types)


def _rotary(text: dict[str, Any], head_dim: int) -> tuple[int, float]:
    """(rotated channels of a head, theta).

    `rotary_dim` alone is refused: transformers reads the factor only, so without one it rotates
    whole heads, and which of the two the checkpoint means cannot be told from here.
    """
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    _check("rope_parameters.rope_type", rope_type == "default", "'default'", rope_type)
    theta = rope.get("rope_theta", text.get("rope_theta", 5_000_000.0))
    factor = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * factor)
    _check(
        "rope_parameters.partial_rotary_factor",
        0 < rotary_dim <= head_dim and rotary_dim % 2 == 0,
        "above 0, at most 1 and give an even number of channels",
        factor,
    )
    _check(
        "rotary_dim",
        text.get("rotary_dim", rotary_dim) == rotary_dim,
        f"head_dim {head_dim} * partial_rotary_factor {factor}",
        text.get("rotary_dim"),
    )
    return rotary_dim, float(theta)
