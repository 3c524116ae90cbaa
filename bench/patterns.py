"""Selections to measure with: uniform, coherent, shared. Drawn on the device, all tokens at once.

uniform: a token's own block and K - 1 of the other visible ones, drawn anew for each token.
coherent: for each 64 consecutive positions of a request, block 0 and K - 4 blocks in common; each
    token adds its own block and 2 blocks drawn for itself. For K 16, four neighbouring tokens then
    select 22 distinct blocks, which is what was measured publicly on the real model.
shared: all tokens of 64 consecutive positions select the same.

Heads are drawn separately. Where fewer blocks are visible than K, all are selected.
"""

import torch
from torch import Tensor

BLOCK = 128
GROUP = 64
"""tokens that share something: half a block, so that they have their own block in common"""
PATTERNS = ("uniform", "coherent", "shared")
_NONE = 2**31 - 1
"""no block; sorts behind every block"""


def select(
    pattern: str, request: Tensor, pos: Tensor, num_heads: int, topk: int, rng: torch.Generator
) -> Tensor:
    """ids [num_heads, T, topk] int32, ascending, then -1, for tokens at `pos` [T] of `request` [T].

    Tokens of a request stand together and in order.
    """
    if pattern == "uniform":
        own = (pos // BLOCK).expand(num_heads, -1)
        return _ascending(_with_own(own, topk, rng))
    if pattern not in PATTERNS:
        raise ValueError(f"pattern must be one of {', '.join(PATTERNS)}, got {pattern!r}")
    group, own_of_group = _groups(request, pos)
    own = own_of_group.expand(num_heads, -1)
    if pattern == "shared":
        return _ascending(_with_own(own, topk, rng))[:, group].contiguous()
    return _coherent(own, group, topk, rng)


def _coherent(own: Tensor, group: Tensor, topk: int, rng: torch.Generator) -> Tensor:
    """`own` [heads, groups] the block of a group's tokens, `group` [T]."""
    num_common = (own - 1).clamp(min=0, max=max(0, topk - 4))
    common = draw(own - 1, num_common, topk - 4, rng) + 1  # of the blocks 1 .. own - 1
    common = common.clamp(max=_NONE).sort(dim=-1).values[:, group]
    own, num_common = own[:, group], num_common[:, group]

    has_first = (own > 0).long()
    num_private = (own + 1).clamp(max=topk) - 1 - has_first - num_common
    rank = draw((own - 1 - num_common).clamp(min=0), num_private, topk, rng)
    # A rank among the blocks 1 .. own - 1 without the common ones, to its block.
    private = rank + 1
    for taken in common.unbind(dim=-1):
        private += private >= taken[..., None]
    private = torch.where(rank == _NONE, _NONE, private)
    first = torch.where(own > 0, 0, _NONE)
    ids = torch.cat([own[..., None], first[..., None], common, private], dim=-1)
    return _ascending(ids.sort(dim=-1).values[..., :topk])


def draw(total: Tensor, count: Tensor, width: int, rng: torch.Generator) -> Tensor:
    """[..., width] int64: in each row `count` distinct numbers below `total`, uniformly, then none.

    Floyd's algorithm, a step for all rows at once. `count` <= `total` where `count` > 0.
    """
    chosen = torch.full((*total.shape, width), _NONE, dtype=torch.int64, device=total.device)
    for i in range(width):
        last = total - count + i
        chance = torch.rand(total.shape, generator=rng, device=total.device)
        number = torch.minimum((chance * (last + 1)).long(), last)
        number = torch.where((chosen == number[..., None]).any(dim=-1), last, number)
        chosen[..., i] = torch.where(i < count, number, _NONE)
    return chosen


def _with_own(own: Tensor, topk: int, rng: torch.Generator) -> Tensor:
    """[..., topk]: the last visible block of each row, and others of those before it."""
    others = draw(own, own.clamp(max=topk - 1), topk - 1, rng)
    return torch.cat([own[..., None], others], dim=-1)


def _ascending(ids: Tensor) -> Tensor:
    ids = ids.sort(dim=-1).values
    return ids.masked_fill(ids == _NONE, -1).int()


def _groups(request: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
    """([T] the group of each token, [groups] the block of its tokens)."""
    key = request * (1 << 32) + pos // GROUP
    keys, group = torch.unique_consecutive(key, return_inverse=True)
    return group, (keys % (1 << 32)) // (BLOCK // GROUP)
