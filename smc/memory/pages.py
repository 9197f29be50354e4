"""The page allocator of one KV pool: keeps track of free pages, of the parents of pages, and of references. Page 0 is
the dummy page.

A page holds one position. Pages form a forest: the parent of a page is the page of the position before it in the
sequence it was written for; page 0 stands for 'no parent'. A page lives while it is held or a page below it lives.
Knows page numbers only, nothing about keys, values, requests or particles."""

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
        self.num_released = 0
        """Number of references that have been released so far."""
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
        """Allocate `count` pages. Returns them [B], int32, unassigned: without parent or reference. Raises OutOfPages
        before anything changes."""
        assert count >= 0, "a negative number of KV pages was asked for"
        if count > self._num_free:
            raise OutOfPages(f"{count} KV pages wanted, {self._num_free} of {self.capacity} free")
        self._num_free -= count
        pages_B = self._free[self._num_free : self._num_free + count].copy()
        self._state[pages_B] = UNASSIGNED
        return pages_B

    def free(self, pages_B: Pages) -> None:
        """Free unassigned pages, none of which may occur twice."""
        pages_B = np.asarray(pages_B, dtype=np.intp)
        assert (self._state[pages_B] == UNASSIGNED).all(), "a KV page was freed that is not unassigned"
        assert self._once(pages_B).all(), "a KV page was freed twice"
        self._free_pages(pages_B)

    def settle(self, allocated_B: Pages, used: Pages) -> None:
        """Free the pages of `allocated` that are not in `used` (any shape; 0 is ignored). All of them but the used ones
        must be unassigned."""
        allocated_B = np.asarray(allocated_B, dtype=np.intp)
        self._scratch[allocated_B] = 0
        self._scratch[np.asarray(used, dtype=np.intp)] = 1
        self.free(allocated_B[self._scratch[allocated_B] == 0])

    def chain(self, parent: int, pages_B: Pages) -> None:
        """Link unassigned pages into a chain below `parent`. The last one has no reference yet: the caller must `hold`
        it."""
        pages_B = np.asarray(pages_B, dtype=np.intp)
        assert self._state[parent] >= PLACED, "a chain of KV pages continues a page that is not in the forest"
        assert (self._state[pages_B] == UNASSIGNED).all(), "a KV page was chained that is not unassigned"
        assert self._once(pages_B).all(), "a KV page is twice in a chain"
        if len(pages_B) == 0:
            return
        self._state[pages_B] = PLACED
        self._parent[pages_B[0]] = parent
        self._parent[pages_B[1:]] = pages_B[:-1]
        self._refs[pages_B[:-1]] = 1
        self._add(self._refs, np.array([parent]))

    def grow(self, heads_R: Pages, paths_RB: np.ndarray, counts_R: np.ndarray) -> np.ndarray:
        """Extend each row n, which ends with page `heads_R[n]`, by the unassigned pages `paths_RB[n, :counts_R[n]]`.
        Returns every row's last page [R], int32.

        A page may occur in several rows (branches of a tree), always with the same page before it; it is one child of
        that page. The last page of a row without new pages is its head. The returned pages are not held yet."""
        counts_R = np.asarray(counts_R, dtype=np.intp)
        lineage_RB = np.concatenate([np.asarray(heads_R, dtype=np.intp)[:, None], paths_RB], axis=1)
        inside_RB = np.arange(lineage_RB.shape[1] - 1) < counts_R[:, None]
        before_B = lineage_RB[:, :-1][inside_RB]
        pages_B = lineage_RB[:, 1:][inside_RB]
        last_R = lineage_RB[np.arange(len(counts_R)), counts_R]
        assert (self._state[lineage_RB[:, 0]] >= PLACED).all(), "a row continues a KV page that is not in the forest"
        assert (self._state[pages_B] == UNASSIGNED).all(), "a row has a new KV page that is not unassigned"
        self._parent[pages_B] = before_B
        # Heads are placed and new pages are unassigned, so if each page has one parent, the rows are trees below their
        # heads.
        assert (self._parent[pages_B] == before_B).all(), "a KV page has different pages before it in two rows"
        self._state[pages_B] = GROWN
        self._add(self._refs, before_B[self._once(pages_B)])
        return last_R.astype(np.int32)

    def count_grown(self, pages_B: Pages, counts: bool) -> None:
        """Set whether these pages of the forest count in `num_grown` from now on."""
        pages_B = np.asarray(pages_B, dtype=np.intp)
        assert (self._state[pages_B] >= PLACED).all(), "a KV page was counted that is not in the forest"
        self._state[pages_B] = GROWN if counts else PLACED
        self._state[DUMMY_PAGE] = PLACED

    def hold(self, pages_R: Pages) -> None:
        """Add a reference to each page. Repeats count; page 0 is ignored."""
        pages_R = np.asarray(pages_R, dtype=np.intp)
        assert (self._state[pages_R] >= PLACED).all(), "a KV page was held that is not in the forest"
        self._add(self._heads, pages_R)
        self._add(self._refs, pages_R)

    def release(self, pages_R: Pages) -> None:
        """Remove a reference from each page. Repeats count; page 0 is ignored. Pages without references are freed, and
        so are their ancestors that have no reference left."""
        pages_R = np.asarray(pages_R, dtype=np.intp)
        self.num_released += len(pages_R)
        np.subtract.at(self._heads, pages_R, ONE)
        self._heads[DUMMY_PAGE] = 0
        assert (self._heads[pages_R] >= 0).all(), "a KV page was released that nothing holds"
        dying_B = self._drop(pages_R)
        if len(dying_B) == 0:
            return
        gone_B = self._cascade(dying_B)
        self._refs[gone_B] = 0
        self._free_pages(gone_B)

    def freed_by(self, page: int, gone: dict[int, int]) -> tuple[int, int]:
        """Return how many pages releasing `page` once would free, after as many references of pages as in `gone` are
        gone, and the page before these, which stays. Enters the references that would go with the freed pages. Changes
        no page."""
        refs_of, parent_of = self._refs_of, self._parent_of
        count = 0
        while refs_of[page] - gone.get(page, 0) == (count == 0):
            count += 1
            page = parent_of[page]
            gone[page] = gone.get(page, 0) + 1
        return count, page

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
        pages_B = np.array(pages[::-1], dtype=np.int32)
        assert (pages_B != DUMMY_PAGE).all(), "a path of KV pages is shorter than was asked for"
        return pages_B

    def ancestors(self, pages_R: Pages, steps_R: np.ndarray) -> np.ndarray:
        """Return, for each page n [R], the page `steps_R[n]` positions before it."""
        parent_of = self._parent_of
        found_R = np.array(pages_R, dtype=np.int32)
        for n in np.flatnonzero(steps_R).tolist():
            page = int(found_R[n])
            for _ in range(int(steps_R[n])):
                page = parent_of[page]
            found_R[n] = page
        return found_R

    def check(self) -> None:
        """Assert the invariants: free and held pages are all pages, no page is both, references are children plus
        holds, and every placed page has a reference."""
        free_B = self._free[: self._num_free]
        assert (self._state[free_B] == FREE).all(), "a KV page is free and held"
        assert np.bincount(free_B, minlength=1).max() <= 1, "a KV page is free twice"
        assert self.num_free + self.num_held == self.capacity, "free + held differ from all KV pages"
        placed_B = 1 + np.flatnonzero(self._state[1:] >= PLACED)
        assert (self._state[self._parent[placed_B]] >= PLACED).all(), "a KV page descends from one that is not held"
        children = np.bincount(self._parent[placed_B], minlength=self.capacity + 1)
        assert (self._refs[1:] == (children + self._heads)[1:]).all(), (
            "the references of a KV page differ from its children and heads"
        )
        assert (self._heads >= 0).all(), "a KV page has fewer than no heads"
        assert (self._refs[placed_B] > 0).all(), "a KV page is held and nothing refers to it"

    def _once(self, pages_B: np.ndarray) -> np.ndarray:
        """Return bool [B]: exactly one entry is marked among those of the same page. Takes linear time, because nothing
        is sorted."""
        order_B = np.arange(len(pages_B))
        self._scratch[pages_B] = order_B
        return self._scratch[pages_B] == order_B

    def _add(self, counts: np.ndarray, pages_B: np.ndarray) -> None:
        """Add one to the count of each entry's page; the dummy page is not counted."""
        np.add.at(counts, pages_B, ONE)
        self._heads[DUMMY_PAGE] = 0
        self._refs[DUMMY_PAGE] = ENDLESS

    def _drop(self, pages_B: np.ndarray) -> np.ndarray:
        """Remove one reference for each entry. Returns the pages left without references, each once."""
        np.subtract.at(self._refs, pages_B, ONE)
        self._refs[DUMMY_PAGE] = ENDLESS
        dying_B = pages_B[self._refs[pages_B] == 0]
        return dying_B[self._once(dying_B)]

    def _cascade(self, dying_B: np.ndarray) -> np.ndarray:
        """Return these pages, which have no references, with all pages that are freed with them: level by level while
        there are many, then chain by chain."""
        levels = []
        while len(dying_B) >= WIDE:
            levels.append(dying_B)
            dying_B = self._drop(self._parent[dying_B])
        refs_of = self._refs_of
        parent_of = self._parent_of
        gone: list[int] = []
        for page in dying_B.tolist():
            gone.append(page)
            page = parent_of[page]
            # The only reference of such a page is the child that was just freed, so no other chain ends here.
            while refs_of[page] == 1:
                gone.append(page)
                page = parent_of[page]
            refs_of[page] -= 1
        self._refs[DUMMY_PAGE] = ENDLESS
        return np.concatenate([*levels, np.array(gone, dtype=np.intp)])

    def _free_pages(self, pages_B: np.ndarray) -> None:
        self._state[pages_B] = FREE
        self._free[self._num_free : self._num_free + len(pages_B)] = pages_B
        self._num_free += len(pages_B)
