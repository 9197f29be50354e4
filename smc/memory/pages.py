"""The page allocator of one KV pool: keeps track of free pages, of the parents of pages, and of references. Page 0 is
the dummy page.

A page holds one position. Pages form a forest: the parent of a page is the page of the position before it in the
sequence it was written for; page 0 stands for 'no parent'. A page lives while it is held or a page below it lives.
Knows page numbers only, nothing about keys, values, requests or particles.

Axes: N rows, W positions of a block, T pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DUMMY_PAGE = 0

FREE, UNASSIGNED, PLACED, GROWN = 0, 1, 2, 3
"""States of a page: free; unassigned: allocated, but not in the forest yet; in the forest; in the forest and counted by
`num_grown`."""

ONE = np.int32(1)
"""`np.add.at` is forty times slower with Python's 1, which it has to cast."""

ENDLESS = 1 << 30
"""Number of references of the dummy page: so many that no releases free it."""

WIDE = 120
"""Number of dying chains from which one step of all of them costs less in NumPy than in Python (measured)."""

Pages = np.ndarray | Sequence[int]


class OutOfPages(RuntimeError):
    """More pages were requested than are free. Nothing was allocated."""


class PageAllocator:
    """Pages 1..capacity of one pool: which are free, the parent of each, and its number of references.

    A round: `new = grow(...)`, `hold(new)`, `release(old heads)`, `settle(allocated, used)`. Misuse is a broken
    invariant and asserts."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a KV pool needs at least 1 page, got {capacity}")
        self.capacity = capacity
        self._free = np.arange(capacity, 0, -1, dtype=np.int32)
        self._num_free = capacity
        self._state = np.zeros(capacity + 1, dtype=np.uint8)
        self._parent = np.zeros(capacity + 1, dtype=np.int32)
        """The page before each placed page."""
        self._heads = np.zeros(capacity + 1, dtype=np.int32)
        """Number of holds of each page."""
        self._refs = np.zeros(capacity + 1, dtype=np.int32)
        """Number of holds plus distinct children of each page; 0 for a page that is not placed."""
        self._scratch = np.zeros(capacity + 1, dtype=np.int32)
        """Scratch memory of `_once` and `settle`."""
        self._state[DUMMY_PAGE] = PLACED
        self._refs[DUMMY_PAGE] = ENDLESS
        # Access to an element through a memoryview takes a quarter of the time that it takes through NumPy.
        self._parent_of = self._parent.data
        self._refs_of = self._refs.data

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_held(self) -> int:
        """Number of pages that are not free, counted from the pages themselves."""
        return int(np.count_nonzero(self._state[1:]))

    @property
    def num_unassigned(self) -> int:
        """Number of pages that are allocated, but not in the forest yet."""
        return int(np.count_nonzero(self._state == UNASSIGNED))

    @property
    def num_grown(self) -> int:
        """Number of pages that rows have grown by, without those that `count_grown` has excluded since."""
        return int(np.count_nonzero(self._state == GROWN))

    @property
    def num_holds(self) -> int:
        """Total number of holds on all pages."""
        return int(self._heads.sum())

    def allocate(self, count: int) -> np.ndarray:
        """Allocate `count` pages. Returns them [T], int32, unassigned: without parent or reference. Raises OutOfPages
        before anything changes."""
        assert count >= 0, "a negative number of KV pages was asked for"
        if count > self._num_free:
            raise OutOfPages(f"{count} KV pages wanted, {self._num_free} of {self.capacity} free")
        self._num_free -= count
        pages_T = self._free[self._num_free : self._num_free + count].copy()
        self._state[pages_T] = UNASSIGNED
        return pages_T

    def free(self, pages_T: Pages) -> None:
        """Free unassigned pages, none of which may occur twice."""
        pages_T = np.asarray(pages_T, dtype=np.intp)
        assert (self._state[pages_T] == UNASSIGNED).all(), "a KV page was freed that is not unassigned"
        assert self._once(pages_T).all(), "a KV page was freed twice"
        self._free_pages(pages_T)

    def settle(self, allocated_T: Pages, used: Pages) -> None:
        """Free the pages of `allocated` that are not in `used` (any shape; 0 is ignored). All of them but the used ones
        must be unassigned."""
        allocated_T = np.asarray(allocated_T, dtype=np.intp)
        self._scratch[allocated_T] = 0
        self._scratch[np.asarray(used, dtype=np.intp)] = 1
        self.free(allocated_T[self._scratch[allocated_T] == 0])

    def chain(self, parent: int, pages_T: Pages) -> None:
        """Link unassigned pages into a chain below `parent`. The last one has no reference yet: the caller must `hold`
        it."""
        pages_T = np.asarray(pages_T, dtype=np.intp)
        assert self._state[parent] >= PLACED, "a chain of KV pages continues a page that is not in the forest"
        assert (self._state[pages_T] == UNASSIGNED).all(), "a KV page was chained that is not unassigned"
        assert self._once(pages_T).all(), "a KV page is twice in a chain"
        if len(pages_T) == 0:
            return
        self._state[pages_T] = PLACED
        self._parent[pages_T[0]] = parent
        self._parent[pages_T[1:]] = pages_T[:-1]
        self._refs[pages_T[:-1]] = 1
        self._add(self._refs, np.array([parent]))

    def grow(self, heads_N: Pages, paths_NW: np.ndarray, counts_N: np.ndarray) -> np.ndarray:
        """Extend each row n, which ends with page `heads_N[n]`, by the unassigned pages `paths_NW[n, :counts_N[n]]`.
        Returns every row's last page [N], int32.

        A page may occur in several rows (branches of a tree), always with the same page before it; it is one child of
        that page. The last page of a row without new pages is its head. The returned pages are not held yet."""
        counts_N = np.asarray(counts_N, dtype=np.intp)
        lineage_NW = np.concatenate([np.asarray(heads_N, dtype=np.intp)[:, None], paths_NW], axis=1)
        inside_NW = np.arange(lineage_NW.shape[1] - 1) < counts_N[:, None]
        before_T = lineage_NW[:, :-1][inside_NW]
        pages_T = lineage_NW[:, 1:][inside_NW]
        last_N = lineage_NW[np.arange(len(counts_N)), counts_N]
        assert (self._state[lineage_NW[:, 0]] >= PLACED).all(), "a row continues a KV page that is not in the forest"
        assert (self._state[pages_T] == UNASSIGNED).all(), "a row has a new KV page that is not unassigned"
        self._parent[pages_T] = before_T
        # Heads are placed and new pages are unassigned, so if each page has one parent, the rows are trees below their
        # heads.
        assert (self._parent[pages_T] == before_T).all(), "a KV page has different pages before it in two rows"
        self._state[pages_T] = GROWN
        self._add(self._refs, before_T[self._once(pages_T)])
        return last_N.astype(np.int32)

    def count_grown(self, pages_T: Pages, counts: bool) -> None:
        """Set whether these pages of the forest count in `num_grown` from now on."""
        pages_T = np.asarray(pages_T, dtype=np.intp)
        assert (self._state[pages_T] >= PLACED).all(), "a KV page was counted that is not in the forest"
        self._state[pages_T] = GROWN if counts else PLACED
        self._state[DUMMY_PAGE] = PLACED

    def hold(self, pages_N: Pages) -> None:
        """Add a reference to each page. Repeats count; page 0 is ignored."""
        pages_N = np.asarray(pages_N, dtype=np.intp)
        assert (self._state[pages_N] >= PLACED).all(), "a KV page was held that is not in the forest"
        self._add(self._heads, pages_N)
        self._add(self._refs, pages_N)

    def release(self, pages_N: Pages) -> None:
        """Remove a reference from each page. Repeats count; page 0 is ignored. Pages without references are freed, and
        so are their ancestors that have no reference left."""
        pages_N = np.asarray(pages_N, dtype=np.intp)
        np.subtract.at(self._heads, pages_N, ONE)
        self._heads[DUMMY_PAGE] = 0
        assert (self._heads[pages_N] >= 0).all(), "a KV page was released that nothing holds"
        dying_T = self._drop(pages_N)
        if len(dying_T) == 0:
            return
        gone_T = self._cascade(dying_T)
        self._refs[gone_T] = 0
        self._free_pages(gone_T)

    def path(self, page: int, length: int) -> np.ndarray:
        """Return the last `length` pages [length], int32, of the sequence that ends with `page`, in the order of their
        positions."""
        assert self._state[page] >= PLACED, "the path of a KV page was asked for that is not in the forest"
        parent_of = self._parent_of
        pages = []
        page = int(page)
        for _ in range(length):
            pages.append(page)
            page = parent_of[page]
        pages_T = np.array(pages[::-1], dtype=np.int32)
        assert (pages_T != DUMMY_PAGE).all(), "a path of KV pages is shorter than was asked for"
        return pages_T

    def ancestors(self, pages_N: Pages, steps_N: np.ndarray) -> np.ndarray:
        """Return, for each page n [N], the page `steps_N[n]` positions before it."""
        parent_of = self._parent_of
        found_N = np.array(pages_N, dtype=np.int32)
        for n in np.flatnonzero(steps_N).tolist():
            page = int(found_N[n])
            for _ in range(int(steps_N[n])):
                page = parent_of[page]
            found_N[n] = page
        return found_N

    def check(self) -> None:
        """Assert the invariants: free and held pages are all pages, no page is both, references are children plus
        holds, and every placed page has a reference."""
        free_T = self._free[: self._num_free]
        assert (self._state[free_T] == FREE).all(), "a KV page is free and held"
        assert np.bincount(free_T, minlength=1).max() <= 1, "a KV page is free twice"
        assert self.num_free + self.num_held == self.capacity, "free + held differ from all KV pages"
        placed_T = 1 + np.flatnonzero(self._state[1:] >= PLACED)
        assert (self._state[self._parent[placed_T]] >= PLACED).all(), "a KV page descends from one that is not held"
        children = np.bincount(self._parent[placed_T], minlength=self.capacity + 1)
        assert (self._refs[1:] == (children + self._heads)[1:]).all(), (
            "the references of a KV page differ from its children and heads"
        )
        assert (self._heads >= 0).all(), "a KV page has fewer than no heads"
        assert (self._refs[placed_T] > 0).all(), "a KV page is held and nothing refers to it"

    def _once(self, pages_T: np.ndarray) -> np.ndarray:
        """Return bool [T]: exactly one entry is marked among those of the same page. Takes linear time, because nothing
        is sorted."""
        order_T = np.arange(len(pages_T))
        self._scratch[pages_T] = order_T
        return self._scratch[pages_T] == order_T

    def _add(self, counts: np.ndarray, pages_T: np.ndarray) -> None:
        """Add one to the count of each entry's page; the dummy page is not counted."""
        np.add.at(counts, pages_T, ONE)
        self._heads[DUMMY_PAGE] = 0
        self._refs[DUMMY_PAGE] = ENDLESS

    def _drop(self, pages_T: np.ndarray) -> np.ndarray:
        """Remove one reference for each entry. Returns the pages left without references, each once."""
        np.subtract.at(self._refs, pages_T, ONE)
        self._refs[DUMMY_PAGE] = ENDLESS
        dying_T = pages_T[self._refs[pages_T] == 0]
        return dying_T[self._once(dying_T)]

    def _cascade(self, dying_T: np.ndarray) -> np.ndarray:
        """Return these pages, which have no references, with all pages that are freed with them: level by level while
        there are many, then chain by chain."""
        levels = []
        while len(dying_T) >= WIDE:
            levels.append(dying_T)
            dying_T = self._drop(self._parent[dying_T])
        refs_of = self._refs_of
        parent_of = self._parent_of
        gone: list[int] = []
        for page in dying_T.tolist():
            gone.append(page)
            page = parent_of[page]
            # The only reference of such a page is the child that was just freed, so no other chain ends here.
            while refs_of[page] == 1:
                gone.append(page)
                page = parent_of[page]
            refs_of[page] -= 1
        self._refs[DUMMY_PAGE] = ENDLESS
        return np.concatenate([*levels, np.array(gone, dtype=np.intp)])

    def _free_pages(self, pages_T: np.ndarray) -> None:
        self._state[pages_T] = FREE
        self._free[self._num_free : self._num_free + len(pages_T)] = pages_T
        self._num_free += len(pages_T)
