"""The page pool: nothing leaks, nothing is shared that should not be, eviction takes the oldest."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from examples.m3_serving.cache import CacheFull, PagePool, make_layer_caches, page_key, pages_for

PAGES = 7


class PoolMachine(RuleBasedStateMachine):
    """Requests as lists of pages, beside a plain record of what each page holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.requests: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # page: key it was published under
        self.found: dict[bytes, int] = {}

    def held(self) -> set[int]:
        return {page for pages in self.requests for page in pages}

    @rule(count=st.integers(0, PAGES + 1))
    def allocate(self, count: int) -> None:
        free = PAGES - len(self.held())
        assert self.pool.available == free
        if count > free:
            with pytest.raises(CacheFull, match=f"{count} pages must be .* got {free}"):
                self.pool.allocate(count)
            return
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count
        assert not set(pages) & self.held()
        for page in pages:  # given away: what it held is gone
            self.found.pop(self.content.pop(page, b"none"), None)
        self.requests.append(pages)

    @precondition(lambda self: any(self.requests))
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d", b"e"]))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        page = data.draw(st.sampled_from(sorted(self.held())))
        self.pool.publish(page, key)
        if key not in self.found and page not in self.content:
            self.found[key], self.content[page] = page, key

    @rule(keys=st.lists(st.sampled_from([b"a", b"b", b"c", b"d", b"e"]), max_size=4, unique=True))
    def take_cached(self, keys: list[bytes]) -> None:
        pages = self.pool.take_cached(keys)
        present = [key in self.found for key in keys]
        assert len(pages) == (present.index(False) if False in present else len(keys))
        assert [self.content[page] for page in pages] == keys[: len(pages)]
        self.requests.append(pages)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        pages = self.requests.pop(index)
        self.pool.release(pages)

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        assert self.pool.held == len(self.held())
        assert self.pool.available == PAGES - len(self.held())


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_eviction_takes_the_oldest_use_and_a_prefix_from_its_end():
    pool = PagePool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for page, key in zip(old + new, (b"old0", b"old1", b"new0", b"new1"), strict=True):
        pool.publish(page, key)
    pool.release(old)
    pool.release(new)
    pool.release(pool.take_cached([b"old0", b"old1"]))  # used again: now the newest
    pool.allocate(1)
    assert len(pool.take_cached([b"new0", b"new1"])) == 1
    assert len(pool.take_cached([b"old0", b"old1"])) == 2


def test_free_pages_go_before_cached_ones():
    pool = PagePool(3)
    kept, plain = pool.allocate(1), pool.allocate(1)
    pool.publish(kept[0], b"kept")
    pool.release(kept)
    pool.release(plain)
    pool.allocate(2)
    assert pool.take_cached([b"kept"]) == kept


def test_a_page_computed_twice_is_found_once_and_freed_twice():
    pool = PagePool(2)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.publish(first[0], b"same")
    pool.publish(second[0], b"same")
    pool.release(first)
    pool.release(second)
    assert pool.take_cached([b"same"]) == first
    assert pool.available == 1


def test_what_nobody_holds_cannot_be_released_or_published():
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(ValueError, match=r"must be held to be released, got no holder"):
        pool.release(pages)
    with pytest.raises(ValueError, match=r"must be held to be published, got no holder"):
        pool.publish(pages[0], b"key")
    with pytest.raises(ValueError, match=r"num_pages must be at least 1, got 0"):
        PagePool(0)


def test_page_key_depends_on_all_tokens_before():
    tokens = list(range(128))
    first = page_key(b"", tokens)
    assert first == page_key(b"", tokens)
    assert first != page_key(b"", [*tokens[:-1], 0])
    assert page_key(first, tokens) != page_key(page_key(b"", tokens[::-1]), tokens)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (127, 1), (128, 1), (129, 2)])
def test_pages_for(tokens: int, pages: int):
    assert pages_for(tokens) == pages


def test_only_msa_layers_have_an_index_cache(model):
    caches = make_layer_caches(model.config, 3)
    assert [cache.index_k is not None for cache in caches] == [False, True, True]
    assert caches[1].k.shape == caches[1].v.shape == (3, 2, 128, 128)
    assert caches[1].index_k.shape == (3, 128, 128)
