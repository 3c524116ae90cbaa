"""Step 2, select: the blocks a query token attends to."""

import torch
from torch import Tensor

from .positions import token_positions
from .score import index_score


def topk_blocks(
    scores: Tensor,
    visible_blocks: Tensor,
    topk: int = 16,
    *,
    init_blocks: int = 0,
    local_blocks: int = 1,
) -> Tensor:
    """The min(K, visible) best blocks of each row, as ascending ids, then -1.

    scores [Hi, T, blocks]; visible_blocks [T] -> int32 [Hi, T, K]. Best are the forced blocks (the
    first `init_blocks` and the last `local_blocks` of the visible ones), then the highest scores,
    then NaN.
    Equals: the lower id; +0 equals -0.
    """
    blocks = torch.arange(scores.size(-1), device=scores.device)
    visible = visible_blocks.long().clamp(max=scores.size(-1))[:, None]  # [T, 1]
    forced = (blocks < init_blocks) | (blocks >= visible - local_blocks)

    rank = scores.isnan().long() + 1  # 1 a number, 2 NaN
    rank = rank.masked_fill(forced, 0).masked_fill(blocks >= visible, 3)
    value = scores.masked_fill(rank != 1, 0) + 0.0  # adding +0 turns -0 into +0

    # Two stable sorts, the less significant key first: by value, then by rank. Ties keep
    # ascending ids.
    by_value = value.argsort(dim=-1, descending=True, stable=True)
    order = by_value.gather(-1, rank.gather(-1, by_value).argsort(dim=-1, stable=True))

    best = order[..., :topk]
    unused = rank.gather(-1, best) == 3
    best = best.masked_fill(unused, blocks.numel()).sort(dim=-1).values
    best = best.masked_fill(best == blocks.numel(), -1)
    ids = torch.full((*scores.shape[:2], topk), -1, dtype=torch.int32, device=scores.device)
    ids[..., : best.size(-1)] = best
    return ids


def select_blocks(
    index_q: Tensor,
    index_k_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    topk: int = 16,
    *,
    init_blocks: int = 0,
    local_blocks: int = 1,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`topk_blocks` of `index_score`: int32 [Hi, T, K]. Arguments as theirs."""
    scores = index_score(
        index_q, index_k_cache, block_table, cu_seqlens_q, seq_lens, compute_dtype=compute_dtype
    )
    visible = token_positions(cu_seqlens_q, seq_lens, index_q.size(0), block_table.size(1)).visible
    return topk_blocks(scores, visible, topk, init_blocks=init_blocks, local_blocks=local_blocks)
