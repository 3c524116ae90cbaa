"""Step 3 of prefill, remap: which queries selected each block."""

from typing import NamedTuple

import torch
from torch import Tensor


class KVBlockSchedule(NamedTuple):
    """The selection seen from the blocks, as `kv_block_schedule` returns it.

    A *row* is one (KV head h, request b, block j): row = (h * B + b) * max_blocks + j.
    """

    row_ptr: Tensor
    """[Hkv * B * max_blocks + 1] int32: the pairs of a row are pairs[row_ptr[row] : row_ptr[row +
    1]]."""
    pairs: Tensor
    """[Hkv * T * K] int32: t * K + k for each selected entry, in any order within a row; -1 past
    row_ptr[-1]."""
    work_items: Tensor
    """[W, 3] int32: (row, begin, end), a slice of `pairs` of one row of at most
    max_queries_per_item entries, rows ascending; a row is cut into as few as will do, of sizes at
    most one apart, longer ones first; -1 past num_work_items."""
    num_work_items: Tensor
    """[1] int32."""


def kv_block_schedule(
    ids: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    max_blocks: int,
    *,
    max_queries_per_item: int = 64,
) -> KVBlockSchedule:
    """Turns {query token -> blocks} into {block -> query tokens} and cuts it into even work items.

    Args:
        ids: [Hkv, T, K] int32 or int64, strides free. Only the first min(K, pos // 128 + 1) entries
            of a token count; of those, entries < 0 or past the visible blocks are dropped.
        cu_seqlens_q: [B + 1] int32, any stride (see `index_score`).
        seq_lens: [B] int32, any stride, tokens.
        max_blocks: blocks a request may have (the width of the block table). Ids at or past it are
            dropped.
        max_queries_per_item: a row with more pairs than this becomes several work items.

    Returns:
        A `KVBlockSchedule`.

    Raises:
        ValueError: a shape, dtype, device or number that the operator does not take, or Hkv * T * K
            or Hkv * B * max_blocks past 2^31 - 1.
        RuntimeError: no kernel of this build runs on the tensors' device.

    Notes:
        A duplicate id yields two pairs. W = min(rows, pairs) + pairs // max_queries_per_item bounds
        the items of any selection, so no length is read on the host. The order of the pairs within
        a row is ascending on the CPU and not fixed on a GPU; everything else is the same every
        time.
    Cost:
        Bytes: ids read twice, 4 bytes written for each pair and each row.
    Source:
        docs/dataflow.md, step 3.
    """
    return KVBlockSchedule(
        *torch.ops.msa.kv_block_schedule(
            ids, cu_seqlens_q, seq_lens, max_blocks, max_queries_per_item
        )
    )
