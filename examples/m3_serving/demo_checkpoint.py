"""The small random MiniMax-M3 that the demo serves: a checkpoint in the released layout."""

import hashlib
import json
import shutil
from pathlib import Path

import torch

DEMO_FOLDER = Path(__file__).resolve().parents[2] / ".demo"
BOS, EOS, IMAGE, VIDEO, START, END, TURN = range(256, 263)  # after the 256 bytes
SPECIALS = {
    "]~!b[": BOS,
    "[e~[": EOS,
    "]<]image[>[": IMAGE,
    "]<]video[>[": VIDEO,
    "]<]start of image[>[": START,
    "]<]end of image[>[": END,
    "]~b]": TURN,
}
"""the special tokens of M3's vocabulary that its chat template and its media need"""

RECIPE = {
    "version": 3,  # raise it when `make_checkpoint` changes
    "seed": 7,
    "image_token_index": IMAGE,
    "video_token_index": VIDEO,
    "text_config": {
        "vocab_size": 256 + len(SPECIALS),
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 16384,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000.0,
            "partial_rotary_factor": 0.5,
        },
        "layer_types": [
            "full_attention",
            "minimax_m3_sparse",
            "minimax_m3_sparse",
            "minimax_m3_sparse",
        ],
        "index_n_heads": 2,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
        "dense_intermediate_size": 512,
        "intermediate_size": 192,
        "shared_intermediate_size": 192,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "initializer_range": 0.12,
    },
    "vision_config": {
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


def make_checkpoint() -> Path:
    """Saves the model of RECIPE in the released layout, once; returns its folder."""
    from transformers import MiniMaxM3SparseForConditionalGeneration, MiniMaxM3VLConfig, set_seed

    digest = hashlib.sha256(json.dumps(RECIPE, sort_keys=True).encode()).hexdigest()[:12]
    folder = DEMO_FOLDER / digest
    if (folder / "config.json").exists():
        return folder
    set_seed(RECIPE["seed"])
    parts = {name: value for name, value in RECIPE.items() if name not in ("version", "seed")}
    hidden = RECIPE["text_config"]["hidden_size"]
    config = MiniMaxM3VLConfig(**parts, projector_hidden_size=hidden)
    model = MiniMaxM3SparseForConditionalGeneration(config).float()
    with torch.no_grad():
        _spread_language(model.model.language_model)
        _spread_vision(model.model.vision_tower, model.model.multi_modal_projector)
    # Renamed when whole: an interrupted run leaves no half.
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    (unfinished / "tokenizer.json").write_text(byte_tokenizer(), encoding="utf-8")
    unfinished.rename(folder)
    return folder


def _spread_language(language_model: torch.nn.Module) -> None:
    for name, tensor in language_model.state_dict().items():
        # New norms and router biases are all zero: a mistake in using them would not show.
        if name.endswith(("norm.weight", "e_score_correction_bias")):
            tensor.normal_(std=0.1)
        # Twice the usual scale of q and k: attention picks few tokens, so which blocks it sees
        # matters.
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            tensor.add_(1.0)


def _spread_vision(*parts: torch.nn.Module) -> None:
    """New towers say the same of every image, at a hundredth of an embedding's size."""
    for part in parts:
        for name, tensor in part.state_dict().items():
            if tensor.dim() > 1:
                tensor.normal_(std=1.5 * tensor[0].numel() ** -0.5)
            else:
                tensor.normal_(std=0.2)
            if "norm" in name and name.endswith("weight"):
                tensor.add_(1.0)
            if name == "merge_linear_2.weight":
                tensor.mul_(0.3)  # about the size of the other embeddings


def byte_tokenizer() -> str:
    """A tokenizer.json in which a byte is a token, besides the special ones.

    It writes each token as one letter of its own and joins no bytes to characters: a random model's
    bytes are hardly ever text, and two answers that look the same are then the same tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = {letter: byte for byte, letter in enumerate(byte_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    )
    return tokenizer.to_str()


def byte_letters() -> list[str]:
    """The letter by which `ByteLevel` writes each byte: itself if visible, else one from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(256)]
