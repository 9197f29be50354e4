"""The prefix cache agrees with a model that compares texts, held pages stay, and page accounts balance."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from smc.memory.kv_cache import KVCacheManager, PrefixCache, common_blocks
from smc.memory.pages import OutOfPages, PageAllocator
from smc.types import ModelRole

CAPACITY, BLOCK = 60, 2

texts = st.lists(st.integers(0, 1), max_size=9)
salts = st.sampled_from(["", "a"])


def written(allocator: PageAllocator, count: int, parent: int = 0) -> np.ndarray:
    """Pages of a new sequence below `parent`; the last one is held once."""
    pages_B = allocator.allocate(count)
    allocator.chain(parent, pages_B)
    allocator.hold(pages_B[-1:])
    return pages_B


def match(cache: PrefixCache, tokens, salt: str = "", most: int | None = None) -> tuple[int, int]:
    """Look up at most the first `most` tokens, and count the match. Returns what `find` returns."""
    found, page = cache.find(cache.keys(tokens if most is None else tokens[: max(0, most)], salt))
    cache.count(len(tokens), found)
    return found, page


def insert(cache: PrefixCache, tokens, pages_B, salt: str = "") -> None:
    """Cache every whole block of `tokens`."""
    cache.keep(cache.keys(tokens, salt), pages_B)


def cached(cache: PrefixCache, text: list[int], salt: str = "") -> np.ndarray:
    """Run a text that is not cached yet, insert it into the cache, and end the request. Returns its pages."""
    pages_B = written(cache.allocator, len(text))
    insert(cache, text, pages_B, salt)
    cache.allocator.release(pages_B[-1:])
    return pages_B


class Cache(RuleBasedStateMachine):
    """Requests arrive, use what is cached, write the rest, and end. The model keeps texts in a list, least recently
    used first."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(CAPACITY)
        self.cache = PrefixCache(self.allocator, BLOCK)
        self.order: list[tuple[str, tuple[int, ...]]] = []
        self.paths: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        """Pages of the positions of a cached text."""
        self.requests: list[list[int]] = []
        """Pages of running requests."""
        self.asked = self.found = 0

    def beginnings(self, text, salt):
        return [(salt, tuple(text[:end])) for end in range(BLOCK, len(text) + 1, BLOCK)]

    def touch(self, keys):
        for key in reversed(keys):
            if key in self.order:
                self.order.remove(key)
            self.order.append(key)

    def held(self) -> set[int]:
        return {page for pages in [*self.requests, *self.paths.values()] for page in pages}

    @rule(text=texts, salt=salts, most=st.none() | st.integers(-1, 9))
    def match(self, text, salt, most):
        limit = len(text) if most is None else most
        known = [key for key in self.beginnings(text, salt) if key in self.paths and len(key[1]) <= limit]
        length, page = match(self.cache, text, salt, most)
        assert length == len(known) * BLOCK
        assert page == (self.paths[known[-1]][-1] if known else 0)
        self.touch(known)
        self.asked += len(text)
        self.found += length

    @rule(text=texts.filter(bool), salt=salts, use=st.booleans())
    def run(self, text, salt, use):
        """Without `use`, a request does not consult the cache and computes known tokens again, like the second of two
        that arrive at once."""
        length, page = match(self.cache, text, salt, None if use else 0)
        self.touch(self.beginnings(text[:length], salt))
        self.asked += len(text)
        self.found += length
        if len(text) - length > self.allocator.num_free:
            return
        before = self.paths[(salt, tuple(text[:length]))] if length else []
        self.allocator.hold([page])
        if length < len(text):
            pages = before + written(self.allocator, len(text) - length, page).tolist()
            self.allocator.release([page])
        else:
            pages = list(before)
        assert self.allocator.path(pages[-1], len(text)).tolist() == pages
        insert(self.cache, np.array(text), pages, salt)
        self.requests.append(pages)
        for key in self.beginnings(text, salt):
            self.paths.setdefault(key, pages[: len(key[1])])
        self.touch(self.beginnings(text, salt))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data):
        pages = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.allocator.release(pages[-1:])

    @rule(count=st.integers(0, 12))
    def evict(self, count):
        free, keys = CAPACITY - len(self.held()), list(self.order)
        enough = self.cache.frees(count)
        assert self.allocator.num_free == free
        freed = self.cache.evict(count)
        waiting: list[tuple[str, tuple[int, ...]]] = []
        for key in keys:
            if CAPACITY - len(self.held()) >= free + count:
                break
            self.order.remove(key)
            self.order.append(key)
            waiting.append(key)
            # A block that was dropped may have been the last one that held another.
            while CAPACITY - len(self.held()) < free + count and any(self.drop(one) for one in list(waiting)):
                waiting = [one for one in waiting if one in self.paths]
        assert freed == self.allocator.num_free - free
        assert enough == (freed >= count)
        assert enough or all(self.is_held(path) for path in self.paths.values())

    def drop(self, key: tuple[str, tuple[int, ...]]) -> bool:
        """Drop a block if a page becomes free by that. Return whether one did."""
        held, path = len(self.held()), self.paths.pop(key)
        if len(self.held()) < held:
            self.order.remove(key)
            return True
        self.paths[key] = path
        return False

    def is_held(self, path: list[int]) -> bool:
        return any(path[-1] in pages for pages in self.requests)

    @rule()
    def clear(self):
        self.cache.clear()
        self.order = []
        self.paths = {}

    @invariant()
    def follows_the_model(self):
        self.allocator.check()
        assert self.cache.entries == len(self.order) == len(self.paths)
        assert self.cache.pages == len(self.order) * BLOCK
        assert list(self.cache._pages.values()) == [self.paths[key][-1] for key in self.order]
        assert self.allocator.num_held == len(self.held())
        assert (self.cache.queried_tokens, self.cache.hit_tokens) == (self.asked, self.found)


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)


def test_block_is_checked():
    with pytest.raises(ValueError, match="at least 1 token"):
        PrefixCache(PageAllocator(4), 0)


def test_whole_blocks_only():
    cache = PrefixCache(PageAllocator(100))
    pages_B = cached(cache, list(range(40)))
    assert cache.entries == 2
    assert cache.allocator.num_held == 32
    assert match(cache, list(range(40))) == (32, pages_B[31])
    assert match(cache, list(range(31))) == (16, pages_B[15])
    assert match(cache, list(range(40)), most=31) == (16, pages_B[15])
    assert match(cache, list(range(15))) == (0, 0)
    assert match(cache, list(range(40)), most=0) == (0, 0)
    assert match(cache, list(range(40)), most=-1) == (0, 0)


def test_equal_text_after_other_beginnings_differs():
    cache = PrefixCache(PageAllocator(100), 4)
    cached(cache, [1] * 4 + [2] * 4)
    assert match(cache, [2] * 4) == (0, 0)
    assert match(cache, [3] * 4 + [2] * 4) == (0, 0)


def test_salts_share_nothing():
    cache = PrefixCache(PageAllocator(100), 4)
    ours_B = cached(cache, [1] * 8, "ours")
    theirs_B = cached(cache, [1] * 8, "theirs")
    assert match(cache, [1] * 8) == (0, 0)
    assert match(cache, [1] * 8, "ours") == (8, ours_B[-1])
    assert match(cache, [1] * 8, "theirs") == (8, theirs_B[-1])
    assert cache.allocator.num_held == 16


def test_lists_and_arrays_are_the_same_text():
    cache = PrefixCache(PageAllocator(100), 4)
    cached(cache, list(range(8)))
    for dtype in (np.int32, np.int64, np.uint16):
        assert match(cache, np.arange(8, dtype=dtype))[0] == 8


def test_least_recently_used_goes_first_and_deepest_of_it():
    cache = PrefixCache(PageAllocator(100), 4)
    first, second = [1] * 12, [2] * 12
    cached(cache, first)
    cached(cache, second)
    match(cache, first[:8])
    # Oldest: the end of `first`, which was not matched; then `second` from its end; then the rest of `first`.
    for expected in ((8, 12), (8, 8), (8, 4), (8, 0), (4, 0), (0, 0)):
        assert cache.evict(1) == 4
        found = [len(text) for text in (first, second)]
        for i, text in enumerate((first, second)):
            known = [end for end in (4, 8, 12) if key_of(cache, text[:end]) in cache._pages]
            found[i] = max(known, default=0)
        assert tuple(found) == expected
    assert cache.evict(1) == 0


def key_of(cache: PrefixCache, text: list[int]) -> bytes:
    """The key of a text's last block; unlike `match` this does not mark it as used."""
    return cache.keys(text)[-1]


def test_eviction_drops_nothing_that_somebody_holds():
    allocator = PageAllocator(100)
    cache = PrefixCache(allocator, 4)
    pages_B = written(allocator, 12)
    insert(cache, [1] * 12, pages_B)
    assert not cache.frees(1)
    assert cache.evict(1) == 0
    cached(cache, [2] * 8)
    assert cache.frees(8) and not cache.frees(9)
    assert cache.evict(20) == 8
    assert match(cache, [1] * 12) == (12, pages_B[-1]) and match(cache, [2] * 8) == (0, 0)
    assert allocator.path(pages_B[-1], 12).tolist() == pages_B.tolist()
    allocator.check()
    allocator.release(pages_B[-1:])
    assert cache.evict(5) == 8
    cache.clear()
    assert allocator.num_free == 100


def test_who_can_wait_evicts_nothing_in_vain():
    """A pool of 100 pages: a request holds 64 cached ones, 32 other cached pages are unused, and 4 are free."""
    role = ModelRole.DRAFT
    memory = KVCacheManager({role: 100}, prefix_cache=True)
    memory.expect(1, {role: 64}, {role: 8})
    cache = memory.caches[role]
    insert(cache, [1] * 64, written(cache.allocator, 64))
    cached(cache, [2] * 32)
    blocks = cache.entries
    with pytest.raises(OutOfPages):
        memory.allocate({role: 29}, {role: 8})
    assert cache.entries == blocks and cache.allocator.num_free == 4
    assert len(memory.allocate({role: 28}, {role: 8})[role]) == 28
    assert match(cache, [1] * 64)[0] == 64


def test_evictions_look_at_few_held_blocks(monkeypatch):
    """Blocks that requests hold are looked at again after all others."""
    monkeypatch.setattr("smc.memory.kv_cache.LOOKED_AT", 3)
    cache = PrefixCache(PageAllocator(100), 4)
    insert(cache, [1] * 20, written(cache.allocator, 20))
    cached(cache, [2] * 40)
    assert [cache.frees(40) for _ in range(2)] == [False, True]
    assert cache.evict(40) == 40


def test_blocks_are_evicted_although_their_beginnings_were_used_less_recently():
    """A request holds three blocks. Evictions and matches of shorter beginnings bring them into the order of the text;
    after the request has ended, one eviction drops them all."""
    role = ModelRole.DRAFT
    memory = KVCacheManager({role: 16}, prefix_cache=True)
    cache, allocator = memory.caches[role], memory.allocators[role]
    cache.block = 4
    text = [1] * 4 + [2] * 4 + [3] * 4
    pages_B = written(allocator, 12)
    insert(cache, text, pages_B)
    for known in (8, 4):
        cached(cache, [known] * 4)
        match(cache, text[:known])
        assert cache.evict(4) == 4
    assert list(cache._pages) == cache.keys(text)
    allocator.release(pages_B[-1:])
    assert cache.frees(12) and not cache.frees(13)
    assert cache.evict(4) == 4 and match(cache, text) == (8, pages_B[7])
    assert cache.evict(4) == 4 and match(cache, text) == (4, pages_B[3])
    assert len(memory.allocate({role: 16}, {role: 0})[role]) == 16
    assert cache.entries == 0
    allocator.check()


def test_nothing_is_looked_at_again_before_a_reference_is_released(monkeypatch):
    """Requests that find no pages one after another search the cache once."""
    cache = PrefixCache(PageAllocator(100), 4)
    pages_B = written(cache.allocator, 20)
    insert(cache, [1] * 20, pages_B)
    looked_at, freed_by = [], cache.allocator.freed_by

    def looks(page, gone):
        looked_at.append(page)
        return freed_by(page, gone)

    monkeypatch.setattr(cache.allocator, "freed_by", looks)
    assert cache.evict(1) == 0 and len(looked_at) == 5
    assert cache.evict(1) == 0 and not cache.frees(1) and len(looked_at) == 5
    other_B = written(cache.allocator, 4)
    insert(cache, [2] * 4, other_B)
    assert cache.evict(1) == 0 and cache.frees(0) and len(looked_at) == 5
    cache.allocator.release(other_B[-1:])
    assert cache.frees(4) and cache.evict(5) == 4
    cache.allocator.release(pages_B[-1:])
    assert cache.evict(30) == 20 and cache.entries == 0


def test_computed_twice_at_once():
    """Of two requests that compute the same beginning, the second continues from its own pages; both chains of pages
    stay as long as they are needed."""
    allocator = PageAllocator(100)
    cache = PrefixCache(allocator, 4)
    first_B = written(allocator, 4)
    second_B = written(allocator, 8)
    insert(cache, [1] * 4, first_B)
    insert(cache, [1] * 8, second_B)
    allocator.release([first_B[-1], second_B[-1]])
    assert match(cache, [1] * 4) == (4, first_B[-1])
    length, page = match(cache, [1] * 8)
    assert (length, page) == (8, second_B[-1])
    assert allocator.path(page, length).tolist() == second_B.tolist()
    assert allocator.num_held == 12
    assert cache.evict(1) == 8
    assert match(cache, [1] * 8) == (4, first_B[-1])
    cache.clear()
    allocator.check()
    assert allocator.num_free == 100


def test_a_long_prompt_is_matched_in_time():
    cache = PrefixCache(PageAllocator(100_000))
    text_B = np.random.default_rng(0).integers(0, 128_000, 100_000)
    pages_B = cached(cache, text_B)
    start = time.process_time()
    assert match(cache, text_B) == (100_000, pages_B[-1])
    assert time.process_time() - start < 0.050
    assert cache.evict(500) == 512
    assert match(cache, text_B)[0] == 100_000 - 512
    cache.clear()
    cache.allocator.check()
    assert cache.allocator.num_free == 100_000


def test_what_is_forgotten_is_not_found():
    """Nor are its continuations, until it is inserted again. Held pages stay, and a text with another beginning is not
    affected."""
    cache = PrefixCache(PageAllocator(100), 4)
    held_B = written(cache.allocator, 8)
    insert(cache, [1] * 8, held_B)
    cached(cache, [2] * 8)
    cache.forget(cache.keys([1] * 4))
    assert cache.find(cache.keys([1] * 8)) == (0, 0) and cache.entries == 3
    cache.keep(cache.keys([1] * 4), held_B[:4])
    assert cache.find(cache.keys([1] * 8)) == (8, held_B[-1])
    cache.forget([*cache.keys([1] * 8), *cache.keys([3] * 4)])
    assert match(cache, [1] * 8) == (0, 0) and match(cache, [2] * 8)[0] == 8
    assert cache.allocator.path(held_B[-1], 8).tolist() == held_B.tolist()
    cache.allocator.release(held_B[-1:])
    cache.clear()
    cache.allocator.check()
    assert cache.allocator.num_free == 100


@settings(max_examples=20, deadline=None)
@given(
    one=st.lists(st.integers(0, 1), max_size=9),
    other=st.lists(st.integers(0, 1), max_size=9),
    salts=st.sampled_from([("", ""), ("", "x")]),
)
def test_common_blocks_are_counted_by_their_keys(one, other, salts):
    cache = PrefixCache(PageAllocator(10), 1)
    expected = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    found = common_blocks(*(cache.keys(tokens, salt) for tokens, salt in zip((one, other), salts)))
    assert found == (expected if salts[0] == salts[1] else 0)
