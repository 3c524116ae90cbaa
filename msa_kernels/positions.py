"""Lengths to visible blocks, on the device, once a step."""

import torch
from torch import Tensor

BLOCK = 128


def visible_blocks(
    cu_seqlens_q: Tensor, seq_lens: Tensor, num_tokens: int, max_blocks: int | None = None
) -> Tensor:
    """Counts the blocks that each query token may see: `pos // 128 + 1`; what `topk_blocks` takes.

    Args:
        cu_seqlens_q: [B + 1] int32, any stride: first 0, non-decreasing. Rows at or past
            cu_seqlens_q[-1] are padding.
        seq_lens: [B] int32, any stride: tokens of the request in the cache after this step. Query
            token i of request b stands at pos = seq_lens[b] - q_len[b] + i.
        num_tokens: T, rows of the step, padding included.
        max_blocks: width of the block table, blocks; larger counts are taken as this. None: no
            bound.

    Returns:
        [T] int32, blocks, contiguous; 0 for padding rows and where pos < 0.

    Raises:
        ValueError: `cu_seqlens_q` or `seq_lens` is not an integer vector, they differ in length
            other than by one or in device, or a number is negative.

    Notes:
        PyTorch operators only, so it runs on any device; no synchronisation, capturable in a CUDA
        graph. The result depends on the lengths alone: compute it once a step, for all layers.
    Cost:
        Bytes: a few times 8 * T; one binary search over B for each token.
    Source:
        docs/dataflow.md, step 1.
    """
    _check(cu_seqlens_q, seq_lens, num_tokens, max_blocks)
    num_requests = seq_lens.size(0)
    if num_requests == 0 or num_tokens == 0:
        return torch.zeros(num_tokens, dtype=torch.int32, device=seq_lens.device)
    ends = cu_seqlens_q[1:].contiguous()
    token = torch.arange(num_tokens, dtype=ends.dtype, device=ends.device)
    # The request of a token: how many requests end at or before it. Empty requests are passed over.
    request = torch.searchsorted(ends, token, right=True)
    padding = request >= num_requests
    request = request.clamp(max=num_requests - 1)
    pos = seq_lens[request].long() - ends[request] + token
    blocks = (torch.div(pos, BLOCK, rounding_mode="floor") + 1).clamp(min=0, max=max_blocks)
    return blocks.masked_fill(padding, 0).to(torch.int32)


def _check(cu_seqlens_q: Tensor, seq_lens: Tensor, num_tokens: int, max_blocks: int | None) -> None:
    op = "msa.visible_blocks"
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("seq_lens", seq_lens)):
        if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{op}: {name} must be an int32 vector, got {tensor.dtype} {list(tensor.shape)}"
            )
    if cu_seqlens_q.size(0) != seq_lens.size(0) + 1:
        raise ValueError(
            f"{op}: cu_seqlens_q must be [B + 1] = [{seq_lens.size(0) + 1}], "
            f"got {list(cu_seqlens_q.shape)}"
        )
    if cu_seqlens_q.device != seq_lens.device:
        raise ValueError(
            f"{op}: cu_seqlens_q must be on the device of seq_lens, {seq_lens.device}, "
            f"got {cu_seqlens_q.device}"
        )
    if num_tokens < 0:
        raise ValueError(f"{op}: num_tokens must be at least 0, got {num_tokens}")
    if max_blocks is not None and max_blocks < 0:
        raise ValueError(f"{op}: max_blocks must be at least 0, got {max_blocks}")
