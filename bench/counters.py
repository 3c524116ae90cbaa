"""What an operator must do: FLOPs and bytes as formulas, the one place for them.

FLOPs are useful ones: products that the definition asks for, a multiply and an add counted as two.
Bytes are the fewest that can move: each number needed is read once, each result written once; a
block that several tokens of a request select counts once per KV head. Units: FLOP, bytes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .inputs import BLOCK, FRAME, PATCHES, D, Inputs


@dataclass(frozen=True)
class Cost:
    """The work of one call."""

    flops: int
    """FLOP"""
    bytes: int
    """bytes"""

    def __add__(self, other: "Cost") -> "Cost":
        """The work of both."""
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def floor_us(self, peak_tflops: float, peak_tbps: float) -> tuple[float, str]:
        """(us that a machine of these peaks needs at least, "compute" | "memory")."""
        compute, memory = self.flops / peak_tflops / 1e6, self.bytes / peak_tbps / 1e6
        return (compute, "compute") if compute > memory else (memory, "memory")


def attended_keys(pos: Tensor, topk: int) -> int:
    """Keys that one KV head's selections hold, over all tokens `pos` [T].

    min(pos + 1, (K - 1) 128 + pos % 128 + 1) each: the own block counts up to the token itself,
    every other selected block fully.
    """
    return int(torch.minimum(pos + 1, (topk - 1) * BLOCK + pos % BLOCK + 1).sum())


def seen_keys(pos: Tensor) -> int:
    """Keys at or before each token, over all tokens: sum(pos + 1)."""
    return int((pos + 1).sum())


def distinct_keys(ids: Tensor, request: Tensor, pos: Tensor) -> int:
    """Keys that some token needs, counted once for each (KV head, request, key).

    `ids` [Hkv, T, K]; of a block only the keys at or before the last token that selected it count.
    """
    heads, _, _ = ids.shape
    valid = ids >= 0
    block = ids.long()
    width = int(pos.max()) // BLOCK + 1
    head = torch.arange(heads, device=ids.device)[:, None, None]
    key = (request[:, None] + head * (int(request.max()) + 1)) * width + block
    keys = torch.minimum(pos[:, None] + 1 - block * BLOCK, torch.full_like(block, BLOCK))
    unique, place = torch.unique(key[valid], return_inverse=True)
    most = torch.zeros_like(unique).scatter_reduce_(0, place, keys[valid], "amax")
    return int(most.sum())


def request_keys(inputs: Inputs) -> int:
    """Keys of all requests that a token of the step can see."""
    return sum(s for s, q in zip(inputs.shape.seq_lens, inputs.shape.q_lens, strict=True) if q)


def index_score(inputs: Inputs) -> Cost:
    """sum(pos + 1) Hi Di 2 FLOP; index keys once, queries once, 4 bytes for each visible score."""
    return _index(inputs, written=4 * inputs.shape.num_kv_heads * int(inputs.visible.sum()))


def select_blocks(inputs: Inputs) -> Cost:
    """The products of `index_score`; scores need not touch memory, ids are written."""
    return _index(inputs, written=_ids_bytes(inputs))


def topk_blocks(inputs: Inputs) -> Cost:
    """No products; visible scores and counts read, ids written."""
    scores = 4 * inputs.shape.num_kv_heads * int(inputs.visible.sum())
    return Cost(0, scores + 4 * inputs.shape.num_tokens + _ids_bytes(inputs))


def kv_block_schedule(inputs: Inputs) -> Cost:
    """ids read, 4 bytes written for each selected entry and each (KV head, request, block)."""
    shape = inputs.shape
    rows = shape.num_kv_heads * shape.num_requests * shape.max_blocks
    return Cost(0, _ids_bytes(inputs) + 4 * int((inputs.ids >= 0).sum()) + 4 * rows)


def decode_view(inputs: Inputs) -> Cost:
    """ids and the table entries they name read, 4 bytes written for each entry and each row."""
    rows = inputs.shape.num_kv_heads * inputs.shape.num_tokens
    named = int((inputs.ids >= 0).sum())
    return Cost(0, 2 * _ids_bytes(inputs) + 4 * named + 4 * rows)


def sparse_attention(inputs: Inputs, ids: Tensor | None = None) -> Cost:
    """keys Hq D 4 FLOP; distinct K and V once, ids and q read, out written."""
    shape, dtypes = inputs.shape, inputs.dtypes
    ids = inputs.ids if ids is None else ids
    keys = attended_keys(inputs.pos, shape.topk)
    read = distinct_keys(ids, inputs.request, inputs.pos) * 2 * D * dtypes.cache.itemsize
    return Cost(keys * shape.num_q_heads * D * 4, read + _q_and_out(inputs) + _ids_bytes(inputs))


def dense_attention(inputs: Inputs) -> Cost:
    """sum(pos + 1) Hq D 4 FLOP; K and V of every request once, q read, out written."""
    shape = inputs.shape
    flops = seen_keys(inputs.pos) * shape.num_q_heads * D * 4
    row = 2 * D * shape.num_kv_heads * inputs.dtypes.cache.itemsize
    return Cost(flops, request_keys(inputs) * row + _q_and_out(inputs))


def merge_lse(inputs: Inputs) -> Cost:
    """2 D FLOP for each part of each row; parts and their LSEs read, one of each written."""
    rows = inputs.shape.num_tokens * inputs.shape.num_q_heads
    row = D * inputs.dtypes.q.itemsize + 4
    return Cost(2 * D * inputs.num_parts * rows, (inputs.num_parts + 1) * rows * row)


def write_cache(inputs: Inputs) -> Cost:
    """No products; keys, values, index keys and slots read, the first three written."""
    shape, dtypes = inputs.shape, inputs.dtypes
    kv = 2 * shape.num_kv_heads * D * (dtypes.q.itemsize + dtypes.cache.itemsize)
    return Cost(0, shape.num_tokens * (kv + 2 * D * dtypes.index.itemsize + 8))


def normalize_patches(inputs: Inputs, frames: int = 2) -> Cost:
    """No products; a byte read for each pixel of `frames`, a number written for each of two."""
    rows = PATCHES * inputs.shape.num_tokens
    return Cost(0, rows * FRAME * (frames + 2 * inputs.dtypes.q.itemsize))


def _index(inputs: Inputs, written: int) -> Cost:
    shape, size = inputs.shape, inputs.dtypes.index.itemsize
    flops = seen_keys(inputs.pos) * shape.num_kv_heads * D * 2
    read = request_keys(inputs) + shape.num_tokens * shape.num_kv_heads
    return Cost(flops, read * D * size + written)


def _ids_bytes(inputs: Inputs) -> int:
    return 4 * inputs.shape.num_kv_heads * inputs.shape.num_tokens * inputs.shape.topk


def _q_and_out(inputs: Inputs) -> int:
    return 2 * inputs.shape.num_tokens * inputs.shape.num_q_heads * D * inputs.dtypes.q.itemsize
