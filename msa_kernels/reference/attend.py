"""Step 4, attend: softmax attention over selected blocks, or over every page of a table."""

import itertools

import torch
from torch import Tensor

from .numbers import scale_of_head, take
from .positions import BLOCK, Positions, find_pages, token_positions
from .remap import counted

_CHUNK_ELEMENTS = 1 << 23
"""logits held at once; bounds memory, changes nothing"""


def sparse_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    ids: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q . k) v over the tokens s <= pos of the blocks ids[h, t], and its LSE.

    q [T, Hq, D]; k_cache, v_cache [pages, Hkv, 128, D]; ids [Hkv, T, K]; block_table [B,
    max_pages]; cu_seqlens_q [B + 1]; seq_lens [B] -> out [T, Hq, D], lse [T, Hq], both in
    `compute_dtype`. An entry of ids that does not count, or whose page is not one of the cache,
    adds nothing; one that stands twice counts twice; the order is of no meaning. No key at all: out
    0, lse -inf.
    """
    max_pages = block_table.size(1)
    where = token_positions(cu_seqlens_q, seq_lens, q.size(0), max_pages)
    entries = ids.long().where(counted(ids, where.visible), max_pages)  # the others to one too many
    times = torch.zeros(*ids.shape[:2], max_pages + 1, dtype=compute_dtype, device=q.device)
    times.scatter_add_(-1, entries, torch.ones_like(entries, dtype=compute_dtype))
    return _attend(q, k_cache, v_cache, block_table, where, times, scale, k_scale, v_scale)


sparse_prefill = sparse_attention
sparse_decode = sparse_attention


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    scale: float | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """The same over every page of the row's table: page_table [R, max_pages], kv_lens [R].

    Without cu_seqlens_q, R = T and token t sees the kv_lens[t] tokens of its row. With it, R = B
    and the tokens of request b are the last of its kv_lens[b]; each sees those at or before its own
    position. Returns (out [T, Hq, D], lse [T, Hq]) in `compute_dtype`.
    """
    num_tokens, max_pages = q.size(0), page_table.size(1)
    if cu_seqlens_q is None:
        cu_seqlens_q = torch.arange(num_tokens + 1, device=q.device)
    kv_lens = kv_lens.clamp(max=max_pages * BLOCK)  # longer rows end where their table ends
    where = token_positions(cu_seqlens_q, kv_lens, num_tokens, max_pages)
    seen = torch.arange(max_pages, device=q.device) < where.visible[:, None]
    times = seen.to(compute_dtype).expand(k_cache.size(1), -1, -1)  # every visible block once
    return _attend(q, k_cache, v_cache, page_table, where, times, scale, k_scale, v_scale)


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    where: Positions,
    times: Tensor,
    scale: float | None,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
) -> tuple[Tensor, Tensor]:
    """times [Hkv, T, blocks or more]: how often each block of its request counts for a row."""
    num_tokens, num_q_heads, dim = q.shape
    num_kv_heads = k_cache.size(1)
    group = num_q_heads // num_kv_heads
    scale = dim**-0.5 if scale is None else scale
    new = dict(dtype=times.dtype, device=q.device)
    out = torch.zeros(num_tokens, num_q_heads, dim, **new)
    lse = torch.full((num_tokens, num_q_heads), float("-inf"), **new)

    for request, head in itertools.product(range(table.size(0)), range(num_kv_heads)):
        heads = slice(head * group, (head + 1) * group)
        rows = ((where.request == request) & (where.visible > 0)).nonzero()[:, 0]
        used = times[head, rows, : table.size(1)].any(dim=0).nonzero()[:, 0]  # by any of the rows
        pages, there = find_pages(table, used.new_tensor([request]), used[None], k_cache.size(0))
        used, pages = used[there[0]], pages[0][there[0]]
        if rows.numel() == 0 or used.numel() == 0:
            continue
        token = (used[:, None] * BLOCK + torch.arange(BLOCK, device=q.device)).flatten()
        k = take(k_cache[:, head], pages).flatten(0, 1).to(times.dtype)  # [tokens, D]
        v = take(v_cache[:, head], pages).flatten(0, 1).to(times.dtype)
        k = k * scale_of_head(k_scale, head)
        v = v * scale_of_head(v_scale, head)

        for part in rows.split(max(1, _CHUNK_ELEMENTS // (group * token.numel()))):
            count = times[head, part][:, used].repeat_interleave(BLOCK, dim=-1)
            count = count.masked_fill(token > where.pos[part, None], 0)  # [rows, tokens]
            logits = scale * (q[part, heads].to(times.dtype) @ k.T)  # [rows, G, tokens]
            weights, lse[part, heads] = _softmax(logits, count[:, None])
            out[part, heads] = _weighted_sum(weights, v, count > 0)
    return out, lse


def _softmax(logits: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """count * exp(x) / sum(count * exp(x)) and log of that sum; 0 and -inf where it is empty."""
    logits = logits.masked_fill(count == 0, float("-inf"))
    highest = logits.amax(dim=-1, keepdim=True)
    highest = highest.masked_fill(highest == float("-inf"), 0)
    weights = count * (logits - highest).exp()
    total = weights.sum(dim=-1, keepdim=True)
    lse = (highest + total.log()).squeeze(-1)
    return weights / total.masked_fill(total == 0, 1), lse


def _weighted_sum(weights: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """weights [rows, G, tokens] @ v [tokens, D]; tokens with kept [rows, tokens] False add nothing.

    A slot that does not count may hold NaN, and 0 * NaN is NaN: such tokens are added one by one,
    to the rows that they count for.
    """
    wild = ~v.isfinite().all(dim=-1)
    out = weights @ v.masked_fill(wild[:, None], 0)
    for token in (wild & kept.any(dim=0)).nonzero()[:, 0]:
        term = weights[..., token, None] * v[token]
        out += term.masked_fill(~kept[:, token, None, None], 0)
    return out
