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

WATERMARK = 0.05
"""Share of a pool that is kept free of new requests, for those that run."""


def pool_for(pages: int) -> int:
    """Pages of a pool in which requests that need so many run side by side."""
    return math.ceil(pages / (1 - WATERMARK))


class KVCacheManager:
    """A ledger and a prefix cache for each side."""

    def __init__(self, capacity: dict[str, int], *, prefix_cache: bool) -> None:
        self.capacity = dict(capacity)
        self.ledgers = {side: PageAllocator(pages) for side, pages in capacity.items()}
        self.caches = {side: PrefixCache(ledger) for side, ledger in self.ledgers.items()} if prefix_cache else {}
        self.expected = dict.fromkeys(capacity, 0)
        """Pages that requests which have been admitted are likely to hold."""
        self.next_round = dict.fromkeys(capacity, 0)
        """Pages that a round of all of those takes."""
        self._shares: dict[int, tuple[dict[str, int], dict[str, int]]] = {}
        """What each of them has in these two."""

    def renew(self, side: str, pages: int) -> None:
        """The pool of a side is another one, of so many pages, in which nothing is. Nobody refers to pages of the old
        one."""
        if side in self.caches:
            self.caches[side].clear()
        ledger = self.ledgers[side]
        assert ledger.num_free == self.capacity[side], f"pages of the {side} model are held although it is lost"
        self.capacity[side] = pages
        self.ledgers[side] = PageAllocator(pages)
        if side in self.caches:
            self.caches[side] = PrefixCache(self.ledgers[side])

    def admits(self, pages: dict[str, int]) -> bool:
        """Whether what is expected leaves the watermark free; a request alone is always admitted."""
        return all(
            not self.expected[side] or self.expected[side] + count <= (1 - WATERMARK) * self.capacity[side]
            for side, count in pages.items()
        )

    def expect(self, request: int, pages: dict[str, int], round_pages: dict[str, int]) -> None:
        """An admitted request is likely to hold so much, and a round of it takes so much: instead of what was said of
        it before."""
        self.no_longer_expect(request)
        self._shares[request] = pages, round_pages
        self._add(pages, round_pages, 1)

    def no_longer_expect(self, request: int) -> None:
        if request in self._shares:
            self._add(*self._shares.pop(request), -1)

    def _add(self, pages: dict[str, int], round_pages: dict[str, int], sign: int) -> None:
        for side, count in pages.items():
            self.expected[side] += sign * count
            self.next_round[side] += sign * round_pages[side]

    def spare(self, round_pages: dict[str, int]) -> dict[str, int]:
        """Pages that a request must leave free when it starts, lest somebody has to give up its own at once: none if it
        is alone."""
        least = {side: round(WATERMARK * self.capacity[side]) for side in round_pages}
        return {
            side: max(self.next_round[side] + count, least[side]) if self.expected[side] else 0
            for side, count in round_pages.items()
        }

    def allocate(self, pages: dict[str, int], spare: dict[str, int] | None = None) -> dict[str, np.ndarray]:
        """Loose pages of both pools or of none; cached ones that nobody holds make room. Raises OutOfPages.

        `spare`: pages of each pool that must be left free, for one who can wait: nothing cached goes if that would not
        do."""
        wanted = pages if spare is None else {side: count + spare[side] for side, count in pages.items()}
        hopeless = [] if spare is None else [side for side, count in wanted.items() if count > self.room(side)]
        for side in hopeless or self.short(wanted):
            raise OutOfPages(f"{wanted[side]} pages of the {side} model wanted, {self.ledgers[side].num_free} free")
        return {side: self.ledgers[side].allocate(count) for side, count in pages.items()}

    def short(self, pages: dict[str, int]) -> list[str]:
        """Pools with fewer free pages than these, after the cache has let go of as many as it can and must."""
        for side, count in pages.items():
            missing = count - self.ledgers[side].num_free
            if missing > 0 and side in self.caches:
                self.caches[side].evict(missing)
        return [side for side, count in pages.items() if count > self.ledgers[side].num_free]

    def room(self, side: str) -> int:
        """Pages that are free or would be if the cache let go, about: what nobody runs in is all of it."""
        if not self.expected[side]:
            return self.capacity[side]
        return self.ledgers[side].num_free + (self.caches[side].pages if side in self.caches else 0)

    def held(self, side: str) -> int:
        """Pages that are not free; with those that only the cache holds."""
        return self.capacity[side] - self.ledgers[side].num_free

    def leaked(self) -> dict[str, int]:
        """References and loose pages of nobody, seen while no request runs: only the cache may hold anything then."""
        cached = {side: self.caches[side].entries if side in self.caches else 0 for side in self.ledgers}
        return {side: ledger.num_loose + ledger.num_holds - cached[side] for side, ledger in self.ledgers.items()}

    def keys(self, tokens: Sequence[int] | np.ndarray, salt: str) -> list[bytes]:
        """Of the blocks of a sequence, by which either side's cache knows them."""
        return next((cache.keys(tokens, salt) for cache in self.caches.values()), [])

    def match(self, side: str, keys: list[bytes], most: int) -> tuple[int, int]:
        """See `PrefixCache.find`: in at most so many tokens. The page is held from now on, and `count_match` is told if
        anything comes of it."""
        if side not in self.caches:
            return 0, DUMMY_PAGE
        cache = self.caches[side]
        count, page = cache.find(keys[: most // cache.block])
        self.ledgers[side].hold([page])
        return count, page

    def common(self, side: str, one: list[bytes], other: list[bytes], most: int) -> int:
        """Tokens, at most so many, that two sequences have in common, in whole blocks as the cache keeps them."""
        if side not in self.caches:
            return 0
        block = self.caches[side].block
        return block * min(common_blocks(one, other), most // block)

    def count_match(self, side: str, queried: int, hit: int) -> None:
        if side in self.caches:
            self.caches[side].count(queried, hit)

    def remember(self, side: str, keys: list[bytes], pages: np.ndarray) -> None:
        """Cache a sequence as far as there are pages; what is cached of it already stays."""
        if side in self.caches:
            cache = self.caches[side]
            cache.keep(keys[: len(pages) // cache.block], pages)

    def forget(self, keys: list[bytes]) -> None:
        """Neither side's cache has these blocks any longer."""
        for cache in self.caches.values():
            cache.forget(keys)

    def check(self) -> None:
        for ledger in self.ledgers.values():
            ledger.check()
