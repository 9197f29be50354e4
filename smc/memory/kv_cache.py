"""The KV cache manager: pages of both models' pools. It alone decides page numbers; workers get them with their work.

A released page may be allocated again at once, since a worker carries out its work in order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from smc.memory.pages import DUMMY_PAGE, OutOfPages, PageAllocator
from smc.memory.prefix_cache import PrefixCache, common_blocks
from smc.types import ModelRole

WATERMARK = 0.05
"""Share of a pool that new requests must leave free for running ones."""


def pool_for(pages: int) -> int:
    """Size of a pool in which requests that need so many pages run in parallel."""
    return math.ceil(pages / (1 - WATERMARK))


class KVCacheManager:
    """An allocator and a prefix cache for each model."""

    def __init__(self, capacity: dict[ModelRole, int], *, prefix_cache: bool) -> None:
        self.capacity = dict(capacity)
        self.allocators = {role: PageAllocator(pages) for role, pages in capacity.items()}
        self.caches = (
            {role: PrefixCache(allocator) for role, allocator in self.allocators.items()} if prefix_cache else {}
        )
        self.expected = dict.fromkeys(capacity, 0)
        """Pages that admitted requests are likely to hold."""
        self.next_round = dict.fromkeys(capacity, 0)
        """Pages that a round of all admitted requests allocates."""
        self._shares: dict[int, tuple[dict[ModelRole, int], dict[ModelRole, int]]] = {}
        """Share of each admitted request in `expected` and `next_round`."""

    def renew(self, role: ModelRole, pages: int) -> None:
        """A model has another pool, of so many pages, which is empty. No request refers to pages of the old one."""
        if role in self.caches:
            self.caches[role].clear()
        allocator = self.allocators[role]
        assert allocator.num_free == self.capacity[role], f"pages of the {role} model are held although it is lost"
        self.capacity[role] = pages
        self.allocators[role] = PageAllocator(pages)
        if role in self.caches:
            self.caches[role] = PrefixCache(self.allocators[role])

    def admits(self, pages: dict[ModelRole, int]) -> bool:
        """Whether the forecast leaves the watermark free; a request alone is always admitted."""
        return all(
            not self.expected[role] or self.expected[role] + count <= (1 - WATERMARK) * self.capacity[role]
            for role, count in pages.items()
        )

    def expect(self, request: int, pages: dict[ModelRole, int], round_pages: dict[ModelRole, int]) -> None:
        """Enter or replace the forecast of an admitted request: pages that it is likely to hold, and pages of a
        round."""
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
        """Pages that a request must leave free when it starts, so that no other is preempted at once: none if it is
        alone."""
        least = {role: round(WATERMARK * self.capacity[role]) for role in round_pages}
        return {
            role: max(self.next_round[role] + count, least[role]) if self.expected[role] else 0
            for role, count in round_pages.items()
        }

    def allocate(
        self, pages: dict[ModelRole, int], spare: dict[ModelRole, int] | None = None
    ) -> dict[ModelRole, np.ndarray]:
        """Unassigned pages of both pools or of none; cached ones that no request holds are evicted. Raises OutOfPages.

        `spare`: pages of each pool that must stay free, for a request that can wait: nothing is evicted if that would
        not suffice."""
        wanted = pages if spare is None else {role: count + spare[role] for role, count in pages.items()}
        hopeless = [] if spare is None else [role for role, count in wanted.items() if count > self.room(role)]
        for role in hopeless or self.short(wanted):
            raise OutOfPages(f"{wanted[role]} pages of the {role} model wanted, {self.allocators[role].num_free} free")
        return {role: self.allocators[role].allocate(count) for role, count in pages.items()}

    def short(self, pages: dict[ModelRole, int]) -> list[ModelRole]:
        """Pools with fewer free pages than these, after the cache has evicted as many as it can and must."""
        for role, count in pages.items():
            missing = count - self.allocators[role].num_free
            if missing > 0 and role in self.caches:
                self.caches[role].evict(missing)
        return [role for role, count in pages.items() if count > self.allocators[role].num_free]

    def room(self, role: ModelRole) -> int:
        """Pages, approximately, that are free or would be if the cache was evicted: all of a pool that no request
        uses."""
        if not self.expected[role]:
            return self.capacity[role]
        return self.allocators[role].num_free + (self.caches[role].pages if role in self.caches else 0)

    def held(self, role: ModelRole) -> int:
        """Pages that are not free, including those that only the cache holds."""
        return self.capacity[role] - self.allocators[role].num_free

    def leaked(self) -> dict[ModelRole, int]:
        """References and unassigned pages without an owner, while no request runs: only the cache may hold pages
        then."""
        cached = {role: self.caches[role].entries if role in self.caches else 0 for role in self.allocators}
        return {
            role: allocator.num_unassigned + allocator.num_holds - cached[role]
            for role, allocator in self.allocators.items()
        }

    def keys(self, tokens: Sequence[int] | np.ndarray, salt: str) -> list[bytes]:
        """Keys of the blocks of a sequence, for either model's cache."""
        return next((cache.keys(tokens, salt) for cache in self.caches.values()), [])

    def match(self, role: ModelRole, keys: list[bytes], most: int) -> tuple[int, int]:
        """`PrefixCache.find` in at most so many tokens. The caller holds the page from now on, and calls `count_match`
        if it uses the match."""
        if role not in self.caches:
            return 0, DUMMY_PAGE
        cache = self.caches[role]
        count, page = cache.find(keys[: most // cache.block])
        self.allocators[role].hold([page])
        return count, page

    def common(self, role: ModelRole, one: list[bytes], other: list[bytes], most: int) -> int:
        """Tokens, at most so many, that two sequences have in common, in whole blocks of the cache."""
        if role not in self.caches:
            return 0
        block = self.caches[role].block
        return block * min(common_blocks(one, other), most // block)

    def count_match(self, role: ModelRole, queried: int, hit: int) -> None:
        if role in self.caches:
            self.caches[role].count(queried, hit)

    def remember(self, role: ModelRole, keys: list[bytes], pages: np.ndarray) -> None:
        """Cache a sequence as far as there are pages; blocks that are cached already stay."""
        if role in self.caches:
            cache = self.caches[role]
            cache.keep(keys[: len(pages) // cache.block], pages)

    def forget(self, keys: list[bytes]) -> None:
        """Drop these blocks from both caches."""
        for cache in self.caches.values():
            cache.forget(keys)

    def check(self) -> None:
        for allocator in self.allocators.values():
            allocator.check()
