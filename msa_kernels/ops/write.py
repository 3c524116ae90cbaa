"""Step 0, write: keys, values and index keys of new tokens into the paged caches."""

import torch
from torch import Tensor

from ._scales import Scale, as_scale


def write_cache(
    k: Tensor,
    v: Tensor,
    index_k: Tensor | None,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    index_k_cache: Tensor | None,
    *,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> None:
    """Writes keys, values and index keys of new tokens into the three caches, in one launch.

    Args:
        k: [T, Hkv, D] float32 or bfloat16, last dimension contiguous.
        v: [T, Hkv, D], dtype and rules of `k`.
        index_k: [T, Di], same rules (or float8_e4m3fn beside a float8_e4m3fn index cache); None
            where the layer has no indexer (then `index_k_cache` is None too).
        slot_mapping: [T] int64, any stride; slot = page * 128 + position in the page. A negative
            slot, and a slot at or past pages * 128, skips its token: nothing is written for it.
        k_cache: [pages, Hkv, 128, D], strided (see `sparse_prefill`), written in place; dtype of
            `k`, or float8_e4m3fn.
        v_cache: [pages, Hkv, 128, D], the same rules; may be the other half of one interleaved
            tensor. No element of a cache may be another cache's too.
        index_k_cache: [pages, 128, Di], page and token strides free; dtype of `index_k`.
        k_scale: float, or float32 tensor of 1 or Hkv elements, for a float8_e4m3fn `k_cache` only:
            stored = round_to_nearest_even(k / k_scale), saturated to +-448. None means 1.
        v_scale: the same for `v_cache`.

    Raises:
        ValueError: a shape, dtype, device or stride that the operator does not take; scales beside
            a cache that is not FP8. Nothing has been written then.
        RuntimeError: no kernel of this build runs on the tensors' device.

    Notes:
        Two tokens with the same slot: either may win. Capturable in a CUDA graph, no
        synchronisation.
    Cost:
        Bytes: each input read once, each written slot written once.
    Source:
        docs/dataflow.md, step 0.
    """
    torch.ops.msa.write_cache(
        k,
        v,
        index_k,
        slot_mapping,
        k_cache,
        v_cache,
        index_k_cache,
        k_scale=as_scale(k_scale),
        v_scale=as_scale(v_scale),
    )
