"""Dense attention over the whole context: what the sparsity is to save. cuDNN through PyTorch.

K and V are made contiguous for it beforehand, which is not timed. A chunk on a prefix takes two
cuDNN calls, the prefix without a mask and the chunk itself causally; joining them is not timed.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from msa_kernels import reference

from ..inputs import FP8, D, Inputs
from .base import Call, CannotRun


def load(folder: Path | None) -> "Dense":
    """Always there."""
    return Dense()


class Dense:
    """See the module."""

    name = "dense"
    version = f"torch {torch.__version__}"

    def prepare(self, op: str, inputs: Inputs) -> Call:
        """See `Peer`."""
        if inputs.dtypes.cache == FP8:
            raise CannotRun("no dense FP8 cache in PyTorch")
        if op in ("sparse_prefill", "msa_prefill"):
            run = _by_cudnn(inputs) if inputs.device.type == "cuda" else _by_mask(inputs)
            return Call(run, _joined, dense=True)
        if op in ("sparse_decode", "msa_decode", "decode_step"):
            if len(set(inputs.shape.seq_lens)) > 1 or inputs.shape.q_len is None:
                return Call(_by_mask(inputs), _joined, dense=True)
            return Call(_batched(inputs), dense=True)
        raise CannotRun(f"has nothing for {op}")


def contiguous(inputs: Inputs, request: int) -> tuple[Tensor, Tensor]:
    """K and V [1, Hkv, tokens, D] of one request."""
    length = inputs.shape.seq_lens[request]
    pages = inputs.block_table[request, : -(-length // 128)].long()
    k, v = (
        cache[pages].transpose(0, 1).flatten(1, 2)[None, :, :length].contiguous()
        for cache in (inputs.k_cache, inputs.v_cache)
    )
    return k, v


def _requests(inputs: Inputs):
    begin = 0
    for request, (q_len, seq_len) in enumerate(
        zip(inputs.shape.q_lens, inputs.shape.seq_lens, strict=True)
    ):
        q = inputs.q[begin : begin + q_len].transpose(0, 1)[None].contiguous()
        yield q, *contiguous(inputs, request), seq_len - q_len
        begin += q_len


def _by_cudnn(inputs: Inputs):
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    work = []
    for q, k, v, prefix in _requests(inputs):
        parts = [(k[:, :, prefix:].contiguous(), v[:, :, prefix:].contiguous(), True)]
        if prefix:
            parts.append((k[:, :, :prefix].contiguous(), v[:, :, :prefix].contiguous(), False))
        work.append((q, parts))

    def run():
        return [
            [attend(q, k, v, None, True, 0.0, causal, False)[:2] for k, v, causal in parts]
            for q, parts in work
        ]

    return run


def _by_mask(inputs: Inputs):
    work = []
    for q, k, v, prefix in _requests(inputs):
        token = torch.arange(k.size(2), device=k.device)
        mask = token <= prefix + torch.arange(q.size(2), device=k.device)[:, None]
        work.append((q, k, v, mask))

    def run():
        return [
            [(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True), None)]
            for q, k, v, mask in work
        ]

    return run


def _batched(inputs: Inputs):
    shape = inputs.shape
    keys = [contiguous(inputs, request) for request in range(shape.num_requests)]
    k, v = (torch.cat(x) for x in zip(*keys, strict=True))
    del keys
    q = inputs.q.view(shape.num_requests, shape.q_len, -1, D).transpose(1, 2)
    mask = None
    if shape.q_len > 1:
        token = torch.arange(shape.ctx, device=q.device)
        last = torch.arange(shape.q_len, device=q.device) + shape.ctx - shape.q_len
        mask = token <= last[:, None]

    def run():
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return run


def _joined(requests) -> Tensor:
    """[T, Hq, D] of the parts of every request."""
    outs = []
    for parts in requests:
        out = parts[0][0]
        if len(parts) > 1:
            outs_of = torch.stack([part[0].transpose(1, 2)[0] for part in parts])  # [P, T, H, D]
            lses = torch.stack(
                [part[1].reshape(part[0].shape[:3])[0].transpose(0, 1) for part in parts]
            )
            outs.append(reference.merge_lse(outs_of, lses)[0].to(out.dtype))
        else:
            outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)
