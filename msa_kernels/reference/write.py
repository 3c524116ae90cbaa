"""Step 0, write: new tokens into the caches."""

import torch
from torch import Tensor

from .numbers import FP8, FP8_MAX, scale_of_head
from .positions import BLOCK


def write_cache(
    k: Tensor,
    v: Tensor,
    index_k: Tensor | None,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    index_k_cache: Tensor | None,
    *,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """cache[slot // 128, h, slot % 128] = stored(x[t, h] / scale[h]), in place.

    k, v [T, Hkv, D]; index_k [T, Di] and index_k_cache [pages, 128, Di], or None; slot_mapping [T];
    k_cache, v_cache [pages, Hkv, 128, D]. FP8 caches round to nearest even and saturate at +-448,
    NaN stays NaN; other caches hold the very bits. A slot < 0 or past the pool skips its token.
    """
    written = (slot_mapping >= 0) & (slot_mapping < k_cache.size(0) * BLOCK)
    slots = slot_mapping[written].long()
    page, offset = slots // BLOCK, slots % BLOCK
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        for head in range(cache.size(1)):
            _put(
                cache[:, head],
                page,
                offset,
                _stored(x[written, head], cache, scale, head, compute_dtype),
            )
    if index_k is not None:
        _put(index_k_cache, page, offset, index_k[written])


def _put(cache: Tensor, page: Tensor, offset: Tensor, rows: Tensor) -> None:
    if cache.dtype == FP8:
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    cache[page, offset] = rows


def _stored(x: Tensor, cache: Tensor, scale, head: int, compute_dtype: torch.dtype) -> Tensor:
    if cache.dtype != FP8:
        return x
    # By a tensor, since PyTorch multiplies by the reciprocal of a number on some devices.
    divisor = torch.full((), scale_of_head(scale, head), dtype=compute_dtype, device=x.device)
    return (x.to(compute_dtype) / divisor).clamp(-FP8_MAX, FP8_MAX).float().to(FP8)
