"""Step 4, attend: softmax attention over the selected blocks, or over any page table."""

import torch
from torch import Tensor

from ._scales import Scale, as_scale


def _call(overloads, args, *, return_lse: bool, out: Tensor | None, lse: Tensor | None, **options):
    """Calls the overload that fits; returns out, or (out, lse) where the LSE was asked for."""
    if out is None:
        if lse is not None:
            raise ValueError(
                f"msa.{overloads.__name__}: lse must come together with out, got lse without out"
            )
        result, result_lse = overloads.default(*args, return_lse=return_lse, **options)
        return (result, result_lse) if return_lse else result
    if return_lse and lse is None:
        lse = out.new_empty(out.shape[:2], dtype=torch.float32)
    overloads.out(*args, output=out, lse=lse, **options)
    return (out, lse) if lse is not None else out


def sparse_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    ids: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    return_lse: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of many query tokens over their selected blocks; made for chunks of a prefill.

    For each query token at `pos` and each query head of KV head h: softmax(scale * q . k) v over
    the tokens s <= pos of the blocks `ids[h, t]`. Ragged batches of prefill chunks, decode tokens
    and verify steps are right as well.

    Args:
        q: [T, Hq, D = 128] float32 or bfloat16; token and head strides free multiples of 16 bytes.
        k_cache: [pages, Hkv, 128, D] by logical axis, dtype of `q` or float8_e4m3fn; page, head and
            token strides are free multiples of 16 bytes, D is contiguous: HND, NHD pools, halves of
            one interleaved tensor and views into a larger pool are all read in place.
        v_cache: the same rules; its strides are its own.
        ids: [Hkv, T, K] int32 or int64, strides free, K 1 to 32. Of a token's row only the first
            min(K, pos // 128 + 1) entries count; of those an entry < 0 or >= pos // 128 + 1 adds
            nothing. Order does not matter beyond rounding; a duplicate is the caller's error and
            counts twice (`msa_kernels.debug.check_ids` finds it).
        block_table: [B, max_pages] int32, strides free. Entries at or past ceil(seq_lens[b] / 128)
            are never dereferenced; a page outside the cache adds nothing.
        cu_seqlens_q: [B + 1] int32, any stride: first 0, non-decreasing; rows at or past the last
            are padding.
        seq_lens: [B] int32, any stride: tokens in the cache after this step, new ones included.
        scale: factor of q . k before the softmax; None means D ** -0.5.
        k_scale: float, or float32 tensor of 1 or Hkv elements, for float8_e4m3fn caches only (value
            = stored * scale); None means 1.
        v_scale: the same for `v_cache`.
        return_lse: also return the LSE.
        max_seqlen_q: host hint, tokens; taken, and used by no kernel so far.
        max_seqlen_k: host hint, largest seq_len in tokens. Up to 128 * K, where nothing is left out
            by the selection, Hopper attends by tiles of requests without a remap, as it does for a
            table of K pages (G 8 and 16, without `batch_invariant`); a wrong one costs speed and at
            most a rounding.
        batch_invariant: give a token the same bits whatever else is in the batch. Without it the
            GPU may sum the blocks that neighbouring tokens share in another order; agreement is
            then to rounding. Costs speed where selections are coherent (docs/numerics.md).
        out: [T, Hq, D] of q's dtype to write into, token and head strides free; allocated when
            None. Must not overlap an input.
        lse: [T, Hq] float32 to write into, strides free; only together with `out`, which it must
            not overlap, nor an input.

    Returns:
        out [T, Hq, D] in q's dtype, or (out, lse [T, Hq] float32, natural logarithm) with
        `return_lse` or a given `lse`.

    Raises:
        ValueError: a shape, dtype, device or stride that the operator does not take; G = Hq / Hkv
            other than 1, 2, 4, 8, 16; scales beside a cache that is not FP8; Hkv * T * K or
            Hkv * B * max_pages past 2^31 - 1. Nothing has been written then.
        RuntimeError: no kernel of this build runs on the tensors' device.

    Notes:
        Padding rows, and rows with nothing to attend to, give out 0 and LSE -inf. Slots of the
        cache that no token of the row's range was written to may hold NaN. FP32 accumulation and
        softmax. The same call gives the same bits every time. Forward only: there is no backward.
        A `q` or cache with a stride of 0, as `expand` makes, takes the portable kernel on Hopper
        too, which is slower: the Hopper kernels' tensor maps have no such strides.
    Cost:
        FLOPs: keys attended * Hq * D * 4. Bytes: docs/kernels/sparse_prefill.md.
    Source:
        `MiniMaxM3VLAttention` of transformers 5.24.0 (Apache-2.0) defines the result.
    """
    return _call(
        torch.ops.msa.sparse_prefill,
        (q, k_cache, v_cache, ids, block_table, cu_seqlens_q, seq_lens),
        scale=scale,
        k_scale=as_scale(k_scale),
        v_scale=as_scale(v_scale),
        return_lse=return_lse,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        batch_invariant=batch_invariant,
        out=out,
        lse=lse,
    )


def sparse_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    ids: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    return_lse: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of few query tokens a request over their selected blocks: decode, verify steps.

    The same result as `sparse_prefill` to rounding, arranged for 1 to 16 query tokens a request.

    Args:
        q: [T, Hq, D = 128] float32 or bfloat16 (see `sparse_prefill`, here and below).
        k_cache: [pages, Hkv, 128, D], strided, dtype of `q` or float8_e4m3fn.
        v_cache: the same rules.
        ids: [Hkv, T, K] int32 or int64, strides free, K 1 to 32.
        block_table: [B, max_pages] int32, strides free.
        cu_seqlens_q: [B + 1] int32, any stride.
        seq_lens: [B] int32, any stride, tokens.
        scale: factor of q . k before the softmax; None means D ** -0.5.
        k_scale: float, or float32 tensor of 1 or Hkv elements, for float8_e4m3fn caches only.
        v_scale: the same for `v_cache`.
        return_lse: also return the LSE.
        max_seqlen_q: host hint, tokens; taken, and used by no kernel so far.
        max_seqlen_k: host hint, tokens; the same.
        out: [T, Hq, D] of q's dtype to write into; allocated when None.
        lse: [T, Hq] float32 to write into; only together with `out`.

    Returns:
        out [T, Hq, D] in q's dtype, or (out, lse [T, Hq] float32, natural logarithm).

    Raises:
        ValueError: a shape, dtype, device or stride that the operator does not take.
        RuntimeError: no kernel of this build runs on the tensors' device.

    Notes:
        As `sparse_prefill`. Grids depend on shapes only, lengths are read on the device, so a
        captured CUDA graph stays right while the lengths grow.
    Cost:
        FLOPs: keys attended * Hq * D * 4. Bytes: the selected blocks of each row once (K and V).
    Source:
        `MiniMaxM3VLAttention` of transformers 5.24.0 (Apache-2.0) defines the result.
    """
    return _call(
        torch.ops.msa.sparse_decode,
        (q, k_cache, v_cache, ids, block_table, cu_seqlens_q, seq_lens),
        scale=scale,
        k_scale=as_scale(k_scale),
        v_scale=as_scale(v_scale),
        return_lse=return_lse,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        out=out,
        lse=lse,
    )


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    scale: float | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    return_lse: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over all pages of a page table: a decode view, or any paged KV cache.

    Args:
        q: [T, Hq, D = 128] float32 or bfloat16; token and head strides free multiples of 16 bytes.
        k_cache: [pages, Hkv, 128, D], strided (see `sparse_prefill`); Hkv = 1 in a `DecodeView`.
        v_cache: the same rules.
        page_table: [R, max_pages] int32, strides free. Entries at or past ceil(kv_lens[r] / 128)
            are never dereferenced; a page outside the cache adds nothing.
        kv_lens: [R] int32, any stride: tokens of the row. Taken as max_pages * 128 where larger.
        cu_seqlens_q: None: R = T, and token t attends to the kv_lens[t] tokens of its own row. Or
            [B + 1] int32 with R = B: the tokens of request b are the last ones of its kv_lens[b],
            and each attends causally, to those at or before its position.
        scale: factor of q . k before the softmax; None means D ** -0.5.
        k_scale: float, or float32 tensor of 1 or Hkv elements, for float8_e4m3fn caches only. Over
            a `DecodeView`, where Hkv is 1, that is one scale for all heads of the cache behind it.
        v_scale: the same for `v_cache`.
        return_lse: also return the LSE.
        max_seqlen_q: host hint, tokens; taken, and used by no kernel so far.
        max_seqlen_k: host hint, tokens; the same.
        out: [T, Hq, D] of q's dtype to write into, token and head strides free; allocated when
            None. Must not overlap an input.
        lse: [T, Hq] float32 to write into, strides free; only together with `out`, which it must
            not overlap, nor an input.

    Returns:
        out [T, Hq, D] in q's dtype, or (out, lse [T, Hq] float32, natural logarithm).

    Raises:
        ValueError: a shape, dtype, device or stride that the operator does not take.
        RuntimeError: no kernel of this build runs on the tensors' device.

    Notes:
        Rows of length 0 and padding rows give out 0 and LSE -inf. Slots past a row's length may
        hold NaN.
    Cost:
        FLOPs: keys attended * Hq * D * 4. Bytes: each row's pages once (K and V).
    Source:
        Paged GQA decode as FlashInfer and FlashAttention define it; docs/dataflow.md, step 4.
    """
    return _call(
        torch.ops.msa.paged_decode,
        (q, k_cache, v_cache, page_table, kv_lens),
        cu_seqlens_q=cu_seqlens_q,
        scale=scale,
        k_scale=as_scale(k_scale),
        v_scale=as_scale(v_scale),
        return_lse=return_lse,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        out=out,
        lse=lse,
    )
