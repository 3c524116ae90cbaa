"""Where each query token stands: request, position, visible blocks."""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
"""tokens of a block, and slots of a page"""


class Positions(NamedTuple):
    """Of each query token."""

    request: Tensor
    """[T] int64; 0 in padding rows"""
    pos: Tensor
    """[T] int64; position of the token in its request, -1 in padding rows"""
    visible: Tensor
    """[T] int64; blocks from 0 up that the token sees, 0 in padding rows"""


def token_positions(
    cu_seqlens_q: Tensor, seq_lens: Tensor, num_tokens: int, max_blocks: int | None = None
) -> Positions:
    """pos = seq_lens[b] - q_len[b] + i for query token i of request b; visible = pos // 128 + 1.

    cu_seqlens_q [B + 1], seq_lens [B] integers. Rows at or past cu_seqlens_q[-1] are padding. A
    negative pos (more query tokens than tokens) sees nothing. Blocks at or past `max_blocks`, the
    width of the block table, are not there.
    """
    num_requests = seq_lens.numel()
    token = torch.arange(num_tokens, device=seq_lens.device)
    ends = cu_seqlens_q[1:].long()
    request = (token[:, None] >= ends).sum(dim=1)  # the requests that end at or before the token
    padding = request >= num_requests
    if num_requests == 0:
        none = torch.zeros_like(token)
        return Positions(none, none - 1, none)
    request = request.masked_fill(padding, 0)
    pos = seq_lens.long()[request] - ends[request] + token
    pos = pos.masked_fill(padding, -1)
    visible = (pos.div(BLOCK, rounding_mode="floor") + 1).clamp(min=0, max=max_blocks)
    return Positions(request, pos, visible)


def find_pages(block_table: Tensor, request: Tensor, blocks: Tensor, num_pages: int):
    """(pages, there): the page of each block of each row's request, and whether it is a real page.

    block_table [B, max_pages]; request [T]; blocks [T, ...] integers in [0, max_pages) or anything,
    in which case `there` is False and the page is 0, so that it can be indexed with.
    """
    width = block_table.size(1)
    if block_table.numel() == 0 or num_pages == 0:
        return torch.zeros_like(blocks), torch.zeros_like(blocks, dtype=torch.bool)
    known = (blocks >= 0) & (blocks < width)
    row = request.reshape(-1, *[1] * (blocks.dim() - 1))
    pages = block_table.long()[row, blocks.masked_fill(~known, 0)]
    there = known & (pages >= 0) & (pages < num_pages)
    return pages.masked_fill(~there, 0), there
