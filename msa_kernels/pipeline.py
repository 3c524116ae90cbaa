"""The attention of one layer, step by step: the file to read first.

    MSA layers    write_cache -> select_blocks (score + select) -> sparse_prefill | sparse_decode
    dense layers  write_cache -> paged_decode over the whole block table

`PagedCache` is one layer's cache, `Batch` says which tokens of which requests this step holds; a
batch is made once a step and serves every layer.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from .ops import paged_decode, select_blocks, sparse_decode, sparse_prefill, write_cache
from .ops._scales import Scale


class PagedCache(NamedTuple):
    """The paged caches of one layer; strided views, see `sparse_prefill` for the layouts."""

    k: Tensor
    """[pages, Hkv, 128, D]"""
    v: Tensor
    """[pages, Hkv, 128, D]"""
    index_k: Tensor | None = None
    """[pages, 128, Di]; None in a dense layer"""
    k_scale: Scale = None
    """for float8_e4m3fn caches: value = stored * scale"""
    v_scale: Scale = None


class Batch(NamedTuple):
    """The tokens of one step: B requests, T query tokens, in the order of the requests.

    Query token i of request b stands at position seq_lens[b] - q_len[b] + i. The first
    `num_decode_requests` requests are decode or verify steps (1 to 16 tokens each) and take the
    decode path; the others are prefill chunks. Both paths give the same result to rounding.
    """

    block_table: Tensor
    """[B, max_pages] int32: page of block j of request b"""
    cu_seqlens_q: Tensor
    """[B + 1] int32: the first query token of each request, then their number; later rows are
    padding"""
    seq_lens: Tensor
    """[B] int32, tokens in the cache after this step"""
    slot_mapping: Tensor
    """[T] int64: page * 128 + position; -1 skips the token"""
    num_decode_requests: int = 0
    """host integer, requests"""
    num_decode_tokens: int = 0
    """host integer, cu_seqlens_q[num_decode_requests], tokens"""
    max_seqlen_q: int | None = None
    """host hint, tokens; the selection uses it on a GPU"""
    max_seqlen_k: int | None = None
    """host hint, tokens; the selection and the prefill path use it on a GPU"""


def msa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    cache: PagedCache,
    batch: Batch,
    *,
    topk: int = 16,
    init_blocks: int = 0,
    local_blocks: int = 1,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One MSA layer: writes the new tokens, selects blocks for each, attends to those.

    Args:
        q: [T, Hq, D] float32 or bfloat16.
        k: [T, Hkv, D], keys of the new tokens, dtype of `q`.
        v: [T, Hkv, D], their values, dtype of `q`.
        index_q: [T, Hi = Hkv, Di], dtype of `cache.index_k`: float32, bfloat16 or float8_e4m3fn.
        index_k: [T, Di], index keys of the new tokens, the same dtype.
        cache: the layer's caches, written in place; `cache.index_k` must be there.
        batch: the step's tokens.
        topk: K, blocks a query token and KV head attends to.
        init_blocks: first blocks always selected, counted among the K.
        local_blocks: last blocks always selected, counted among the K.
        scale: factor of q . k; None means D ** -0.5.
        out: [T, Hq, D] to write into; allocated when None.

    Returns:
        [T, Hq, D] in q's dtype; zeros in padding rows.

    Raises:
        ValueError: from the operator that does not take its input.
        RuntimeError: no kernel of this build runs on the tensors' device.

    Notes:
        See the operators for ties, padding, empty rows and determinism. No synchronisation; a CUDA
        graph captures it. `num_decode_tokens` must be cu_seqlens_q[num_decode_requests]: it is not
        compared, which would synchronise (`msa_kernels.debug.check_batch` does). An error of a
        later step leaves the new tokens written: the call may be repeated.
    Cost:
        The sum of its operators'.
    Source:
        docs/dataflow.md.
    """
    parts = _split(batch, q.size(0))
    if cache.index_k is None:
        raise ValueError("msa.msa_attention: cache.index_k must be a tensor, got None")
    write_cache(
        k,
        v,
        index_k,
        batch.slot_mapping,
        cache.k,
        cache.v,
        cache.index_k,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
    )
    ids = select_blocks(
        index_q,
        cache.index_k,
        batch.block_table,
        batch.cu_seqlens_q,
        batch.seq_lens,
        topk,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        max_seqlen_q=batch.max_seqlen_q,
        max_seqlen_k=batch.max_seqlen_k,
    )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    for attend, requests, tokens in parts:
        cu_seqlens_q = batch.cu_seqlens_q[requests.start : requests.stop + 1]
        attend(
            q[tokens],
            cache.k,
            cache.v,
            ids[:, tokens],
            batch.block_table[requests],
            cu_seqlens_q - tokens.start if tokens.start else cu_seqlens_q,
            batch.seq_lens[requests],
            scale=scale,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            out=out[tokens],
        )
    return out


def _split(batch: Batch, num_tokens: int):
    """(operator, requests, tokens) of the decode part and of the prefill part, without empty ones.

    Padding rows stand at the end and go with the last part, which zeroes them.
    """
    num_requests = batch.seq_lens.size(0)
    requests, tokens = batch.num_decode_requests, batch.num_decode_tokens
    if not 0 <= requests <= num_requests or not 0 <= tokens <= num_tokens:
        raise ValueError(
            "msa.msa_attention: batch.num_decode_requests and num_decode_tokens must be from 0 to "
            f"the batch's {num_requests} requests and {num_tokens} tokens, "
            f"got {requests} and {tokens}"
        )
    if requests == 0 and tokens > 0:
        raise ValueError(
            "msa.msa_attention: batch.num_decode_tokens must be 0 without decode requests, "
            f"got {tokens}"
        )
    if requests == num_requests:
        return [(sparse_decode, slice(0, num_requests), slice(0, num_tokens))]
    prefill = (sparse_prefill, slice(requests, num_requests), slice(tokens, num_tokens))
    if requests == 0:
        return [prefill]
    return [(sparse_decode, slice(0, requests), slice(0, tokens)), prefill]


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: PagedCache,
    batch: Batch,
    *,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One dense layer: writes the new tokens and attends causally to the whole context.

    Args:
        q: [T, Hq, D] float32 or bfloat16.
        k: [T, Hkv, D], keys of the new tokens, dtype of `q`.
        v: [T, Hkv, D], their values, dtype of `q`.
        cache: the layer's K and V caches, written in place.
        batch: the step's tokens.
        scale: factor of q . k; None means D ** -0.5.
        out: [T, Hq, D] to write into; allocated when None.

    Returns:
        [T, Hq, D] in q's dtype; zeros in padding rows.

    Raises:
        ValueError: from the operator that does not take its input.
        RuntimeError: no kernel of this build runs on the tensors' device.

    Notes:
        Made for engines whose dense layers share the MSA layers' caches; those with a dense
        attention of their own keep it.
    Cost:
        FLOPs: sum over tokens of (pos + 1) * Hq * D * 4.
    Source:
        docs/dataflow.md.
    """
    write_cache(
        k,
        v,
        None,
        batch.slot_mapping,
        cache.k,
        cache.v,
        None,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
    )
    result = paged_decode(
        q,
        cache.k,
        cache.v,
        batch.block_table,
        batch.seq_lens,
        cu_seqlens_q=batch.cu_seqlens_q,
        scale=scale,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
        max_seqlen_q=batch.max_seqlen_q,
        max_seqlen_k=batch.max_seqlen_k,
        out=out,
    )
    return cast(Tensor, result)  # without return_lse
