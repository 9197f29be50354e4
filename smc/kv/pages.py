"""Page allocator. Page 0 is the dummy page: empty table entries and padding point to it, and it is never handed out."""

from __future__ import annotations

import numpy as np

DUMMY_PAGE = 0


class OutOfPages(RuntimeError):
    """More pages were asked for than are free. Nothing was allocated."""


class PageAllocator:
    """Pages 1..capacity. A page belongs to whoever allocated it until it is given back."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a KV pool needs at least 1 page, got {capacity}")
        self.capacity = capacity
        self.held = np.zeros(capacity + 1, dtype=bool)
        """Whether a page belongs to somebody, by page."""
        self._free = np.arange(capacity, 0, -1, dtype=np.int32)
        self._num_free = capacity

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_held(self) -> int:
        """Counted from the pages themselves."""
        return int(np.count_nonzero(self.held))

    def allocate(self, count: int) -> np.ndarray:
        """`count` pages, int32. Raises OutOfPages before anything changes."""
        if count > self._num_free:
            raise OutOfPages(f"{count} KV pages wanted, {self._num_free} of {self.capacity} free")
        self._num_free -= count
        pages = self._free[self._num_free : self._num_free + count].copy()
        self.held[pages] = True
        return pages

    def free(self, pages: np.ndarray) -> None:
        """Give pages back, each named once."""
        assert self.held[pages].all(), "a KV page was given back that nobody holds"
        self.held[pages] = False
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)
        assert self.num_free + self.num_held == self.capacity, "a KV page was given back twice"

    def check(self) -> None:
        """Free and held pages are all there are, and none is both."""
        assert not self.held[self._free[: self._num_free]].any(), "a KV page is free and held"
        assert self.num_free + self.num_held == self.capacity, "free + held differ from all pages"
