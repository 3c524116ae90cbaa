"""Step 1, score: the largest product of a query token with a block's keys."""

import torch
from torch import Tensor

from .numbers import take
from .positions import BLOCK, find_pages, token_positions

_CHUNK_ELEMENTS = 1 << 24
"""products held at once; bounds memory, changes nothing"""


def index_score(
    index_q: Tensor,
    index_k_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """score[h, t, j] = max over tokens s of block j, s <= pos(t), of index_q[t, h] . index_k[s].

    index_q [T, Hi, Di]; index_k_cache [pages, 128, Di]; block_table [B, max_pages];
    cu_seqlens_q [B + 1]; seq_lens [B] -> [Hi, T, max_pages] in `compute_dtype`. -inf where nothing
    is visible: past the token's block, in padding rows, and where the page is not one of the cache.
    A NaN product makes its block NaN.
    """
    num_tokens, num_heads, _ = index_q.shape
    max_pages = block_table.size(1)
    shape = (num_heads, num_tokens, max_pages)
    scores = torch.full(shape, float("-inf"), dtype=compute_dtype, device=index_q.device)
    where = token_positions(cu_seqlens_q, seq_lens, num_tokens, max_pages)
    for request in range(seq_lens.numel()):
        rows = ((where.request == request) & (where.visible > 0)).nonzero()[:, 0]
        if rows.numel() == 0:
            continue
        num_blocks = int(where.visible[rows].max())
        blocks = torch.arange(num_blocks, device=index_q.device)[None]
        pages, there = find_pages(
            block_table, blocks.new_tensor([request]), blocks, index_k_cache.size(0)
        )
        keys = take(index_k_cache, pages[0]).to(compute_dtype).flatten(0, 1)  # [tokens, Di]
        token = torch.arange(num_blocks * BLOCK, device=index_q.device)
        for part in rows.split(max(1, _CHUNK_ELEMENTS // (num_heads * len(keys)))):
            products = torch.einsum("thd,sd->hts", index_q[part].to(compute_dtype), keys)
            products = products.masked_fill(token > where.pos[part, None], float("-inf"))
            best = products.unflatten(-1, (num_blocks, BLOCK)).amax(dim=-1)
            scores[:, part, :num_blocks] = best.masked_fill(~there, float("-inf"))
    return scores
