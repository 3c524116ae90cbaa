"""The other side of the demo: a checkpoint and its greedy answers in transformers."""

from pathlib import Path
from typing import Any

import torch


def load_reference(folder: Path) -> Any:
    """transformers' model of a checkpoint, with its eager attention."""
    from transformers import MiniMaxM3SparseForConditionalGeneration

    return MiniMaxM3SparseForConditionalGeneration.from_pretrained(
        folder, attn_implementation="eager"
    )


def greedy_answer(
    model: Any, prompt: list[int], new_tokens: int, **options: Any
) -> tuple[list[int], torch.Tensor]:
    """(answer, margins [tokens]) of transformers.

    A margin is how far the chosen token's logit is above the next one: what rounding may not
    exceed.

    Args:
        model: of `load_reference`.
        prompt: token ids.
        new_tokens: most tokens of the answer.
        options: of its `generate`; a prompt's images and clips are some.
    """
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    best, second = torch.cat(result.logits).topk(2).values.unbind(-1)
    return result.sequences[0, len(prompt) :].tolist(), best - second
