"""Fake implementations: shape and dtype of every result; the only shape rules in Python."""

import torch
from torch import Tensor


def _contiguous(like: Tensor, shape, dtype: torch.dtype | None = None) -> Tensor:
    # The operators return contiguous tensors whatever the strides of their inputs (empty_like would
    # inherit them).
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def _nothing(*args, **kwargs) -> None:
    return None


def _index_score(index_q, index_k_cache, block_table, cu_seqlens_q, seq_lens, **hints):
    tokens, heads, _ = index_q.shape
    return _contiguous(index_q, (heads, tokens, block_table.size(1)), torch.float32)


def _topk_blocks(scores, visible_blocks, topk=16, *, init_blocks=0, local_blocks=1):
    return _contiguous(scores, (scores.size(0), scores.size(1), topk), torch.int32)


def _select_blocks(index_q, index_k_cache, block_table, cu_seqlens_q, seq_lens, topk=16, **options):
    return _contiguous(index_q, (index_q.size(1), index_q.size(0), topk), torch.int32)


def _kv_block_schedule(ids, cu_seqlens_q, seq_lens, max_blocks, max_queries_per_item=64):
    rows = ids.size(0) * seq_lens.size(0) * max_blocks
    pairs = ids.numel()
    items = torch.sym_min(rows, pairs) + pairs // max_queries_per_item
    shapes = ((rows + 1,), (pairs,), (items, 3), (1,))
    return tuple(_contiguous(ids, shape, torch.int32) for shape in shapes)


def _decode_view(ids, block_table, cu_seqlens_q, seq_lens, num_pages, page_step, head_step):
    rows = ids.size(0) * ids.size(1)
    return _contiguous(ids, (rows, ids.size(2)), torch.int32), _contiguous(
        ids, (rows,), torch.int32
    )


def _attend(q, *args, return_lse=False, **options):
    lse_shape = (q.size(0), q.size(1)) if return_lse else (0,)
    return _contiguous(q, q.shape), _contiguous(q, lse_shape, torch.float32)


def _merge_lse(outs, lses):
    return _contiguous(outs, outs.shape[1:]), _contiguous(lses, lses.shape[1:])


def _merge_lse_parts(outs, lses):
    return _contiguous(outs[0], outs[0].shape), _contiguous(lses[0], lses[0].shape)


def _normalize_patches(patches, mean, std, *, patch=14, temporal=2, dtype):
    return _contiguous(patches, (patches.size(0), 3 * temporal * patch * patch), dtype)


_FAKES = {
    "write_cache": _nothing,
    "index_score": _index_score,
    "index_score.out": _nothing,
    "topk_blocks": _topk_blocks,
    "topk_blocks.out": _nothing,
    "select_blocks": _select_blocks,
    "select_blocks.out": _nothing,
    "kv_block_schedule": _kv_block_schedule,
    "decode_view": _decode_view,
    "decode_view.out": _nothing,
    "sparse_prefill": _attend,
    "sparse_prefill.out": _nothing,
    "sparse_decode": _attend,
    "sparse_decode.out": _nothing,
    "paged_decode": _attend,
    "paged_decode.out": _nothing,
    "merge_lse": _merge_lse,
    "merge_lse.out": _nothing,
    "merge_lse.parts": _merge_lse_parts,
    "normalize_patches": _normalize_patches,
    "normalize_patches.out": _nothing,
}


def register() -> None:
    """Registers the fake implementation of every operator, once."""
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"msa::{name}", fake)
