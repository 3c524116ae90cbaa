"""Step 3 of decode, view: the selection as a page table over per-head pages."""

import torch
from torch import Tensor

from .positions import BLOCK, find_pages, token_positions
from .remap import counted


def decode_view(
    ids: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    num_pages: int,
    page_step: int,
    head_step: int,
) -> tuple[Tensor, Tensor]:
    """(page_table [T * Hkv, K], kv_lens [T * Hkv]) int32 of ids [Hkv, T, K]; row = t * Hkv + h.

    page_table[row, n] = page * page_step + h * head_step for the n-th lowest of the N blocks that
    count and lie on one of the cache's num_pages; 0 behind. kv_lens[row] = (N - 1) * 128 + tokens
    of the last: every block is full but the token's own, which stands last.
    """
    num_heads, num_tokens, topk = ids.shape
    where = token_positions(cu_seqlens_q, seq_lens, num_tokens, block_table.size(1))
    blocks = ids.transpose(0, 1).long()  # [T, Hkv, K]
    pages, there = find_pages(block_table, where.request, blocks, num_pages)
    head = torch.arange(num_heads, device=ids.device)[:, None]
    entries = pages * page_step + head * head_step
    keep = counted(ids, where.visible).transpose(0, 1) & there

    order = blocks.masked_fill(~keep, torch.iinfo(torch.int64).max).argsort(dim=-1, stable=True)
    entries = entries.masked_fill(~keep, 0).gather(-1, order)
    tokens = (where.pos[:, None, None] + 1 - blocks * BLOCK).masked_fill(~keep, BLOCK)
    last = tokens.amin(dim=-1).clamp(max=BLOCK)
    kv_lens = (keep.sum(dim=-1) - 1) * BLOCK + last
    kv_lens = kv_lens.masked_fill(~keep.any(dim=-1), 0)
    return entries.reshape(-1, topk).int(), kv_lens.reshape(-1).int()
