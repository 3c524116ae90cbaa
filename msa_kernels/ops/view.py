"""Step 3 of decode, view: the selection as a page table that any paged GQA kernel can walk."""

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor


class DecodeView(NamedTuple):
    """A decode batch with the KV heads folded into it: row t * Hkv + h has G query heads.

    `q.view(T * Hkv, G, D)` are its queries, and every view page has one KV head.
    """

    page_table: Tensor
    """[T * Hkv, K] int32: view pages of the row's blocks, ascending by block; 0 past the row's
    pages."""
    kv_lens: Tensor
    """[T * Hkv] int32: tokens of the row; only its last page may be partial. 0 for padding rows."""
    k_view: Tensor
    """[view pages, 1, 128, D]: the K cache as per-head pages, a strided view that shares its
    memory."""
    v_view: Tensor
    """[view pages, 1, 128, D]: the V cache likewise."""


_CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def _gcd(a: int, b: int) -> int:
    """Greatest common divisor; torch.compile can trace it with dynamic strides, math.gcd not."""
    while b:
        a, b = b, a % b
    return a


def _refuse(argument: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"msa.decode_view: {argument} must be {expected}, got {got}")


def _check_cache(name: str, cache: Tensor, ids: Tensor) -> None:
    """What the operator cannot see: it gets the caches' strides only."""
    for argument, tensor in (("ids", ids), (name, cache)):
        if not isinstance(tensor, Tensor):
            _refuse(argument, "a tensor", tensor)
    if cache.device != ids.device:
        _refuse(name, f"on {ids.device}, the device of ids", cache.device)
    if cache.dtype not in _CACHE_DTYPES:
        _refuse(name, "float32, bfloat16 or float8_e4m3fn", str(cache.dtype).removeprefix("torch."))
    if cache.dim() != 4 or cache.shape[2:] != (128, 128):
        _refuse(name, "[pages, Hkv, 128, D] = [*, *, 128, 128]", list(cache.shape))
    if ids.dim() != 3 or ids.size(0) != cache.size(1):
        expected = f"[Hkv, T, K] = [{cache.size(1)}, *, *], the heads of {name}"
        _refuse("ids", expected, list(ids.shape))
    if cache.stride(3) != 1:
        _refuse(f"the last dimension of {name}", "contiguous (stride 1)", cache.stride(3))


def _page_unit(name: str, cache: Tensor) -> tuple[int, int, int]:
    """(elements between view pages, view pages a physical page, view pages a head) of a cache."""
    pages, heads, block, _ = cache.shape
    page_stride, head_stride = cache.stride(0), cache.stride(1)
    # The stride of a dimension of size 1 is never taken and may be anything.
    if heads == 1:
        return (page_stride if pages > 1 else block * cache.stride(2)), 1, 0
    if pages <= 1:
        return head_stride, heads, 1
    unit = _gcd(page_stride, head_stride)
    if unit == 0:
        _refuse(name, "of pages and heads in places of their own", f"strides {cache.stride()}")
    return unit, page_stride // unit, head_stride // unit


def _per_head_pages(cache: Tensor, unit: int, page_step: int, head_step: int) -> Tensor:
    pages, heads, block, dim = cache.shape
    view_pages = (pages - 1) * page_step + (heads - 1) * head_step + 1 if pages else 0
    return cache.as_strided(
        (view_pages, 1, block, dim), (unit, unit, cache.stride(2), cache.stride(3))
    )


def decode_view(
    ids: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    page_table: Tensor | None = None,
    kv_lens: Tensor | None = None,
) -> DecodeView:
    """Turns selected blocks into per-head page tables over a strided view; copies nothing.

    The result lets a paged GQA decode kernel that knows nothing of MSA run it: batch T * Hkv, G
    query heads, one KV head, page size 128.

    Args:
        ids: [Hkv, T, K] int32 or int64, strides free (see `sparse_prefill`). Entries that count
            nothing there are left out of the row here.
        block_table: [B, max_pages] int32, strides free.
        cu_seqlens_q: [B + 1] int32, any stride.
        seq_lens: [B] int32, any stride, tokens.
        k_cache: [pages, Hkv, 128, D], strided (see `sparse_prefill`).
        v_cache: the same; its page and head strides must stand in the same ratio as those of
            `k_cache`, since one page table serves both.
        page_table: [T * Hkv, K] int32 to write into, strides free; given together with `kv_lens`,
            for engines whose attention reads fixed tensors. Must not overlap an input.
        kv_lens: [T * Hkv] int32 to write into, any stride. Must not overlap an input or
            `page_table`; both may be columns of one tensor.

    Returns:
        A `DecodeView`; of the given tensors where there are any.

    Raises:
        ValueError: a shape, dtype, device or stride that the operator does not take, view pages
            past 2^31 - 1, or caches whose strides differ in ratio.
        RuntimeError: no kernel of this build runs on the tensors' device.

    Notes:
        Page unit = gcd(page stride, head stride) elements; view page = physical page * page_step +
        head * head_step. In an HND cache the unit is one head's page, in an NHD pool one head's
        row. Blocks are listed ascending whatever the order of `ids`. Duplicates of full blocks
        count twice. A view page has one KV head, so a kernel that walks the view can apply one
        scale to an FP8 cache, not one of each KV head: `sparse_decode` takes those.
    Cost:
        Bytes: ids and the table entries they name read once, 4 bytes written for each entry.
    Source:
        docs/dataflow.md, step 3.
    """
    _check_cache("k_cache", k_cache, ids)
    _check_cache("v_cache", v_cache, ids)
    if v_cache.dtype != k_cache.dtype:
        _refuse("v_cache", f"{k_cache.dtype}, the dtype of k_cache", v_cache.dtype)
    k_unit, *k_steps = _page_unit("k_cache", k_cache)
    v_unit, *v_steps = _page_unit("v_cache", v_cache)
    if k_steps != v_steps or k_cache.shape != v_cache.shape:
        raise ValueError(
            "msa.decode_view: v_cache must have the shape of k_cache and page and head strides in "
            "the same ratio, since one page table serves both; "
            f"expected {list(k_cache.shape)} with steps {k_steps}, "
            f"got {list(v_cache.shape)} with steps {v_steps}"
        )
    page_step, head_step = k_steps
    k_view = _per_head_pages(k_cache, k_unit, page_step, head_step)
    v_view = _per_head_pages(v_cache, v_unit, page_step, head_step)
    if k_view.size(0) > 2**31 - 1:
        raise ValueError(
            f"msa.decode_view: k_cache must have at most 2^31 - 1 view pages, got {k_view.size(0)}"
        )
    args = (ids, block_table, cu_seqlens_q, seq_lens, k_cache.size(0), page_step, head_step)
    if page_table is None and kv_lens is None:
        page_table, kv_lens = torch.ops.msa.decode_view(*args)
    elif page_table is None or kv_lens is None:
        raise ValueError(
            "msa.decode_view: page_table and kv_lens must be given together, got only one of them"
        )
    else:
        torch.ops.msa.decode_view.out(*args, page_table=page_table, kv_lens=kv_lens)
    return DecodeView(page_table, kv_lens, k_view, v_view)
