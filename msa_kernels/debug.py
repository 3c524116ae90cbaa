"""Checks of values that operators cannot afford; they read the device: for debugging."""

import torch
from torch import Tensor

from .pipeline import Batch
from .positions import BLOCK, visible_blocks


def check_ids(ids: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor) -> None:
    """Raises unless every row of a selection names distinct, visible blocks.

    Args:
        ids: [Hkv, T, K] int32 or int64, strides free, in any order. Of a row the first
            min(K, pos // 128 + 1) entries are looked at; padding rows are not.
        cu_seqlens_q: [B + 1] int32.
        seq_lens: [B] int32, tokens.

    Raises:
        ValueError: an entry is not a visible block, or stands twice in its row; the message names
            the first [head, token] where. Also for an argument of another shape or dtype.

    Notes:
        Synchronises. -1 among the first min(K, visible) entries is reported too: the operators take
        it, as nothing to attend to, but `select_blocks` never makes it.
    Cost:
        One pass over ids on the device, a sort of each row.
    Source:
        docs/numerics.md, "What is bounded, not checked".
    """
    if ids.dim() != 3 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "msa.check_ids: ids must be int32 or int64 [Hkv, T, K], "
            f"got {ids.dtype} {list(ids.shape)}"
        )
    visible = visible_blocks(cu_seqlens_q, seq_lens, ids.size(1)).long()[:, None]  # [T, 1]
    entry = torch.arange(ids.size(2), device=ids.device)
    counts = entry < visible
    outside = counts & ((ids < 0) | (ids >= visible))
    if found := _first(outside):
        head, token, column = found
        raise ValueError(
            f"msa.check_ids: ids must name visible blocks, expected [0, {int(visible[token])}) "
            f"in the first {int(counts[token].sum())} entries, got {int(ids[found])} "
            f"at entry {column} of [head {head}, token {token}]"
        )
    # Entries that do not count become distinct negative numbers, so that only real duplicates meet.
    row = ids.long().where(counts, -1 - entry).sort(dim=-1).values
    if found := _first(row[..., 1:] == row[..., :-1]):
        head, token, _ = found
        raise ValueError(
            "msa.check_ids: ids must name each block once, expected distinct ids, got "
            f"{int(row[found])} twice at [head {head}, token {token}]"
        )


def check_batch(batch: Batch, num_tokens: int) -> None:
    """Raises unless the host integers of a batch agree with its lengths on the device.

    Args:
        batch: the batch of a step.
        num_tokens: T, rows of q, padding included.

    Raises:
        ValueError: cu_seqlens_q does not begin with 0, falls, or ends past T; seq_lens has another
            number of requests; num_decode_requests is not from 0 to B, or num_decode_tokens not
            cu_seqlens_q[num_decode_requests]; a request has more new tokens than tokens.

    Notes:
        Synchronises.
    Cost:
        Reads the lengths back to the host.
    Source:
        docs/numerics.md, "What is bounded, not checked".
    """
    op = "msa.check_batch"
    starts, lengths = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
    if starts[0] != 0 or starts != sorted(starts) or starts[-1] > num_tokens:
        raise ValueError(
            f"{op}: cu_seqlens_q must begin with 0, not fall, and end at most at {num_tokens}, "
            f"got {starts}"
        )
    if len(starts) != len(lengths) + 1:
        raise ValueError(
            f"{op}: cu_seqlens_q must be [B + 1] = [{len(lengths) + 1}], got [{len(starts)}]"
        )
    if not 0 <= batch.num_decode_requests <= len(lengths):
        raise ValueError(
            f"{op}: num_decode_requests must be from 0 to {len(lengths)}, "
            f"got {batch.num_decode_requests}"
        )
    if batch.num_decode_tokens != starts[batch.num_decode_requests]:
        raise ValueError(
            f"{op}: num_decode_tokens must be cu_seqlens_q[{batch.num_decode_requests}] = "
            f"{starts[batch.num_decode_requests]}, got {batch.num_decode_tokens}"
        )
    for request, length in enumerate(lengths):
        new_tokens = starts[request + 1] - starts[request]
        if length < new_tokens:
            raise ValueError(
                f"{op}: seq_lens must count the new tokens too, expected at least {new_tokens} "
                f"for request {request}, got {length}"
            )


def check_block_table(block_table: Tensor, seq_lens: Tensor, num_pages: int) -> None:
    """Raises unless the table names a page of the cache for every block that a request has.

    Args:
        block_table: [B, max_pages] int32, strides free. Entries at or past ceil(seq_lens[b] / 128)
            are not looked at. Requests may share pages.
        seq_lens: [B] int32, tokens.
        num_pages: pages of the cache, `k_cache.size(0)`.

    Raises:
        ValueError: a request is longer than its row of the table, or an entry is not a page; the
            message names the first [request, block] where. Also for an argument of another shape or
            dtype.

    Notes:
        Synchronises.
    Cost:
        One pass over the table on the device.
    Source:
        docs/numerics.md, "What is bounded, not checked".
    """
    op = "msa.check_block_table"
    if block_table.dim() != 2 or block_table.dtype != torch.int32:
        raise ValueError(
            f"{op}: block_table must be int32 [B, max_pages], "
            f"got {block_table.dtype} {list(block_table.shape)}"
        )
    if seq_lens.shape != block_table.shape[:1]:
        raise ValueError(
            f"{op}: seq_lens must be [B] = [{block_table.size(0)}], got {list(seq_lens.shape)}"
        )
    room = block_table.size(1) * BLOCK
    if found := _first((seq_lens < 0) | (seq_lens > room)):
        raise ValueError(
            f"{op}: seq_lens must fit the table, expected 0 to {room} tokens, "
            f"got {int(seq_lens[found])} at [request {found[0]}]"
        )
    block = torch.arange(block_table.size(1), device=block_table.device)
    live = block * BLOCK < seq_lens[:, None]
    if found := _first(live & ((block_table < 0) | (block_table >= num_pages))):
        raise ValueError(
            f"{op}: block_table must name pages of the cache, expected [0, {num_pages}), got "
            f"{int(block_table[found])} at [request {found[0]}, block {found[1]}]"
        )


def _first(bad: Tensor) -> tuple[int, ...] | None:
    where = bad.nonzero()
    return tuple(where[0].tolist()) if len(where) else None
