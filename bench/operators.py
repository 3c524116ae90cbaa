"""Every operator as the benchmark sees it: how to call ours, what is right, and what it costs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import msa_kernels as msa
from msa_kernels import reference

from . import check, counters
from .check import Check
from .counters import Cost
from .inputs import BLOCK, PIXEL_MEAN, PIXEL_STD, Inputs
from .peers.base import Call


@dataclass(frozen=True)
class Operator:
    """One row of the list."""

    name: str
    phases: tuple[str, ...]
    about: str
    kernels: tuple[str, ...]
    """operators of the library that ours calls; all must be there"""
    ours: Callable[[Inputs], Call]
    check: Callable[[Inputs, Any], Check]
    """of an answer as ours gives it"""
    cost: Callable[[Inputs], Cost]
    patterned: bool = True
    """depends on the selection that it is given"""

    def supported(self, inputs: Inputs) -> tuple[bool, str]:
        """Whether ours would run on these inputs, and the reason why not."""
        reasons = []
        for kernel in self.kernels:
            dtype, cache = _dtypes(kernel, inputs)
            there, reason = msa.is_supported(kernel, inputs.device, dtype, cache)
            if not there:
                reasons.append(reason)
        return not reasons, "; ".join(dict.fromkeys(reasons))

    def math_dtype(self, inputs: Inputs) -> torch.dtype:
        """What its products are computed in: the ceiling it is held against."""
        return inputs.dtypes.index if self.name in _INDEX_OPS else inputs.dtypes.q


_INDEX_OPS = ("index_score", "select_blocks")


def _dtypes(kernel: str, inputs: Inputs) -> tuple[torch.dtype, torch.dtype | None]:
    dtypes = inputs.dtypes
    if kernel in _INDEX_OPS:
        return dtypes.index, None
    if kernel == "topk_blocks":
        return torch.float32, None
    if kernel in ("kv_block_schedule", "decode_view"):
        return torch.int32, None
    return dtypes.q, dtypes.cache


def _index_args(inputs: Inputs) -> tuple:
    batch = (inputs.block_table, inputs.cu_seqlens_q, inputs.seq_lens)
    return (inputs.index_q, inputs.index_k_cache, *batch)


def _index_score(inputs: Inputs) -> Call:
    args, hints = _index_args(inputs), inputs.hints
    return Call(lambda: msa.index_score(*args, **hints))


def _topk_blocks(inputs: Inputs) -> Call:
    args = (inputs.scores, inputs.visible, inputs.shape.topk)
    return Call(lambda: msa.topk_blocks(*args))


def _select_blocks(inputs: Inputs) -> Call:
    args, hints = (*_index_args(inputs), inputs.shape.topk), inputs.hints
    return Call(lambda: msa.select_blocks(*args, **hints))


def _attention(op: Callable) -> Callable[[Inputs], Call]:
    def ours(inputs: Inputs) -> Call:
        batch = (inputs.block_table, inputs.cu_seqlens_q, inputs.seq_lens)
        args = (inputs.q, *inputs.kv(), inputs.ids, *batch)
        options = {**inputs.scales, **inputs.hints}
        return Call(lambda: op(*args, **options))

    return ours


def _chain(op: Callable) -> Callable[[Inputs], Call]:
    def ours(inputs: Inputs) -> Call:
        index, (k, v), scales, hints = _index_args(inputs), inputs.kv(), inputs.scales, inputs.hints
        batch, q, topk = index[2:], inputs.q, inputs.shape.topk

        def run():
            ids = msa.select_blocks(*index, topk, **hints)
            return ids, op(q, k, v, ids, *batch, **scales, **hints)

        return Call(run)

    return ours


def _decode_step(inputs: Inputs) -> Call:
    shape, q = inputs.shape, inputs.q
    k, v, index_k = inputs.stored()
    new = (k, v, inputs.index_q, index_k)
    cache = msa.PagedCache(*inputs.kv(), inputs.index_k_cache, **inputs.scales)
    batch = msa.Batch(
        inputs.block_table,
        inputs.cu_seqlens_q,
        inputs.seq_lens,
        inputs.slot_mapping,
        num_decode_requests=shape.num_requests,
        num_decode_tokens=shape.num_tokens,
        **inputs.hints,
    )
    select = _select_blocks(inputs).run
    return Call(
        lambda: msa.msa_attention(q, *new, cache, batch, topk=shape.topk),
        lambda out: (select(), out),
    )


def _schedule(inputs: Inputs) -> Call:
    args = (inputs.ids, inputs.cu_seqlens_q, inputs.seq_lens, inputs.shape.max_blocks)
    return Call(lambda: msa.kv_block_schedule(*args), tuple)


def _decode_view(inputs: Inputs) -> Call:
    batch = (inputs.block_table, inputs.cu_seqlens_q, inputs.seq_lens)
    args = (inputs.ids, *batch, *inputs.kv())
    return Call(lambda: tuple(msa.decode_view(*args)[:2]))


def _view_steps(cache: torch.Tensor) -> tuple[int, int, int]:
    """(elements between view pages, view pages a page, view pages a head) of a cache."""
    page, head = cache.stride(0), cache.stride(1)
    if cache.size(1) == 1:
        return page, 1, 0
    unit = math.gcd(page, head)
    return unit, page // unit, head // unit


def _paged_decode(inputs: Inputs) -> Call:
    # Over a view made by the reference: our own kernel for views may not be in the build.
    heads, caches = inputs.shape.num_kv_heads, []
    for cache in inputs.kv():
        unit, page_step, head_step = _view_steps(cache)
        pages = (cache.size(0) - 1) * page_step + (heads - 1) * head_step + 1
        strides = (unit, unit, *cache.stride()[2:])
        caches.append(cache.as_strided((pages, 1, *cache.shape[2:]), strides))
    batch = (inputs.block_table, inputs.cu_seqlens_q, inputs.seq_lens)
    table, lens = reference.decode_view(
        inputs.ids, *batch, inputs.kv()[0].size(0), page_step, head_step
    )
    q = inputs.q.unflatten(1, (heads, -1)).flatten(0, 1)  # [T * Hkv, G, D]
    options = {**inputs.scales, "max_seqlen_q": 1, "max_seqlen_k": inputs.shape.topk * BLOCK}
    return Call(
        lambda: msa.paged_decode(q, *caches, table, lens, **options),
        lambda out: out.view(inputs.q.shape),
    )


def _merge_lse(inputs: Inputs) -> Call:
    outs, lses = inputs.outs, inputs.lses
    return Call(lambda: msa.merge_lse(outs, lses))


def _write_cache(inputs: Inputs) -> Call:
    args = (inputs.k, inputs.v, inputs.index_k, inputs.slot_mapping)
    args = (*args, *inputs.kv(), inputs.index_k_cache)
    scales = inputs.scales
    return Call(lambda: msa.write_cache(*args, **scales), writes_inputs=True)


def _normalize(patches: Callable[[Inputs], torch.Tensor]) -> Callable[[Inputs], Call]:
    def ours(inputs: Inputs) -> Call:
        pixels, dtype = patches(inputs), inputs.dtypes.q
        return Call(lambda: msa.normalize_patches(pixels, PIXEL_MEAN, PIXEL_STD, dtype=dtype))

    return ours


def _check_chain(inputs: Inputs, result: tuple) -> Check:
    ids, out = result
    return check.all_of(check.selection(inputs, ids), check.attention(inputs, out, ids))


def _chain_cost(inputs: Inputs) -> Cost:
    # The bytes of the attention depend on what is selected; the pattern's selection stands for it.
    return counters.select_blocks(inputs) + counters.sparse_attention(inputs)


def _step_cost(inputs: Inputs) -> Cost:
    return counters.write_cache(inputs) + _chain_cost(inputs)


BOTH = ("prefill", "decode")

OPERATORS = {
    operator.name: operator
    for operator in (
        Operator(
            "write_cache",
            BOTH,
            "new keys, values and index keys into the caches",
            ("write_cache",),
            _write_cache,
            lambda inputs, _: check.written(inputs),
            counters.write_cache,
            patterned=False,
        ),
        Operator(
            "index_score",
            BOTH,
            "scores of all visible blocks",
            ("index_score",),
            _index_score,
            check.scores,
            counters.index_score,
            patterned=False,
        ),
        Operator(
            "topk_blocks",
            BOTH,
            "scores to block ids",
            ("topk_blocks",),
            _topk_blocks,
            check.topk,
            counters.topk_blocks,
            patterned=False,
        ),
        Operator(
            "select_blocks",
            BOTH,
            "scores and selection in one call",
            ("select_blocks",),
            _select_blocks,
            check.selection,
            counters.select_blocks,
            patterned=False,
        ),
        Operator(
            "kv_block_schedule",
            ("prefill",),
            "selection turned from queries to blocks",
            ("kv_block_schedule",),
            _schedule,
            check.schedule,
            counters.kv_block_schedule,
        ),
        Operator(
            "decode_view",
            ("decode",),
            "selection as a page table",
            ("decode_view",),
            _decode_view,
            lambda inputs, it: check.view(inputs, it, _view_steps(inputs.k_cache)[1:]),
            counters.decode_view,
        ),
        Operator(
            "sparse_prefill",
            ("prefill",),
            "attention over the selected blocks, many tokens",
            ("sparse_prefill",),
            _attention(msa.sparse_prefill),
            check.attention,
            counters.sparse_attention,
        ),
        Operator(
            "sparse_prefill_invariant",
            ("prefill",),
            "the same with batch_invariant=True",
            ("sparse_prefill",),
            _attention(partial(msa.sparse_prefill, batch_invariant=True)),
            check.attention,
            counters.sparse_attention,
        ),
        Operator(
            "sparse_decode",
            ("decode",),
            "attention over the selected blocks, few tokens a request",
            ("sparse_decode",),
            _attention(msa.sparse_decode),
            check.attention,
            counters.sparse_attention,
        ),
        Operator(
            "paged_decode",
            ("decode",),
            "attention over a page table, here that of a decode view",
            ("paged_decode",),
            _paged_decode,
            check.attention,
            counters.sparse_attention,
        ),
        Operator(
            "merge_lse",
            BOTH,
            "K partial results into one",
            ("merge_lse",),
            _merge_lse,
            check.merged,
            counters.merge_lse,
            patterned=False,
        ),
        Operator(
            "normalize_patches",
            ("prefill",),
            "uint8 pixels of a clip, two frames a patch, to the tower's input",
            ("normalize_patches",),
            _normalize(lambda inputs: inputs.patches),
            lambda inputs, out: check.normalized(inputs, inputs.patches, out),
            counters.normalize_patches,
            patterned=False,
        ),
        Operator(
            "normalize_image_patches",
            ("prefill",),
            "the same of images, one frame a patch, written twice",
            ("normalize_patches",),
            _normalize(lambda inputs: inputs.image_patches),
            lambda inputs, out: check.normalized(inputs, inputs.image_patches, out),
            lambda inputs: counters.normalize_patches(inputs, frames=1),
            patterned=False,
        ),
        Operator(
            "msa_prefill",
            ("prefill",),
            "select_blocks and sparse_prefill, chained",
            ("select_blocks", "sparse_prefill"),
            _chain(msa.sparse_prefill),
            _check_chain,
            _chain_cost,
            patterned=False,
        ),
        Operator(
            "msa_decode",
            ("decode",),
            "select_blocks and sparse_decode, chained",
            ("select_blocks", "sparse_decode"),
            _chain(msa.sparse_decode),
            _check_chain,
            _chain_cost,
            patterned=False,
        ),
        Operator(
            "decode_step",
            ("decode",),
            "write_cache, select_blocks and sparse_decode, chained",
            ("write_cache", "select_blocks", "sparse_decode"),
            _decode_step,
            _check_chain,
            _step_cost,
            patterned=False,
        ),
    )
}
