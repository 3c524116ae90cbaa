"""Step 1, score: how well each block of 128 keys answers each query token, per index head."""

import torch
from torch import Tensor


def index_score(
    index_q: Tensor,
    index_k_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Scores every visible block of every query token by its best key.

    `score[h, t, j] = max over tokens s of block j with s <= pos(t) of index_q[t, h] . index_k[s]`,
    with no scale and no softmax. For engines and tests that want the scores; `select_blocks` does
    not hand them out.

    Args:
        index_q: [T, Hi, Di = 128] float32, bfloat16 or float8_e4m3fn; strides free, last dimension
            contiguous.
        index_k_cache: [pages, 128, Di] of the same dtype; page and token strides free multiples of
            16 bytes.
        block_table: [B, max_pages] int32, strides free: page of block j of request b. Entries at or
            past ceil(seq_lens[b] / 128) are never dereferenced.
        cu_seqlens_q: [B + 1] int32, any stride: first 0, non-decreasing. Rows at or past
            cu_seqlens_q[-1] are padding.
        seq_lens: [B] int32, any stride: tokens of the request in the cache after this step. Query
            token i of request b stands at pos = seq_lens[b] - q_len[b] + i.
        max_seqlen_q: host hint, largest q_len in tokens. On a GPU it makes a batch whose longest
            request has more tokens than the mean take the kernel for many; a wrong one costs speed
            and at most a rounding of the scores (docs/numerics.md). The CPU does not use it.
        max_seqlen_k: host hint, largest seq_len in tokens; taken, and used by no kernel so far.
        out: [Hi, T, max_pages] float32 to write into, strides free; allocated (contiguous) when
            None. Must not overlap an input.

    Returns:
        [Hi, T, max_pages] float32. -inf where the block is not visible (`j > pos // 128`), for
        padding rows, and where the table names a page outside the cache.

    Raises:
        ValueError: a shape, dtype, device or stride that the operator does not take; or
            (B + 1) * (max_pages + 2) is 2^32 or more (2^24 pages a request count at most).
        RuntimeError: no kernel of this build runs on the tensors' device.

    Notes:
        Products are exact and accumulated in FP32. A NaN product makes the block's score NaN. The
        same inputs give the same bits in any batch position.
    Cost:
        FLOPs: sum over tokens of (pos + 1) * Hi * Di * 2. Bytes: the index keys of the visible
        blocks once for each tile of a request's query tokens (256 rows of T * Hi on a GPU; 64 and
        fewer rows are one tile), plus 4 bytes for each score.
    Source:
        `MiniMaxM3VLIndexer` of transformers 5.24.0 (Apache-2.0) defines the score.
    """
    if out is None:
        return torch.ops.msa.index_score(
            index_q,
            index_k_cache,
            block_table,
            cu_seqlens_q,
            seq_lens,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
        )
    torch.ops.msa.index_score.out(
        index_q,
        index_k_cache,
        block_table,
        cu_seqlens_q,
        seq_lens,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        scores=out,
    )
    return out
