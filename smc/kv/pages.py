"""Refcounted page allocator. Page 0 is the dummy page: empty table entries and padding point to it, and it is never handed out."""

from __future__ import annotations

import numpy as np

DUMMY_PAGE = 0


class OutOfPages(RuntimeError):
    """More pages were asked for than are free. Nothing was allocated."""


class FirstSeen:
    """Tells repeats among numbers below `size`, without sorting."""

    def __init__(self, size: int) -> None:
        self._where = np.zeros(size, dtype=np.int64)

    def first(self, numbers: np.ndarray) -> np.ndarray:
        """Mask over `numbers`, each value of which is set exactly once."""
        index = np.arange(len(numbers))
        self._where[numbers] = index
        return self._where[numbers] == index

    def distinct(self, numbers: np.ndarray) -> bool:
        return bool(self.first(numbers).all())


class PageAllocator:
    """Pages 1..capacity. A page's reference count is the number of table entries that point to it; at 0 it is free."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a KV pool needs at least 1 page, got {capacity}")
        self.capacity = capacity
        self.references = np.zeros(capacity + 1, dtype=np.int32)
        self._free = np.arange(capacity, 0, -1, dtype=np.int32)
        self._num_free = capacity
        self._seen = FirstSeen(capacity + 1)

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_held(self) -> int:
        """Pages with at least one reference, counted from the references themselves."""
        return int(np.count_nonzero(self.references[1:]))

    def allocate(self, count: int) -> np.ndarray:
        """`count` pages with one reference each, int32. Raises OutOfPages before anything changes."""
        if count > self._num_free:
            raise OutOfPages(f"{count} KV pages wanted, {self._num_free} of {self.capacity} free")
        self._num_free -= count
        pages = self._free[self._num_free : self._num_free + count].copy()
        self.references[pages] = 1
        return pages

    def exchange(self, old: np.ndarray, new: np.ndarray) -> None:
        """Table entries that pointed to `old` now point to `new` (same length, repeats allowed, dummy pages ignored)."""
        np.add.at(self.references, new, 1)
        np.subtract.at(self.references, old, 1)
        self.references[DUMMY_PAGE] = 0
        left_old = self.references[old]
        assert (left_old >= 0).all(), "a KV page lost more references than it had"
        freed = old[(left_old == 0) & (old != DUMMY_PAGE)]
        # A page may leave several entries at once, and is freed once.
        freed = freed[self._seen.first(freed)]
        self._free[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)
