"""Shapes to tensors: one step's inputs, made on the device they are used on, each on first use.

Nothing loops over tokens, so that a million of them take no longer than the memory to write.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .patterns import select

BLOCK = 128
"""tokens of a block, slots of a page"""
D = 128
"""head size of q, k, v and of the index"""
FP8 = torch.float8_e4m3fn
PATCHES = 4
"""rows of patches that one token of an image or clip stands for"""
FRAME = 3 * 14 * 14
"""bytes of one frame of a patch"""
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)
LAYOUTS = ("interleaved", "hnd", "nhd")
_FILL = 1 << 28
"""numbers drawn at once; bounds the memory that drawing takes beside the pool"""


@dataclass(frozen=True)
class Shape:
    """What a step is: query tokens and KV length of each request, and the heads of a rank."""

    q_lens: tuple[int, ...]
    """query tokens of each request"""
    seq_lens: tuple[int, ...]
    """tokens in the cache after this step, of each request"""
    num_q_heads: int = 64
    num_kv_heads: int = 4
    topk: int = 16
    """blocks selected for each query token and KV head"""
    max_model_len: int = 0
    """tokens that a block table has columns for; no more than the longest request has if smaller"""

    @staticmethod
    def of(requests: int, tokens: int, ctx: int, **heads: int) -> "Shape":
        """`tokens` query tokens in all, spread evenly over requests of `ctx` tokens each."""
        if not 1 <= requests <= tokens <= requests * ctx:
            raise ValueError(
                "a shape has requests, a query token or more for each, and contexts that hold "
                f"them: expected 1 <= B <= T <= B * ctx, got B {requests}, T {tokens}, ctx {ctx}"
            )
        each, more = divmod(tokens, requests)
        q_lens = tuple(each + (i < more) for i in range(requests))
        return Shape(q_lens, (ctx,) * requests, **heads)

    @property
    def num_requests(self) -> int:
        """B, requests."""
        return len(self.q_lens)

    @property
    def num_tokens(self) -> int:
        """T, query tokens of all requests."""
        return sum(self.q_lens)

    @property
    def ctx(self) -> int:
        """The longest KV, tokens."""
        return max(self.seq_lens)

    @property
    def q_len(self) -> int | None:
        """Query tokens of every request, or None where they differ."""
        return self.q_lens[0] if len(set(self.q_lens)) == 1 else None

    @property
    def ctx_blocks(self) -> int:
        """Blocks of the longest request."""
        return -(-self.ctx // BLOCK)

    @property
    def max_blocks(self) -> int:
        """Columns of the block table."""
        return max(self.ctx_blocks, -(-self.max_model_len // BLOCK))

    def shrunk(self) -> "Shape":
        """A shape of the same kind that a CPU does at once: few tokens, requests and heads."""
        count = min(3, self.num_requests)
        heads = min(2, self.num_kv_heads)
        group = min(4, self.num_q_heads // self.num_kv_heads)
        q_lens = tuple(min(q, 12 + i) for i, q in enumerate(self.q_lens[:count]))
        # Longer than 16 blocks, so that the selection leaves something out, and no multiple of one.
        seq_lens = tuple(min(s, 2500 - 300 * i) for i, s in enumerate(self.seq_lens[:count]))
        return Shape(
            q_lens, seq_lens, heads * group, heads, self.topk, min(self.max_model_len, 4000)
        )

    def to_json(self) -> dict[str, int]:
        """The letters of the contract; q only where all requests have as many query tokens."""
        letters = {"B": self.num_requests, "T": self.num_tokens, "ctx": self.ctx}
        letters |= {"Hq": self.num_q_heads, "Hkv": self.num_kv_heads, "K": self.topk}
        if self.max_model_len > self.ctx:
            letters["table"] = self.max_model_len
        return letters if self.q_len is None else {**letters, "q": self.q_len}


@dataclass(frozen=True)
class Dtypes:
    """The dtypes that one word on the command line stands for."""

    q: torch.dtype
    cache: torch.dtype
    index: torch.dtype


DTYPES = {
    "bfloat16": Dtypes(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "float32": Dtypes(torch.float32, torch.float32, torch.float32),
    # BF16 queries over an FP8 cache, and an index that is FP8 on both sides.
    "fp8": Dtypes(torch.bfloat16, FP8, FP8),
}


class Inputs:
    """The tensors of one step, named as the operators name them."""

    def __init__(
        self,
        shape: Shape,
        dtype: str = "bfloat16",
        pattern: str = "uniform",
        device: str | torch.device = "cpu",
        *,
        layout: str = "interleaved",
        seed: int = 0,
    ) -> None:
        """`layout`: where K and V of a page lie, see `kv`; `seed`: of every number drawn."""
        self.shape = shape
        self.dtypes = DTYPES[dtype]
        self.pattern = pattern
        self.device = torch.device(device)
        self.layout = layout
        self.rng = torch.Generator(self.device).manual_seed(seed)
        self._pools: dict[str, tuple[Tensor, Tensor]] = {}

    # The batch.

    @cached_property
    def seq_lens(self) -> Tensor:
        """[B] int32, tokens."""
        return self._ints(self.shape.seq_lens)

    @cached_property
    def q_lens(self) -> Tensor:
        """[B] int32, tokens."""
        return self._ints(self.shape.q_lens)

    @cached_property
    def prefix_lens(self) -> Tensor:
        """[B] int32, tokens that were in the cache before this step."""
        return self.seq_lens - self.q_lens

    @cached_property
    def cu_seqlens_q(self) -> Tensor:
        """[B + 1] int32."""
        return torch.cat([self.q_lens.new_zeros(1), self.q_lens.cumsum(0).int()])

    @cached_property
    def request(self) -> Tensor:
        """[T] int64, the request of each token."""
        requests = torch.arange(self.shape.num_requests, device=self.device)
        return requests.repeat_interleave(self.q_lens, output_size=self.shape.num_tokens)

    @cached_property
    def pos(self) -> Tensor:
        """[T] int64, the position of each token in its request."""
        token = torch.arange(self.shape.num_tokens, device=self.device)
        return self.prefix_lens.long()[self.request] + token - self.cu_seqlens_q[self.request]

    @cached_property
    def visible(self) -> Tensor:
        """[T] int32, blocks that each token sees."""
        return (self.pos // BLOCK + 1).int()

    @property
    def num_pages(self) -> int:
        """Pages of the caches: those of the requests, and some of nobody."""
        return sum(-(-s // BLOCK) for s in self.shape.seq_lens) + 7

    @cached_property
    def block_table(self) -> Tensor:
        """[B, max_blocks] int32: pages in no order, -1 behind a request's own."""
        block = torch.arange(self.shape.max_blocks, device=self.device)
        live = block * BLOCK < self.seq_lens[:, None]
        pages = torch.randperm(self.num_pages, generator=self.rng, device=self.device)
        table = torch.full(live.shape, -1, dtype=torch.int32, device=self.device)
        table[live] = pages[: sum(-(-s // BLOCK) for s in self.shape.seq_lens)].int()
        return table

    @cached_property
    def slot_mapping(self) -> Tensor:
        """[T] int64: where each token's keys lie."""
        page = self.block_table[self.request, self.pos // BLOCK]
        return page.long() * BLOCK + self.pos % BLOCK

    @property
    def hints(self) -> dict[str, int]:
        """The host hints an engine would pass."""
        return {"max_seqlen_q": max(self.shape.q_lens), "max_seqlen_k": self.shape.ctx}

    # Queries and new tokens.

    @cached_property
    def q(self) -> Tensor:
        """[T, Hq, D]."""
        return self.draw((self.shape.num_tokens, self.shape.num_q_heads, D), self.dtypes.q)

    @cached_property
    def index_q(self) -> Tensor:
        """[T, Hi, Di]."""
        return self.draw((self.shape.num_tokens, self.shape.num_kv_heads, D), self.dtypes.index)

    @cached_property
    def k(self) -> Tensor:
        """[T, Hkv, D], new keys."""
        return self.draw((self.shape.num_tokens, self.shape.num_kv_heads, D), self.dtypes.q)

    @cached_property
    def v(self) -> Tensor:
        """[T, Hkv, D], new values."""
        return self.draw((self.shape.num_tokens, self.shape.num_kv_heads, D), self.dtypes.q)

    @cached_property
    def index_k(self) -> Tensor:
        """[T, Di], new index keys."""
        return self.draw((self.shape.num_tokens, D), self.dtypes.index)

    def stored(self) -> tuple[Tensor, Tensor, Tensor]:
        """(k, v, index_k) as the caches hold them already: writing these changes nothing."""
        page, slot = self.slot_mapping // BLOCK, self.slot_mapping % BLOCK
        k, v = (take(cache.transpose(1, 2), (page, slot)).to(self.dtypes.q) for cache in self.kv())
        return k, v, take(self.index_k_cache, (page, slot))

    # Caches.

    def kv(self, layout: str | None = None) -> tuple[Tensor, Tensor]:
        """(k_cache, v_cache) [pages, Hkv, 128, D], the same numbers in one of the layouts.

        interleaved: halves of one [pages, Hkv, 128, 2 D]; hnd: two tensors; nhd: two pools of
        slots [pages * 128, Hkv, D]. A second layout is a copy, made once.
        """
        layout = layout or self.layout
        if layout not in self._pools:
            k, v = self._empty_kv(layout)
            if self._pools:
                source = next(iter(self._pools.values()))
                for cache, numbers in zip((k, v), source, strict=True):
                    _bytes(cache).copy_(_bytes(numbers))
            else:
                for cache in (k, v):
                    self._fill(cache)
            self._pools[layout] = (k, v)
        return self._pools[layout]

    @property
    def k_cache(self) -> Tensor:
        """[pages, Hkv, 128, D]."""
        return self.kv()[0]

    @property
    def v_cache(self) -> Tensor:
        """[pages, Hkv, 128, D]."""
        return self.kv()[1]

    @cached_property
    def scales(self) -> dict[str, Tensor]:
        """k_scale and v_scale, one element: 1, as not every peer takes another; FP8 only."""
        if self.dtypes.cache != FP8:
            return {}
        one = torch.ones(1, dtype=torch.float32, device=self.device)
        return {"k_scale": one, "v_scale": one.clone()}

    @cached_property
    def index_k_cache(self) -> Tensor:
        """[pages, 128, Di]."""
        return self.draw((self.num_pages, BLOCK, D), self.dtypes.index)

    # Results of earlier steps.

    @cached_property
    def ids(self) -> Tensor:
        """[Hkv, T, K] int32, ascending, then -1: a selection of the pattern asked for."""
        shape = self.shape
        return select(
            self.pattern, self.request, self.pos, shape.num_kv_heads, shape.topk, self.rng
        )

    @cached_property
    def scores(self) -> Tensor:
        """[Hi, T, max_blocks] float32, -inf past the visible blocks."""
        shape = (self.shape.num_kv_heads, self.shape.num_tokens, self.shape.max_blocks)
        scores = torch.randn(shape, generator=self.rng, device=self.device)
        block = torch.arange(shape[2], device=self.device)
        return scores.masked_fill_(block >= self.visible[:, None], float("-inf"))

    @property
    def num_parts(self) -> int:
        """P, partial results that a merge takes: one for each selected block."""
        return self.shape.topk

    @cached_property
    def outs(self) -> Tensor:
        """[P, T, Hq, D], partial results."""
        shape = (self.num_parts, self.shape.num_tokens, self.shape.num_q_heads, D)
        return self.draw(shape, self.dtypes.q)

    @cached_property
    def lses(self) -> Tensor:
        """[P, T, Hq] float32, natural logarithms."""
        return self.draw(self.outs.shape[:3], torch.float32)

    # Media.

    @cached_property
    def patches(self) -> Tensor:
        """[4 T, 1176] uint8: a step whose tokens are all of clips, two frames a row."""
        return self._pixels(2)

    @cached_property
    def image_patches(self) -> Tensor:
        """[4 T, 588] uint8: the same of images, one frame a row."""
        return self._pixels(1)

    def _pixels(self, frames: int) -> Tensor:
        size = (PATCHES * self.shape.num_tokens, frames * FRAME)
        return torch.randint(256, size, generator=self.rng, device=self.device, dtype=torch.uint8)

    # Making them.

    def draw(self, size: Iterable[int], dtype: torch.dtype) -> Tensor:
        """Standard normal numbers, contiguous."""
        x = torch.empty(tuple(size), dtype=dtype, device=self.device)
        self._fill(x)
        return x

    def _fill(self, x: Tensor) -> None:
        if x.dtype != FP8 and x.is_contiguous():
            x.normal_(generator=self.rng)
            return
        per_row = max(1, x[0].numel()) if len(x) else 1
        for part in x.split(max(1, _FILL // per_row)):
            numbers = torch.empty(part.shape, dtype=torch.bfloat16, device=self.device)
            if part.dtype == torch.float32:
                numbers = numbers.float()
            part.copy_(numbers.normal_(generator=self.rng))

    def _empty_kv(self, layout: str) -> tuple[Tensor, Tensor]:
        pages, heads = self.num_pages, self.shape.num_kv_heads
        new = {"dtype": self.dtypes.cache, "device": self.device}
        if layout == "interleaved":
            pool = torch.empty(pages, heads, BLOCK, 2 * D, **new)
            return pool[..., :D], pool[..., D:]
        if layout == "hnd":
            k, v = (torch.empty(pages, heads, BLOCK, D, **new) for _ in "kv")
            return k, v
        if layout == "nhd":
            k, v = (torch.empty(pages, BLOCK, heads, D, **new).transpose(1, 2) for _ in "kv")
            return k, v
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")

    def _ints(self, numbers: Iterable[int]) -> Tensor:
        return torch.tensor(tuple(numbers), dtype=torch.int32, device=self.device)


def take(x: Tensor, where) -> Tensor:
    """x[where]; FP8 by its bytes, since not every device indexes FP8 tensors."""
    return _bytes(x)[where].view(x.dtype)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == FP8 else x
