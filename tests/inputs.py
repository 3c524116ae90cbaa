"""Hostile inputs: what every test draws from.

A `Case` is one step of an engine: ragged requests, caches of some layout, a selection. Whatever an
operator must not read is poison (NaN, or Inf): slots without a token, pages of nobody, pages around
the view, padding rows, the table behind the live entries. So a stray read shows in the result.
Everything follows from the seed.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from msa_kernels import reference

BLOCK = 128
D = 128
FP8 = torch.float8_e4m3fn
GUARD_PAGES = 2
"""pages before and behind the view of a cache in its pool"""

Lengths = Sequence[tuple[int, int]]
"""(query tokens, tokens in the cache after this step) of each request"""

BATCHES: dict[str, Lengths] = {
    # around the multiples of 128, and around K * 128 for K = 16
    "decode_edges": [
        (1, n) for n in (1, 127, 128, 129, 255, 256, 257, 2047, 2048, 2049, 2175, 2176, 2177)
    ],
    "prefill_edges": [(1, 1), (127, 127), (128, 128), (129, 129), (257, 257)],
    # prefix hits: prefixes off and on a boundary, chunks that end on one
    "chunks": [(7, 1007), (129, 2177), (1, 1), (128, 384), (65, 2113)],
    "verify": [(q, 120 + 130 * q) for q in range(1, 10)] + [(8, 133), (16, 2056)],
    # requests without tokens, without a cache, and both
    "mixed": [(0, 0), (1, 300), (0, 129), (130, 130), (4, 2052), (0, 0), (1, 1), (33, 700), (0, 5)],
    # 40 blocks and more: only here does the selection leave anything out by far
    "long": [(3, 40 * 128 + 5), (1, 48 * 128), (70, 41 * 128 + 70), (2, 43 * 128 + 1)],
    # more query tokens than tokens: a caller's fault, and must stay harmless
    "overfull": [(5, 3), (1, 0), (2, 130)],
    "one": [(1, 1)],
    "nothing": [(0, 0), (0, 0), (0, 0), (0, 0)],
    "no_requests": [],
}

LAYOUTS = ("hnd", "nhd", "interleaved", "nhd_kv", "offset")
"""of the K and V caches; see `make_caches`"""

SELECTIONS = (
    "random",
    "same",
    "disjoint",
    "descending",
    "future_first",
    "minus_first",
    "minus_middle",
    "none",
    "garbage_tail",
    "holes_and_tail",
    "int64",
    "duplicates",
)

DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, FP8),
    (torch.float32, FP8),
]
"""(dtype of q, dtype of the caches) that the operators take"""


def dtype_name(value) -> str | None:
    """Test ids such as bfloat16-float8_e4m3fn."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple) and all(isinstance(x, torch.dtype) for x in value):
        return "-".join(str(x).removeprefix("torch.") for x in value)
    return None


@dataclasses.dataclass(frozen=True)
class Case:
    """One step: new tokens, caches that hold them already, lengths, and a selection."""

    lengths: Lengths
    topk: int
    q: Tensor  # [T, Hq, D]
    k: Tensor  # [T, Hkv, D], the new tokens of the caches, not yet quantised
    v: Tensor
    index_q: Tensor  # [T, Hi, D]
    index_k: Tensor  # [T, D]
    slot_mapping: Tensor  # [T] int64
    k_cache: Tensor  # [pages, Hkv, 128, D]
    v_cache: Tensor
    index_k_cache: Tensor  # [pages, 128, D]
    block_table: Tensor  # [B, max_pages] int32
    cu_seqlens_q: Tensor  # [B + 1] int32
    seq_lens: Tensor  # [B] int32
    ids: Tensor  # [Hkv, T, K]
    k_scale: Tensor | None
    v_scale: Tensor | None
    pools: tuple[Tensor, ...]
    """the allocations that the caches are views of"""

    @property
    def num_tokens(self) -> int:
        return self.q.size(0)

    @property
    def num_real(self) -> int:
        """rows that are not padding"""
        return sum(q_len for q_len, _ in self.lengths)

    @property
    def visible(self) -> Tensor:
        """[T] int32, what `topk_blocks` takes"""
        where = reference.token_positions(
            self.cu_seqlens_q, self.seq_lens, self.num_tokens, self.block_table.size(1)
        )
        return where.visible.int()

    @property
    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.block_table, self.cu_seqlens_q, self.seq_lens

    @property
    def index_args(self) -> tuple[Tensor, ...]:
        return (self.index_q, self.index_k_cache, *self.batch)

    @property
    def attend_args(self) -> tuple[Tensor, ...]:
        return (self.q, self.k_cache, self.v_cache, self.ids, *self.batch)

    @property
    def scales(self) -> dict[str, Tensor]:
        if self.k_scale is None:
            return {}
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}

    def with_(self, **changes) -> "Case":
        return dataclasses.replace(self, **changes)


def make_case(
    lengths: Lengths | str,
    *,
    hq: int = 8,
    hkv: int = 2,
    topk: int = 16,
    dtype: torch.dtype | None = None,
    cache_dtype: torch.dtype | None = None,
    index_dtype: torch.dtype | None = None,
    layout: str = "hnd",
    poison: str = "nan",
    table_padding: int = 2**31 - 1,
    max_pages: int | None = None,
    padding_rows: int = 3,
    selection: str = "random",
    values: str = "normal",
    shared_prefix: int = 0,
    strided: bool = False,
    pages: int | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """A deterministic step.

    dtype: of q and the new tokens; float32 on a CPU, where a result is exact but for rounding, and
        bfloat16 on a GPU unless told.
    cache_dtype: of K and V; float8_e4m3fn gives scales, one a KV head.
    index_dtype: of index_q and the index cache; float8_e4m3fn quantises both.
    poison: "nan", "inf" or "zero", what lies where no token was written.
    padding_rows: rows behind cu_seqlens_q[-1]; their q is NaN and their ids look real.
    values: "normal"; or "integer": small whole numbers, so that every product and sum of the index
        is exact in any order and many scores tie.
    shared_prefix: requests after the first share so many of the first one's pages, if long enough.
    strided: integer tensors as slices of wider ones; q, k, v as slices of one packed tensor;
        index_q too.
    pages: pages of the caches; more than needed makes a larger pool.
    """
    lengths = BATCHES[lengths] if isinstance(lengths, str) else lengths
    dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
    cache_dtype = cache_dtype or dtype
    index_dtype = index_dtype or dtype
    rng = torch.Generator().manual_seed(seed)
    draw = _drawer(values, rng)

    num_real = sum(q_len for q_len, _ in lengths)
    num_tokens = num_real + padding_rows
    num_blocks = [-(-seq_len // BLOCK) for _, seq_len in lengths]
    width = max(num_blocks, default=0) + 2 if max_pages is None else max_pages
    owned = sum(num_blocks)
    pages = owned + 5 if pages is None else pages

    # The first and the last page belong to nobody, and the others to requests in no order.
    free = (torch.randperm(pages - 2, generator=rng) + 1).tolist()
    table = torch.full((len(lengths), width), table_padding, dtype=torch.int32)
    page_lists: list[Tensor] = []
    shared_blocks = [0] * len(lengths)  # of the first request's pages, at each one's front
    for request, blocks in enumerate(num_blocks):
        mine = torch.tensor([free.pop() for _ in range(blocks)], dtype=torch.int64)
        if request and shared_prefix:
            shared = max(0, min(shared_prefix, blocks - 1, num_blocks[0] - 1))
            mine[:shared] = page_lists[0][:shared]
            shared_blocks[request] = shared
        page_lists.append(mine)
        table[request, : min(blocks, width)] = mine[:width].int()

    k_cache, v_cache, kv_pools = make_caches(layout, pages, hkv, cache_dtype, poison, device)
    index_k_cache, index_pool = make_index_cache(pages, index_dtype, poison, device)
    fp8 = cache_dtype == FP8
    k_scale = torch.rand(hkv, generator=rng) * 0.5 + 0.25 if fp8 else None
    v_scale = torch.rand(hkv, generator=rng) * 0.5 + 0.75 if fp8 else None

    # Tokens of every request, stored all at once. Shared pages hold the first one's.
    new = {name: [] for name in ("k", "v", "index_k", "slot")}
    cached = {name: [] for name in ("slot", "k", "v", "index_k")}
    for request in reversed(range(len(lengths))):
        q_len, seq_len = lengths[request]
        k, v = draw(seq_len, hkv, D).to(dtype), draw(seq_len, hkv, D).to(dtype)
        index_k = draw(seq_len, D).to(index_dtype)
        token = torch.arange(seq_len)
        slot = page_lists[request][token // BLOCK] * BLOCK + token % BLOCK
        own = slice(shared_blocks[request] * BLOCK, None)
        cached["slot"].append(slot[own])
        cached["k"].append(_quantised(k[own], k_scale, cache_dtype))
        cached["v"].append(_quantised(v[own], v_scale, cache_dtype))
        cached["index_k"].append(index_k[own])
        # new tokens that have no position, in an overfull request
        lacking = max(0, q_len - seq_len)
        for name, rows, fill in (
            ("k", k, 0.0),
            ("v", v, 0.0),
            ("index_k", index_k.float(), 0.0),
            ("slot", slot, -1),
        ):
            head = rows.new_full((lacking, *rows.shape[1:]), fill)
            new[name].insert(0, torch.cat([head, rows[seq_len - (q_len - lacking) :]]))
    if lengths:
        slot = torch.cat(cached["slot"]).to(device)
        for cache, name in ((k_cache, "k"), (v_cache, "v"), (index_k_cache, "index_k")):
            _store(cache, slot, torch.cat(cached[name]).to(device))

    def joined(name: str, shape: tuple[int, ...], fill, as_dtype: torch.dtype) -> Tensor:
        padding = torch.full((padding_rows, *shape), fill, dtype=as_dtype)
        return torch.cat([*(x.to(as_dtype) for x in new[name]), padding])

    nan = float("nan")
    q = torch.cat([draw(num_real, hq, D), torch.full((padding_rows, hq, D), nan)]).to(dtype)
    k_new, v_new = joined("k", (hkv, D), nan, dtype), joined("v", (hkv, D), nan, dtype)
    index_q = torch.cat([draw(num_real, hkv, D), torch.full((padding_rows, hkv, D), nan)])
    index_k_new = joined("index_k", (D,), nan, torch.float32).to(index_dtype)
    slot_mapping = joined("slot", (), -1, torch.int64)

    q_lens = torch.tensor([0] + [q_len for q_len, _ in lengths])
    cu_seqlens_q = q_lens.cumsum(0).int()
    seq_lens = torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32)
    where = reference.token_positions(cu_seqlens_q, seq_lens, num_tokens, width)
    ids = make_selection(selection, where.visible, hkv, topk, seed=seed)

    q, k_new, v_new, index_q, index_k_new, slot_mapping, table, cu_seqlens_q, seq_lens, ids = (
        x.to(device)
        for x in (
            q,
            k_new,
            v_new,
            index_q.to(index_dtype),
            index_k_new,
            slot_mapping,
            table,
            cu_seqlens_q,
            seq_lens,
            ids,
        )
    )
    if strided:
        q, k_new, v_new = packed(q, k_new, v_new)
        index_q, _ = packed(index_q, index_q)
        slot_mapping, cu_seqlens_q, seq_lens = map(
            sparse_view, (slot_mapping, cu_seqlens_q, seq_lens)
        )
        table = sparse_view(table)
        ids = sparse_view(ids.transpose(0, 1)).transpose(
            0, 1
        )  # token-major storage, as some engines have
    return Case(
        lengths=lengths,
        topk=topk,
        q=q,
        k=k_new,
        v=v_new,
        index_q=index_q,
        index_k=index_k_new,
        slot_mapping=slot_mapping,
        k_cache=k_cache,
        v_cache=v_cache,
        index_k_cache=index_k_cache,
        block_table=table,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        ids=ids,
        k_scale=None if k_scale is None else k_scale.to(device),
        v_scale=None if v_scale is None else v_scale.to(device),
        pools=(*kv_pools, index_pool),
    )


def poisoned(shape: Sequence[int], dtype: torch.dtype, poison: str, device: str = "cpu") -> Tensor:
    """A tensor of NaN, Inf or zeros. FP8 e4m3fn has no Inf: its largest number takes the place."""
    if dtype == FP8:
        byte = {"nan": 0x7F, "inf": 0x7E, "zero": 0}[poison]
        return torch.full(shape, byte, dtype=torch.uint8, device=device).view(FP8)
    value = {"nan": float("nan"), "inf": float("inf"), "zero": 0.0}[poison]
    return torch.full(shape, value, dtype=dtype, device=device)


def make_caches(
    layout: str, pages: int, hkv: int, dtype: torch.dtype, poison: str, device: str = "cpu"
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """(k_cache, v_cache, pools): views [pages, Hkv, 128, D] with guard pages around, in a layout.

    hnd: two tensors, contiguous. nhd: two pools [slots, Hkv, D]. interleaved: [pages, Hkv, 128, 2
        D],
    K and V its halves. nhd_kv: [pages, 2, 128, Hkv, D]. offset: the middle layer of a pool
    [pages, layers, 2, Hkv, 128, D].
    """
    all_pages = pages + 2 * GUARD_PAGES
    inner = slice(GUARD_PAGES, GUARD_PAGES + pages)

    def pool(*shape: int) -> Tensor:
        return poisoned(shape, dtype, poison, device)

    if layout == "hnd":
        k, v = pool(all_pages, hkv, BLOCK, D), pool(all_pages, hkv, BLOCK, D)
        return k[inner], v[inner], (k, v)
    if layout == "nhd":
        k, v = pool(all_pages * BLOCK, hkv, D), pool(all_pages * BLOCK, hkv, D)
        k_view, v_view = (x.view(all_pages, BLOCK, hkv, D)[inner].transpose(1, 2) for x in (k, v))
        return k_view, v_view, (k, v)
    if layout == "interleaved":
        kv = pool(all_pages, hkv, BLOCK, 2 * D)
        return kv[inner, ..., :D], kv[inner, ..., D:], (kv,)
    if layout == "nhd_kv":
        kv = pool(all_pages, 2, BLOCK, hkv, D)
        return kv[inner, 0].transpose(1, 2), kv[inner, 1].transpose(1, 2), (kv,)
    if layout == "offset":
        kv = pool(all_pages, 3, 2, hkv, BLOCK, D)
        return kv[inner, 1, 0], kv[inner, 1, 1], (kv,)
    raise ValueError(layout)


def make_index_cache(
    pages: int, dtype: torch.dtype, poison: str, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """(index_k_cache, pool): [pages, 128, D] whose page and token strides are no K cache's."""
    pool = poisoned((pages + 2 * GUARD_PAGES, BLOCK + 3, D + 16), dtype, poison, device)
    return pool[GUARD_PAGES : GUARD_PAGES + pages, :BLOCK, :D], pool


def make_selection(kind: str, visible: Tensor, hkv: int, topk: int, seed: int = 0) -> Tensor:
    """ids [Hkv, T, K] for visible [T], on the CPU; int32 but for kind "int64".

    Padding rows (visible 0) get ids that look real: they must not be read. Kinds: see `SELECTIONS`.
    """
    rng = torch.Generator().manual_seed(seed + 17)
    num_tokens = visible.numel()
    ids = torch.full((hkv, num_tokens, topk), -1, dtype=torch.int64)
    if kind == "none":
        ids[:, visible == 0] = torch.arange(topk)
        return ids.int()
    for token, seen in enumerate(visible.tolist()):
        count = min(topk, seen)
        for head in range(hkv):
            row = ids[head, token]
            if seen == 0:
                row[:] = torch.arange(topk)
                continue
            chosen = torch.randperm(seen - 1, generator=rng)[: count - 1].sort().values
            row[:count] = torch.cat([chosen, torch.tensor([seen - 1])])
            if kind == "same":  # every query of the head reads one block, and its own
                row[:] = -1
                row[0] = head % seen
            elif kind == "disjoint":
                start = (token * count + head) % seen
                row[:count] = (torch.arange(count) + start) % seen
            elif kind == "descending":
                row[:count] = row[:count].flip(0)
            elif kind == "future_first":
                row[0] = seen + token % 3
            elif kind == "minus_first":
                row[0] = -1
            elif kind == "minus_middle":
                row[count // 2] = -1
            elif kind == "garbage_tail":
                junk = torch.tensor([0, 2**31 - 1, -(2**31), 1, seen - 1, 10**6])
                row[count:] = junk.repeat(topk)[: topk - count]
            elif kind == "holes_and_tail":  # visible blocks behind the count are not for the holes
                row[count:] = torch.arange(topk - count) % seen
                row[: count - 1 : 2] = -1
            elif kind == "duplicates":
                # Full blocks only, where there are any: a block that is read twice counts twice.
                row[:count] = row[:count].where(torch.arange(count) != 1, row[0])
    return ids if kind == "int64" else ids.int()


def with_holes(ids: Tensor) -> Tensor:
    """Entries and whole tokens of -1: some attend to nothing, and with them whole tiles."""
    ids[..., 2:9:3] = -1
    ids[:, 40:100] = -1
    return ids


def with_duplicates(ids: Tensor) -> Tensor:
    """Tokens that list a block twice, and some four times."""
    ids[:, ::2, 1] = ids[:, ::2, 0]
    ids[:, ::6, 2:5] = ids[:, ::6, :1]
    return ids


def shared_selection(case: Case, share: float, seed: int = 0) -> Tensor:
    """ids [Hkv, T, K] for the case, on its device, of which neighbouring tokens have about `share`
    in common: 16 tokens draw together. What stands after a row's entries is no block."""
    rng = torch.Generator(case.q.device).manual_seed(seed)
    visible, topk = case.visible.to(case.q.device).long(), case.topk
    heads, tokens = case.ids.size(0), case.num_tokens
    blocks = int(visible.max()) if tokens else 0
    kw = {"generator": rng, "device": case.q.device}
    together = torch.rand(heads, -(-tokens // 16), blocks, **kw).repeat_interleave(16, 1)[
        :, :tokens
    ]
    alone = torch.rand(heads, tokens, blocks, **kw)
    score = together + (1 - share) * 4 * alone
    block = torch.arange(blocks, device=case.q.device)
    score = score.masked_fill(block >= visible[:, None], -1.0)
    score = score.masked_fill(block == visible[:, None] - 1, 100.0)  # the own block
    ids = score.topk(min(topk, blocks), dim=-1).indices
    ids = torch.nn.functional.pad(ids, (0, topk - ids.size(-1)), value=2**31 - 1)
    count = visible.clamp(max=topk)[None, :, None]
    ids = ids.masked_fill(torch.arange(topk, device=ids.device) >= count, 2**31 - 1)
    return ids.sort(-1).values.int()


def each_alone(case: Case, tokens: Tensor) -> Case:
    """Tokens that have a position as requests of one token each, over the blocks that they select.

    For a look at some tokens of a large case: what a token gets does not depend on the blocks that
    it leaves out, and a reference or a dense baseline need not walk them.
    """
    where = reference.token_positions(
        case.cu_seqlens_q, case.seq_lens, case.num_tokens, case.block_table.size(1)
    )
    device, topk = case.q.device, case.topk
    request, pos, visible = (x[tokens].cpu() for x in where)
    ids = case.ids[:, tokens].long().cpu()
    counts = reference.counted(ids, visible)
    table = case.block_table[request.to(device)].cpu()
    # topk entries without a page come first, so that topk ids may count whatever their number.
    small_table = torch.full((len(tokens), (ids.size(0) + 1) * topk + 1), -1, dtype=torch.int32)
    small_ids = torch.full_like(ids, -1, dtype=torch.int32)
    lens = []
    for row, own in enumerate((pos // BLOCK).tolist()):
        blocks = ids[:, row][counts[:, row]].unique()
        blocks = torch.cat([blocks[blocks != own], torch.tensor([own])])  # the own one is the last
        place = topk + torch.searchsorted(blocks, ids[:, row].contiguous()).int()
        small_ids[:, row] = place.where(counts[:, row], -1)
        there = blocks < table.size(1)
        small_table[row, topk : topk + len(blocks)][there] = table[row, blocks[there]]
        lens.append((topk + len(blocks) - 1) * BLOCK + int(pos[row]) % BLOCK + 1)
    return case.with_(
        lengths=[(1, length) for length in lens],
        q=case.q[tokens],
        ids=small_ids.to(device),
        block_table=small_table.to(device),
        cu_seqlens_q=torch.arange(len(tokens) + 1, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
    )


def sparse_view(x: Tensor) -> Tensor:
    """The same numbers as a slice of a tensor twice as wide, with large numbers between."""
    wide = torch.full([2 * n + 1 for n in x.shape], 10**6 + 7, dtype=x.dtype, device=x.device)
    view = wide[tuple(slice(1, 2 * n + 1, 2) for n in x.shape)]
    view.copy_(x)
    return view


def packed(*parts: Tensor) -> list[Tensor]:
    """Parts [T, heads, D] as slices of one [T, all heads * D], the way a fused projection leaves
    them."""
    sizes = [part.size(1) * part.size(2) for part in parts]
    if parts[0].dtype == FP8:
        joined = torch.cat([part.view(torch.uint8).flatten(1) for part in parts], dim=1).view(FP8)
    else:
        joined = torch.cat([part.flatten(1) for part in parts], dim=1)
    return [
        piece.unflatten(1, part.shape[1:])
        for piece, part in zip(joined.split(sizes, dim=1), parts, strict=True)
    ]


def guarded(
    shape: Sequence[int], dtype: torch.dtype, device: str = "cpu", rows: bool = False
) -> tuple[Tensor, Callable[[], None]]:
    """(view to write into, check that nothing around it was written); the view is strided.

    rows: the last dimension stays contiguous and every stride a multiple of 16 bytes.
    """
    sentinel = -77
    if rows:
        sizes = [*(n + 2 for n in shape[:-1]), shape[-1] + 32]
        inner = (*(slice(1, n + 1) for n in shape[:-1]), slice(16, 16 + shape[-1]))
    else:
        sizes = [2 * n + 3 for n in shape]
        inner = tuple(slice(1, 2 * n + 1, 2) for n in shape)
    whole = torch.full(sizes, sentinel, dtype=dtype, device=device)
    view = whole[inner]

    def check() -> None:
        around = whole.clone()
        around[inner] = sentinel
        assert bool((around == sentinel).all()), "wrote outside of the output's view"

    return view, check


def while_growing(
    case: Case, call: Callable[[], Tensor], shares: Iterable[int]
) -> Iterator[Tensor]:
    """call()'s result while the case's lengths change in place.

    Each request has its new tokens and `share` more, as far as it goes. On a GPU the results are
    those of one graph, captured at the shortest lengths.
    """
    q_lens, longest = case.cu_seqlens_q.diff().tolist(), case.seq_lens.tolist()
    case.seq_lens.copy_(torch.tensor(q_lens, dtype=torch.int32))
    graph = None
    if case.seq_lens.is_cuda:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
    for share in shares:
        lengths = [min(q + share, most) for q, most in zip(q_lens, longest, strict=True)]
        case.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        if graph:
            graph.replay()
        yield captured if graph else call()


FALSE_STARTS = ("more", "most", "negative", "falling", "late")
"""what cu_seqlens_q may say by mistake; "more": that there are more tokens, as it does of a case
whose last tokens are left out"""


def false_starts(case: Case, kind: str) -> Tensor:
    """The case's cu_seqlens_q with that mistake."""
    starts = case.cu_seqlens_q.clone()
    if kind == "most":
        starts[-1] = 2**31 - 1
    elif kind == "negative":
        starts[1:] = -(2**31)
    elif kind == "falling":
        starts[-2] = 2**30
    elif kind == "late":
        starts[0] = starts[1] - 5
    return starts


def check_false_starts(attend: Callable, case: Case, kept: int, kind: str) -> Tensor:
    """Attends to the first `kept` tokens of a case whose cu_seqlens_q says otherwise.

    Returns out; asserts that no row behind it was written, and where all starts are negative that
    nothing was attended to.
    """
    starts = false_starts(case, kind)
    whole = case.q.new_full((kept + 300, *case.q.shape[1:]), 7.0)
    short = case.with_(q=case.q[:kept], ids=case.ids[:, :kept], cu_seqlens_q=starts)
    attend(*short.attend_args, out=whole[:kept])
    torch.cuda.synchronize()
    assert bool((whole[kept:] == 7.0).all())
    if kind == "negative":
        assert not bool(whole[:kept].any())
    return whole[:kept]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(as_int), b.contiguous().view(as_int))


def copied_caches(case: Case, poison: str | None = None) -> Case:
    """The case with caches of its own, in the same layout; filled with poison, or with what is
    there."""
    pools = [
        pool.clone() if poison is None else poisoned(pool.shape, pool.dtype, poison, pool.device)
        for pool in case.pools
    ]
    views = {}
    for name in ("k_cache", "v_cache", "index_k_cache"):
        view = getattr(case, name)
        (pool,) = (
            copy
            for copy, old in zip(pools, case.pools, strict=True)
            if old.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
        )
        views[name] = pool.as_strided(view.size(), view.stride(), view.storage_offset())
    return case.with_(pools=tuple(pools), **views)


def _drawer(values: str, rng: torch.Generator) -> Callable[..., Tensor]:
    if values == "normal":
        return lambda *shape: torch.randn(shape, generator=rng)
    if values == "integer":
        return lambda *shape: torch.randint(-2, 3, shape, generator=rng).float()
    raise ValueError(values)


def _quantised(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [tokens, Hkv, D] as a cache stores it."""
    return x if scale is None else (x.float() / scale[:, None]).clamp(-448, 448).to(dtype)


def _store(cache: Tensor, slot: Tensor, rows: Tensor) -> None:
    """Rows [tokens, (Hkv,) D] to their slots of a cache [pages, (Hkv,) 128, D]."""
    if cache.dtype == FP8:
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    by_slot = cache.transpose(1, 2) if cache.dim() == 4 else cache
    by_slot[slot // BLOCK, slot % BLOCK] = rows


def sort_within_rows(pairs: Tensor, row_ptr: Tensor) -> Tensor:
    """pairs with those of each row in ascending order; what lies behind the last row stays."""
    used = int(row_ptr[-1])
    row = torch.repeat_interleave(row_ptr.long().diff())  # of each pair
    key = row * 2**31 + pairs[:used]
    return torch.cat((pairs[:used][key.argsort()], pairs[used:]))
