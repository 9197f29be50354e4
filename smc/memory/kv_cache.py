"""Pages of both models' pools: the only place where page numbers are decided. Workers are told them with what they are
asked to do.

A page that is let go may be given to whoever asks next: what is asked of a worker later is done later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from smc.memory.pages import DUMMY_PAGE, OutOfPages, PageAllocator
from smc.memory.prefix_cache import PrefixCache, common_blocks
from smc.types import ModelRole

WATERMARK = 0.05
"""Share of a pool that is kept free of new requests, for those that run."""


def pool_for(pages: int) -> int:
    """Pages of a pool in which requests that need so many run side by side."""
    return math.ceil(pages / (1 - WATERMARK))


class KVCacheManager:
    """A ledger and a prefix cache for each side."""

    def __init__(self, capacity: dict[ModelRole, int], *, prefix_cache: bool) -> None:
        self.capacity = dict(capacity)
        self.allocators = {role: PageAllocator(pages) for role, pages in capacity.items()}
        self.caches = (
            {role: PrefixCache(allocator) for role, allocator in self.allocators.items()} if prefix_cache else {}
        )
        self.expected = dict.fromkeys(capacity, 0)
        """Pages that requests which have been admitted are likely to hold."""
        self.next_round = dict.fromkeys(capacity, 0)
        """Pages that a round of all of those takes."""
        self._shares: dict[int, tuple[dict[ModelRole, int], dict[ModelRole, int]]] = {}
        """What each of them has in these two."""

    def renew(self, role: ModelRole, pages: int) -> None:
        """The pool of a side is another one, of so many pages, in which nothing is. Nobody refers to pages of the old
        one."""
        if role in self.caches:
            self.caches[role].clear()
        allocator = self.allocators[role]
        assert allocator.num_free == self.capacity[role], f"pages of the {role} model are held although it is lost"
        self.capacity[role] = pages
        self.allocators[role] = PageAllocator(pages)
        if role in self.caches:
            self.caches[role] = PrefixCache(self.allocators[role])

    def admits(self, pages: dict[ModelRole, int]) -> bool:
        """Whether what is expected leaves the watermark free; a request alone is always admitted."""
        return all(
            not self.expected[role] or self.expected[role] + count <= (1 - WATERMARK) * self.capacity[role]
            for role, count in pages.items()
        )

    def expect(self, request: int, pages: dict[ModelRole, int], round_pages: dict[ModelRole, int]) -> None:
        """An admitted request is likely to hold so much, and a round of it takes so much: instead of what was said of
        it before."""
        self.no_longer_expect(request)
        self._shares[request] = pages, round_pages
        self._add(pages, round_pages, 1)

    def no_longer_expect(self, request: int) -> None:
        if request in self._shares:
            self._add(*self._shares.pop(request), -1)

    def _add(self, pages: dict[ModelRole, int], round_pages: dict[ModelRole, int], sign: int) -> None:
        for role, count in pages.items():
            self.expected[role] += sign * count
            self.next_round[role] += sign * round_pages[role]

    def spare(self, round_pages: dict[ModelRole, int]) -> dict[ModelRole, int]:
        """Pages that a request must leave free when it starts, lest somebody has to give up its own at once: none if it
        is alone."""
        least = {role: round(WATERMARK * self.capacity[role]) for role in round_pages}
        return {
            role: max(self.next_round[role] + count, least[role]) if self.expected[role] else 0
            for role, count in round_pages.items()
        }

    def allocate(
        self, pages: dict[ModelRole, int], spare: dict[ModelRole, int] | None = None
    ) -> dict[ModelRole, np.ndarray]:
        """Loose pages of both pools or of none; cached ones that nobody holds make room. Raises OutOfPages.

        `spare`: pages of each pool that must be left free, for one who can wait: nothing cached goes if that would not
        do."""
        wanted = pages if spare is None else {role: count + spare[role] for role, count in pages.items()}
        hopeless = [] if spare is None else [role for role, count in wanted.items() if count > self.room(role)]
        for role in hopeless or self.short(wanted):
            raise OutOfPages(f"{wanted[role]} pages of the {role} model wanted, {self.allocators[role].num_free} free")
        return {role: self.allocators[role].allocate(count) for role, count in pages.items()}

    def short(self, pages: dict[ModelRole, int]) -> list[ModelRole]:
        """Pools with fewer free pages than these, after the cache has let go of as many as it can and must."""
        for role, count in pages.items():
            missing = count - self.allocators[role].num_free
            if missing > 0 and role in self.caches:
                self.caches[role].evict(missing)
        return [role for role, count in pages.items() if count > self.allocators[role].num_free]

    def room(self, role: ModelRole) -> int:
        """Pages that are free or would be if the cache let go, about: what nobody runs in is all of it."""
        if not self.expected[role]:
            return self.capacity[role]
        return self.allocators[role].num_free + (self.caches[role].pages if role in self.caches else 0)

    def held(self, role: ModelRole) -> int:
        """Pages that are not free; with those that only the cache holds."""
        return self.capacity[role] - self.allocators[role].num_free

    def leaked(self) -> dict[ModelRole, int]:
        """References and loose pages of nobody, seen while no request runs: only the cache may hold anything then."""
        cached = {role: self.caches[role].entries if role in self.caches else 0 for role in self.allocators}
        return {
            role: allocator.num_loose + allocator.num_holds - cached[role]
            for role, allocator in self.allocators.items()
        }

    def keys(self, tokens: Sequence[int] | np.ndarray, salt: str) -> list[bytes]:
        """Of the blocks of a sequence, by which either side's cache knows them."""
        return next((cache.keys(tokens, salt) for cache in self.caches.values()), [])

    def match(self, role: ModelRole, keys: list[bytes], most: int) -> tuple[int, int]:
        """See `PrefixCache.find`: in at most so many tokens. The page is held from now on, and `count_match` is told if
        anything comes of it."""
        if role not in self.caches:
            return 0, DUMMY_PAGE
        cache = self.caches[role]
        count, page = cache.find(keys[: most // cache.block])
        self.allocators[role].hold([page])
        return count, page

    def common(self, role: ModelRole, one: list[bytes], other: list[bytes], most: int) -> int:
        """Tokens, at most so many, that two sequences have in common, in whole blocks as the cache keeps them."""
        if role not in self.caches:
            return 0
        block = self.caches[role].block
        return block * min(common_blocks(one, other), most // block)

    def count_match(self, role: ModelRole, queried: int, hit: int) -> None:
        if role in self.caches:
            self.caches[role].count(queried, hit)

    def remember(self, role: ModelRole, keys: list[bytes], pages: np.ndarray) -> None:
        """Cache a sequence as far as there are pages; what is cached of it already stays."""
        if role in self.caches:
            cache = self.caches[role]
            cache.keep(keys[: len(pages) // cache.block], pages)

    def forget(self, keys: list[bytes]) -> None:
        """Neither side's cache has these blocks any longer."""
        for cache in self.caches.values():
            cache.forget(keys)

    def check(self) -> None:
        for allocator in self.allocators.values():
            allocator.check()
