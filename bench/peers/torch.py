"""Plain PyTorch, as one would write it without kernels: gather, matmul, top-k, SDPA."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..inputs import BLOCK, FP8, PIXEL_MEAN, PIXEL_STD, D, Inputs, take
from .base import Call, CannotRun

_ELEMENTS = 1 << 28
"""numbers gathered or multiplied at once; bounds memory"""


def load(folder: Path | None) -> "Torch":
    """Always there."""
    return Torch()


class Torch:
    """See the module."""

    name = "torch"
    version = torch.__version__

    def prepare(self, op: str, inputs: Inputs) -> Call:
        """See `Peer`."""
        steps = {
            "index_score": lambda: Call(lambda: _scores(inputs)),
            "topk_blocks": lambda: Call(lambda: _topk(inputs.scores, inputs)),
            "select_blocks": lambda: Call(lambda: _topk(_scores(inputs), inputs)),
            "sparse_prefill": lambda: Call(lambda: _attend(inputs, inputs.ids)),
            "sparse_decode": lambda: Call(lambda: _attend(inputs, inputs.ids)),
            "msa_prefill": lambda: Call(lambda: _chain(inputs)),
            "msa_decode": lambda: Call(lambda: _chain(inputs)),
            "merge_lse": lambda: Call(lambda: _merge(inputs.outs, inputs.lses)),
            "normalize_patches": lambda: Call(_normalize(inputs.patches, inputs)),
            "normalize_image_patches": lambda: Call(_normalize(inputs.image_patches, inputs)),
            "write_cache": lambda: Call(lambda: _write(inputs), writes_inputs=True),
        }
        if op not in steps:
            raise CannotRun(f"no plain PyTorch for {op}")
        for name in ("request", "pos", "block_table", "seq_lens"):
            getattr(inputs, name)  # made before a graph is captured
        return steps[op]()


def _scores(inputs: Inputs) -> Tensor:
    """[Hi, T, max_blocks] float32."""
    shape = inputs.shape
    size = (shape.num_kv_heads, shape.num_tokens, shape.max_blocks)
    scores = torch.full(size, float("-inf"), device=inputs.device)
    begin = 0
    for request, (q_len, seq_len) in enumerate(zip(shape.q_lens, shape.seq_lens, strict=True)):
        blocks = -(-seq_len // BLOCK)
        keys = take(inputs.index_k_cache, inputs.block_table[request, :blocks].long())
        keys = keys.float().flatten(0, 1)
        token = torch.arange(len(keys), device=inputs.device)
        step = max(1, _ELEMENTS // (len(keys) * shape.num_kv_heads))
        for first in range(begin, begin + q_len, step):
            rows = slice(first, min(first + step, begin + q_len))
            products = inputs.index_q[rows].float().transpose(0, 1) @ keys.t()
            products = products.masked_fill(token > inputs.pos[rows, None], float("-inf"))
            scores[:, rows, :blocks] = products.unflatten(-1, (blocks, BLOCK)).amax(dim=-1)
        begin += q_len
    return scores


def _topk(scores: Tensor, inputs: Inputs) -> Tensor:
    block = torch.arange(scores.size(-1), device=scores.device)
    visible = inputs.visible[:, None]
    scores = scores.masked_fill(block == visible - 1, float("inf"))
    scores = scores.masked_fill(block >= visible, float("-inf"))
    count = min(inputs.shape.topk, scores.size(-1))
    best = scores.topk(count, dim=-1)
    ids = (
        best.indices.masked_fill(best.values == float("-inf"), scores.size(-1)).sort(dim=-1).values
    )
    ids = ids.masked_fill(ids == scores.size(-1), -1).int()
    return F.pad(ids, (0, inputs.shape.topk - count), value=-1)


def _attend(inputs: Inputs, ids: Tensor) -> Tensor:
    shape = inputs.shape
    heads, group = shape.num_kv_heads, shape.num_q_heads // shape.num_kv_heads
    head = torch.arange(heads, device=ids.device)[:, None]
    slot = torch.arange(BLOCK, device=ids.device)
    out = torch.empty_like(inputs.q)
    step = max(1, _ELEMENTS // (heads * shape.topk * BLOCK * D))
    for first in range(0, shape.num_tokens, step):
        rows = slice(first, min(first + step, shape.num_tokens))
        block = ids[:, rows].transpose(0, 1).long()  # [rows, Hkv, K]
        table = inputs.block_table[inputs.request[rows]].long()
        page = table.gather(1, block.clamp(min=0).flatten(1)).view_as(block)
        k, v = (
            take(cache, (page, head)).to(inputs.q.dtype).flatten(2, 3)
            for cache in (inputs.k_cache, inputs.v_cache)
        )
        seen = block[..., None] * BLOCK + slot <= inputs.pos[rows, None, None, None]
        seen = (seen & (block >= 0)[..., None]).flatten(2)[:, :, None]  # [rows, Hkv, 1, K * 128]
        q = inputs.q[rows].unflatten(1, (heads, group))
        out[rows] = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).flatten(1, 2)
    return out


def _chain(inputs: Inputs) -> tuple[Tensor, Tensor]:
    ids = _topk(_scores(inputs), inputs)
    return ids, _attend(inputs, ids)


def _merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    lse = lses.logsumexp(dim=0)
    weights = (lses - lse).exp()
    return (outs * weights[..., None]).sum(dim=0).to(outs.dtype), lse


def _normalize(patches: Tensor, inputs: Inputs) -> Callable[[], Tensor]:
    mean, std = (
        torch.tensor(x, device=patches.device).mul(255).view(3, 1, 1)
        for x in (PIXEL_MEAN, PIXEL_STD)
    )

    def run() -> Tensor:
        pixels = patches.view(len(patches), 3, -1, 14 * 14)
        values = ((pixels.float() - mean) / std).to(inputs.dtypes.q)
        return values.expand(-1, -1, 2, -1).reshape(len(patches), -1)

    return run


def _write(inputs: Inputs) -> None:
    page, slot = inputs.slot_mapping // BLOCK, inputs.slot_mapping % BLOCK
    for cache, rows in ((inputs.k_cache, inputs.k), (inputs.v_cache, inputs.v)):
        _put(cache.transpose(1, 2), page, slot, rows.to(cache.dtype))
    _put(inputs.index_k_cache, page, slot, inputs.index_k)


def _put(cache: Tensor, page: Tensor, slot: Tensor, rows: Tensor) -> None:
    if cache.dtype == FP8:
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    cache[page, slot] = rows
