"""The paged cache: who holds which page (`PagePool`), and the tensors behind it
(`make_layer_caches`).

One page id means the same 128 tokens in every layer and in all three pools (K, V, index K). So one
block table serves a whole step, and whatever reuses a page reuses its index keys with it: a
selection made from the index keys of other tokens would be wrong without any error.
"""

import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
import torch

from msa_kernels import PagedCache

from .config import BLOCK_TOKENS as PAGE_TOKENS
from .config import MSA_ATTENTION, ModelConfig


class CacheFull(RuntimeError):
    """No page is free and none can be evicted."""


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE_TOKENS)


def page_key(
    previous: bytes, tokens: Sequence[int], media: Sequence[tuple[str, int, int, int]] = ()
) -> bytes:
    """Names a full page by its tokens and all before it, since a key or value depends on those too.

    Every image stands in a prompt as the same placeholder token, so which image's rows they are
    belongs to the name: by the token ids alone one image would be answered from another's context.

    Args:
        previous: key of the page before, b"" for the first.
        tokens: the page's 128 token ids.
        media: what `PromptMedia.names` says of those tokens.

    Returns:
        32 bytes of SHA-256: two different prefixes never meet under one key in practice, which a
        short hash could not promise, and a meeting would answer one request from another's context.
    """
    named = previous + np.asarray(tokens, dtype=np.int64).tobytes()
    if media:
        named += json.dumps(media).encode()
    return hashlib.sha256(named).digest()


class PagePool:
    """Hands out pages by id, shares full ones by content, and evicts those nobody holds, oldest use
    first.

    A page is in one of three states: free (no content worth keeping), held (one or more requests
    refer to it), or cached (nobody holds it, but it has a key and may be found again). Cached pages
    are given away when free ones run out.
    """

    def __init__(self, num_pages: int) -> None:
        """All pages are free at first."""
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self._free: deque[int] = deque(range(num_pages))
        self._holders = [0] * num_pages
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest use first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def held(self) -> int:
        """Pages that some request refers to."""
        return self.num_pages - self.available

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, all of them or, with CacheFull, none."""
        if count > self.available:
            raise CacheFull(f"{count} pages must be free or evictable, got {self.available}")
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.popleft()
            else:
                page, _ = self._cached.popitem(last=False)
                del self._page_of[self._key_of.pop(page)]
            self._holders[page] = 1
            pages.append(page)
        return pages

    def take_cached(self, keys: Sequence[bytes]) -> list[int]:
        """Takes the longest run of leading keys that are all present; held until released."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            self._cached.pop(page, None)
            self._holders[page] += 1
            pages.append(page)
        return pages

    def publish(self, page: int, key: bytes) -> None:
        """Makes a held, full page findable. Its slots must be written in every layer and never
        change again.

        Where two requests computed the same page at the same time the first keeps the key; the
        other page stays private and is freed with its request.
        """
        if self._holders[page] == 0:
            raise ValueError(f"page {page} must be held to be published, got no holder")
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """Gives back one reference to each page.

        The last of a request goes first, so that eviction shortens a cached prefix from its end: a
        prefix without its first page could not be found any more.
        """
        for page in reversed(pages):
            if self._holders[page] == 0:
                raise ValueError(f"page {page} must be held to be released, got no holder")
            self._holders[page] -= 1
            if self._holders[page] > 0:
                continue
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._free.append(page)


def make_layer_caches(
    config: ModelConfig, num_pages: int, *, dtype: torch.dtype | None = None, device: str = "cpu"
) -> list[PagedCache]:
    """The K, V and, in MSA layers, index-K pools of every layer.

    Args:
        config: of the model.
        num_pages: pages of 128 tokens in each pool.
        dtype: of the pools, by default `config.dtype`.
        device: of the pools.

    Returns:
        One `PagedCache` per layer: k, v [num_pages, Hkv, 128, D], index_k [num_pages, 128, Di]. Not
        initialised: the operators never let an unwritten slot reach a result.
    """

    def pool(*shape: int) -> torch.Tensor:
        return torch.empty((num_pages, *shape), dtype=dtype or config.dtype, device=device)

    heads, dim = config.num_kv_heads, config.head_dim
    return [
        PagedCache(
            k=pool(heads, PAGE_TOKENS, dim),
            v=pool(heads, PAGE_TOKENS, dim),
            index_k=pool(PAGE_TOKENS, config.index_dim) if layer == MSA_ATTENTION else None,
        )
        for layer in config.layer_types
    ]
