"""Step 3 of prefill, remap: {query token -> blocks} turned into {block -> query tokens}."""

import itertools

import torch
from torch import Tensor

from .positions import token_positions


def counted(ids: Tensor, visible: Tensor) -> Tensor:
    """bool [H, T, K]: the entries of ids [H, T, K] that count, for visible [T].

    An entry counts when it stands among the first min(K, visible) of its row and names a visible
    block.
    """
    entry = torch.arange(ids.size(-1), device=ids.device)
    visible = visible[:, None]
    return (entry < visible) & (ids >= 0) & (ids < visible)


def kv_block_schedule(
    ids: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    max_blocks: int,
    max_queries_per_item: int = 64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(row_ptr, pairs, work_items, num_work_items) of ids [Hkv, T, K], int32.

    Row = (h * B + b) * max_blocks + j; pair = t * K + k where ids[h, t, k] = j counts.
    row_ptr [Hkv * B * max_blocks + 1]; pairs [Hkv * T * K], by row and then ascending, -1 behind;
    work_items [min(rows, pairs) + pairs // max_queries_per_item, 3] = (row, begin, end): each row's
    pairs in as few items of at most `max_queries_per_item` as will do, their sizes at most one
    apart, longer ones first; -1 behind; num_work_items [1].
    """
    num_heads, num_tokens, topk = ids.shape
    num_requests = seq_lens.numel()
    num_rows = num_heads * num_requests * max_blocks
    size = num_heads * num_tokens * topk
    where = token_positions(cu_seqlens_q, seq_lens, num_tokens, max_blocks)

    head, token, entry = counted(ids, where.visible).nonzero(as_tuple=True)
    row = (head * num_requests + where.request[token]) * max_blocks + ids[head, token, entry].long()
    pair = token * topk + entry
    order = (row * max(1, num_tokens * topk) + pair).argsort()
    row, pair = row[order], pair[order]

    new = dict(dtype=torch.int32, device=ids.device)
    per_row = torch.bincount(row, minlength=num_rows)
    row_ptr = torch.zeros(num_rows + 1, **new)
    row_ptr[1:] = per_row.cumsum(0)
    pairs = torch.full((size,), -1, **new)
    pairs[: pair.numel()] = pair.int()

    items = []
    for r, (begin, end) in enumerate(itertools.pairwise(row_ptr.tolist())):
        for left in range(-(-(end - begin) // max_queries_per_item), 0, -1):
            size_of_item = -(-(end - begin) // left)
            items.append((r, begin, begin + size_of_item))
            begin += size_of_item
    work_items = torch.full((min(num_rows, size) + size // max_queries_per_item, 3), -1, **new)
    if items:
        work_items[: len(items)] = torch.tensor(items, **new)
    return row_ptr, pairs, work_items, torch.tensor([len(items)], **new)
