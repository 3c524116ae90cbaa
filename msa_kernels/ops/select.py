"""Step 2, select: the blocks each query token attends to, per KV head."""

import torch
from torch import Tensor


def topk_blocks(
    scores: Tensor,
    visible_blocks: Tensor,
    topk: int = 16,
    *,
    init_blocks: int = 0,
    local_blocks: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """Selects the blocks of each (index head, query token) from their scores.

    Args:
        scores: [Hi, T, blocks] float32, strides free (head-major or token-major).
        visible_blocks: [T] int32, any stride: how many blocks, from 0 up, the token may see
            (`msa_kernels.visible_blocks` computes it from the lengths, once a step). 0 marks a
            padding row; values past `blocks` are taken as `blocks`.
        topk: K, 1 to 32: blocks selected for each row.
        init_blocks: the first blocks, always selected; they count among the K.
        local_blocks: the last visible blocks, always selected; they count among the K.
            init_blocks + local_blocks must not exceed `topk`.
        out: [Hi, T, K] int32 to write into, strides free; allocated (contiguous) when None. Must
            not overlap an input.

    Returns:
        ids [Hi, T, K] int32: min(K, visible) block ids, ascending, then -1.

    Raises:
        ValueError: a shape, dtype, device or number that the operator does not take; or Hi * T is
            2^31 or more.
        RuntimeError: no kernel of this build runs on the tensors' device.

    Notes:
        Ties: of equal scores the lower block id wins. NaN ranks below everything, -inf included.
        Scores at or past the visible count are never read. The same row gives the same ids in any
        batch position.
    Cost:
        Bytes: the visible scores once, 4 * K bytes written for each row.
    Source:
        docs/dataflow.md, step 2.
    """
    if out is None:
        return torch.ops.msa.topk_blocks(
            scores, visible_blocks, topk, init_blocks=init_blocks, local_blocks=local_blocks
        )
    torch.ops.msa.topk_blocks.out(
        scores, visible_blocks, topk, init_blocks=init_blocks, local_blocks=local_blocks, ids=out
    )
    return out


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
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Scores and selects in one call, with a bounded workspace.

    The result is that of `topk_blocks(index_score(...), visible_blocks(...), ...)`. CUDA writes the
    scores of a window of query tokens to a workspace, whose top-k a second launch takes; the CPU
    keeps no scores.

    Args:
        index_q: [T, Hi, Di = 128] float32, bfloat16 or float8_e4m3fn; strides free, last dimension
            contiguous.
        index_k_cache: [pages, 128, Di] of the same dtype; page and token strides free multiples of
            16 bytes.
        block_table: [B, max_pages] int32, strides free (see `index_score`).
        cu_seqlens_q: [B + 1] int32, any stride (see `index_score`).
        seq_lens: [B] int32, any stride, tokens (see `index_score`).
        topk: K, 1 to 32.
        init_blocks: first blocks always selected, counted among the K.
        local_blocks: last visible blocks always selected (1: the token's own), counted among the K.
        max_seqlen_q: host hint, tokens, used on a GPU (see `index_score`).
        max_seqlen_k: host hint, largest seq_len in tokens. Where it says that most of a wide table
            is empty, CUDA scores more query tokens at a time and takes the top-k of shorter rows; a
            wrong one costs speed alone.
        out: [Hi, T, K] int32 to write into, strides free; allocated (contiguous) when None. Must
            not overlap an input.

    Returns:
        ids [Hi, T, K] int32: min(K, pos // 128 + 1) block ids of the request, ascending, then -1;
        only -1 for padding rows. Index head h selects for KV head h.

    Raises:
        ValueError: a shape, dtype, device, stride or number that the operator does not take; or
            (B + 1) * (max_pages + 2) is 2^32 or more (2^24 pages a request count at most).
        RuntimeError: no kernel of this build runs on the tensors' device.

    Notes:
        Ties, NaN and determinism as in `topk_blocks`. The workspace has places for Hi * max_pages
        scores a token, for as many tokens as write 64 MiB of scores (one at least): 64 MiB without
        `max_seqlen_k`, at most 512 MiB with it. Large calls with an FP8 index take about as much
        again on Hopper (docs/kernels/select_blocks.md).
    Cost:
        FLOPs: sum over tokens of (pos + 1) * Hi * Di * 2. Bytes: the index keys of the visible
        blocks once for each tile of query tokens (see `index_score`); CUDA also writes and reads
        the scores, 4 bytes each, which mostly stay in L2.
    Source:
        `MiniMaxM3VLIndexer` of transformers 5.24.0 (Apache-2.0) defines the selection.
    """
    if out is None:
        return torch.ops.msa.select_blocks(
            index_q,
            index_k_cache,
            block_table,
            cu_seqlens_q,
            seq_lens,
            topk,
            init_blocks=init_blocks,
            local_blocks=local_blocks,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
        )
    torch.ops.msa.select_blocks.out(
        index_q,
        index_k_cache,
        block_table,
        cu_seqlens_q,
        seq_lens,
        topk,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        ids=out,
    )
    return out
