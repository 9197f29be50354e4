"""The page allocator agrees with a model of plain dicts, its accounts balance after every operation, and it rejects
misuse."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from smc.memory.pages import DUMMY_PAGE, WIDE, OutOfPages, PageAllocator

CAPACITY = 40


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def state(allocator: PageAllocator) -> tuple:
    arrays = (
        allocator._free[: allocator.num_free],
        allocator._state,
        allocator._parent,
        allocator._heads,
        allocator._refs,
    )
    return tuple(array.tolist() for array in arrays)


def chained(allocator: PageAllocator, length: int, parent: int = DUMMY_PAGE) -> np.ndarray:
    """A chain of new pages below `parent`; its last page is held once."""
    pages_B = allocator.allocate(length)
    allocator.chain(parent, pages_B)
    allocator.hold(pages_B[-1:])
    return pages_B


class Model:
    """A simple model of the page forest: which pages are alive is recomputed from the heads."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}
        self.heads: Counter[int] = Counter()
        self.loose: list[int] = []

    def path(self, page: int) -> list[int]:
        pages = []
        while page != DUMMY_PAGE:
            pages.append(page)
            page = self.parent[page]
        return pages[::-1]

    def sweep(self) -> None:
        alive = {page for head, holds in self.heads.items() if holds for page in self.path(head)}
        self.parent = {page: above for page, above in self.parent.items() if page in alive}
        self.heads = +self.heads

    def held(self) -> set[int]:
        return set(self.parent) | set(self.loose)


class Ledger(RuleBasedStateMachine):
    """Random operations on the allocator and its model, with shared heads and branching rows."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(CAPACITY)
        self.model = Model()

    @initialize(length=st.integers(1, 6), heads=st.integers(1, 4))
    def prompt(self, length, heads):
        pages = chained(self.allocator, length).tolist()
        self.model.parent.update(zip(pages, [DUMMY_PAGE, *pages]))
        self.allocator.hold(pages[-1:] * (heads - 1))
        self.model.heads[pages[-1]] = heads

    def places(self) -> list[int]:
        return [DUMMY_PAGE, *sorted(self.model.parent)]

    @rule(count=st.integers(0, 12))
    def allocate(self, count):
        if count > CAPACITY - len(self.model.held()):
            before = state(self.allocator)
            with pytest.raises(OutOfPages):
                self.allocator.allocate(count)
            assert state(self.allocator) == before
            return
        pages = self.allocator.allocate(count)
        assert pages.dtype == np.int32
        assert len(set(pages.tolist()) - self.model.held() - {DUMMY_PAGE}) == count
        self.model.loose += pages.tolist()

    @rule(data=st.data())
    def free(self, data):
        pages = data.draw(st.lists(st.sampled_from(self.model.loose), unique=True)) if self.model.loose else []
        self.allocator.free(pages)
        self.model.loose = [page for page in self.model.loose if page not in pages]

    @rule(data=st.data())
    def chain(self, data):
        parent = data.draw(st.sampled_from(self.places()))
        length = data.draw(st.integers(0, len(self.model.loose)))
        pages = [self.model.loose.pop() for _ in range(length)]
        self.allocator.chain(parent, pages)
        for page in pages:
            self.model.parent[page] = parent
            parent = page
        self.allocator.hold(pages[-1:])
        self.model.heads.update(pages[-1:])

    @precondition(lambda self: +self.model.heads)
    @rule(data=st.data(), wanted=st.integers(0, 15))
    def round(self, data, wanted):
        """Replace some heads by rows that continue some of them; each step appends a new page, or the page of a row
        with the same past."""
        held = sorted((+self.model.heads).elements())
        old = [held[i] for i in data.draw(st.lists(st.integers(0, len(held) - 1), min_size=1, max_size=4, unique=True))]
        ancestors = data.draw(st.lists(st.sampled_from(old), max_size=6))
        allocated = [*self.model.loose, *self.allocator.allocate(min(wanted, self.allocator.num_free)).tolist()]
        rows = self.branches(data, ancestors, list(allocated))
        width = max((len(row) for row in rows), default=0)
        paths_RB = np.array([row + [0] * (width - len(row)) for row in rows], dtype=np.int32).reshape(len(rows), width)
        new_R = self.allocator.grow(ints(*ancestors), paths_RB, ints(*(len(row) for row in rows)))
        assert new_R.dtype == np.int32
        assert new_R.tolist() == [row[-1] if row else head for row, head in zip(rows, ancestors)]
        self.allocator.hold(new_R)
        self.allocator.release(ints(*old))
        self.allocator.settle(allocated, paths_RB)
        for row, head in zip(rows, ancestors):
            self.model.parent.update(zip(row, [head, *row]))
        self.model.loose = []
        self.model.heads.update(new_R.tolist())
        self.model.heads.subtract(old)
        self.model.sweep()

    def branches(self, data, ancestors: list[int], fresh: list[int]) -> list[list[int]]:
        children: dict[int, list[int]] = {}
        rows: list[list[int]] = []
        for head in ancestors:
            rows.append([])
            for _ in range(data.draw(st.integers(0, 3))):
                known = children.setdefault([head, *rows[-1]][-1], [])
                if fresh and (not known or data.draw(st.booleans())):
                    known.append(fresh.pop())
                    rows[-1].append(known[-1])
                elif known:
                    rows[-1].append(data.draw(st.sampled_from(known)))
        return rows

    @rule(data=st.data())
    def hold(self, data):
        pages = data.draw(st.lists(st.sampled_from(self.places()), max_size=4))
        self.allocator.hold(pages)
        self.model.heads.update(page for page in pages if page != DUMMY_PAGE)

    @rule(data=st.data())
    def release(self, data):
        heads = [*self.model.heads.elements(), DUMMY_PAGE, DUMMY_PAGE]
        pages = data.draw(st.lists(st.integers(0, len(heads) - 1), unique=True).map(lambda at: [heads[i] for i in at]))
        self.allocator.release(pages)
        self.model.heads.subtract(page for page in pages if page != DUMMY_PAGE)
        self.model.sweep()

    @rule(data=st.data())
    def path(self, data):
        page = data.draw(st.sampled_from(self.places()))
        whole = self.model.path(page)
        length = data.draw(st.integers(0, len(whole)))
        assert self.allocator.path(page, length).tolist() == whole[len(whole) - length :]
        with pytest.raises(AssertionError):
            self.allocator.path(page, len(whole) + 1)

    @invariant()
    def follows_the_model(self):
        self.allocator.check()
        held = self.model.held()
        assert self.allocator.num_held == len(held) == CAPACITY - self.allocator.num_free
        assert set(self.allocator._free[: self.allocator.num_free].tolist()) == set(range(1, CAPACITY + 1)) - held
        assert {page: int(self.allocator._parent[page]) for page in self.model.parent} == self.model.parent
        assert {page: int(holds) for page, holds in enumerate(self.allocator._heads) if holds} == dict(
            +self.model.heads
        )


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)


def test_capacity_is_checked():
    with pytest.raises(ValueError, match="at least 1 page"):
        PageAllocator(0)


def test_shared_branches_are_one_child():
    allocator = PageAllocator(20)
    prompt_B = chained(allocator, 4)
    head = int(prompt_B[-1])
    a, b, c, d, unused = allocator.allocate(5).tolist()
    paths_RB = np.array([[a, b, 0], [a, b, c], [a, d, unused]], dtype=np.int32)
    new_R = allocator.grow(ints(head, head, head), paths_RB, ints(2, 3, 2))
    assert new_R.tolist() == [b, c, d]
    allocator.hold(new_R)
    allocator.release(ints(head))
    allocator.settle(ints(a, b, c, d, unused), new_R.tolist() + [a])
    allocator.check()
    assert allocator.num_held == 8
    allocator.release(ints(b, c))
    allocator.check()
    assert allocator.num_held == 6
    assert allocator.path(d, 6).tolist() == [*prompt_B.tolist(), a, d]
    allocator.release(ints(d))
    assert allocator.num_free == 20


def test_a_row_without_new_pages_keeps_its_head():
    allocator = PageAllocator(3)
    head_R = chained(allocator, 2)[-1:]
    new_R = allocator.grow(head_R, np.zeros((1, 0), dtype=np.int32), ints(0))
    allocator.hold(new_R)
    allocator.release(head_R)
    allocator.check()
    assert new_R.tolist() == head_R.tolist()
    assert allocator.num_held == 2


def misuses():
    def again(allocator, held, loose):
        allocator.free(loose)
        allocator.free(loose)

    def consistent(*rows, heads=None):
        def grow(allocator, held, loose):
            paths_RB = np.array([[loose[i] for i in row] for row in rows])
            allocator.grow(heads or [held[-1]] * len(rows), paths_RB, np.full(len(rows), paths_RB.shape[1]))

        return grow

    return {
        "free twice": again,
        "free twice in one call": lambda allocator, held, loose: allocator.free(ints(loose[0], loose[0])),
        "free what is in the forest": lambda allocator, held, loose: allocator.free(held[:1]),
        "free the dummy page": lambda allocator, held, loose: allocator.free(ints(0)),
        "settle what is free": lambda allocator, held, loose: allocator.settle(ints(12), []),
        "chain twice": lambda allocator, held, loose: allocator.chain(0, held),
        "chain a page twice in one call": lambda allocator, held, loose: allocator.chain(
            0, ints(loose[0], loose[1], loose[0])
        ),
        "chain below a loose page": lambda allocator, held, loose: allocator.chain(loose[0], loose[1:]),
        "hold a loose page": lambda allocator, held, loose: allocator.hold(loose),
        "release a loose page": lambda allocator, held, loose: allocator.release(loose),
        "release what only its child holds": lambda allocator, held, loose: allocator.release(held[:1]),
        "release once too often": lambda allocator, held, loose: allocator.release(ints(held[-1], held[-1])),
        "release a free page": lambda allocator, held, loose: allocator.release(ints(12)),
        "grow from a loose page": consistent([0], heads=[12]),
        "grow a page of the forest": lambda allocator, held, loose: allocator.grow(held[-1:], held[None, :1], ints(1)),
        "two parents": consistent([0, 2], [1, 2]),
        "two columns": consistent([0, 1], [1, 0]),
        "below itself": consistent([0, 0]),
        "path of a loose page": lambda allocator, held, loose: allocator.path(loose[0], 1),
        "path too long": lambda allocator, held, loose: allocator.path(held[-1], 5),
    }


@pytest.mark.parametrize("what", misuses())
def test_misuse_is_caught(what):
    allocator = PageAllocator(12)
    held_B = chained(allocator, 4)
    loose_B = allocator.allocate(3)
    with pytest.raises(AssertionError):
        misuses()[what](allocator, held_B, loose_B)


def test_check_finds_broken_books():
    def leak(allocator):
        allocator.chain(0, allocator.allocate(2))

    def count(allocator):
        allocator._refs[allocator._free[0]] += 1

    def both(allocator):
        allocator._state[allocator._free[0]] = 1

    for breakage in (leak, count, both):
        allocator = PageAllocator(12)
        chained(allocator, 4)
        allocator.check()
        breakage(allocator)
        with pytest.raises(AssertionError):
            allocator.check()


def test_many_particles_share_a_past():
    """64 particles end one after another, in random order; the shared past is freed with the last of them."""
    rng = np.random.default_rng(0)
    allocator = PageAllocator(4096)
    prompt_B = chained(allocator, 1000)
    heads_R = np.repeat(prompt_B[-1], 64)
    allocator.hold(heads_R)
    allocator.release(prompt_B[-1:])
    for _ in range(3):
        heads_R = one_round(allocator, heads_R, allocator.allocate(64 * 5).reshape(64, 5))
    for left, n in enumerate(rng.permutation(64)):
        assert allocator.num_held == 1000 + 15 * (64 - left)
        allocator.release(heads_R[n : n + 1])
        allocator.check()
    assert allocator.num_free == 4096


@pytest.mark.parametrize("chains", [1, WIDE - 1, WIDE, WIDE + 1, 2 * WIDE])
def test_a_cascade_takes_all_and_no_more(chains):
    """Chains of many lengths below a shared page that is held, below one that is not, and below none."""
    allocator = PageAllocator(200_000)
    kept = chained(allocator, 50)
    doomed = chained(allocator, 30, int(kept[20]))
    tips = [
        int(chained(allocator, 1 + n % 7 * 20, int(below))[-1])
        for n, below in enumerate(np.resize([kept[40], doomed[10], 0], chains))
    ]
    allocator.release(doomed[-1:])
    allocator.check()
    allocator.release(tips)
    allocator.check()
    assert allocator.num_held == 50
    allocator.release(kept[-1:])
    assert allocator.num_free == 200_000


def test_a_long_chain_goes_at_once():
    allocator = PageAllocator(4096)
    rng = np.random.default_rng(0)
    allocator.free(rng.permutation(allocator.allocate(4096)))
    fastest = np.inf
    for _ in range(5):
        tip_R = chained(allocator, 2048)[-1:]
        start = time.perf_counter()
        allocator.release(tip_R)
        fastest = min(fastest, time.perf_counter() - start)
    assert allocator.num_free == 4096
    assert fastest < 0.020


def one_round(allocator: PageAllocator, heads_R: np.ndarray, paths_RB: np.ndarray) -> np.ndarray:
    new_R = allocator.grow(heads_R, paths_RB, np.full(len(heads_R), paths_RB.shape[1]))
    allocator.hold(new_R)
    allocator.release(heads_R)
    allocator.settle(paths_RB.ravel(), paths_RB)
    return new_R


def test_rounds_of_a_population_conserve_pages():
    """Ancestors are drawn at random in every round: the held pages are exactly the ancestors of the heads, recounted
    each time."""
    rng = np.random.default_rng(1)
    allocator = PageAllocator(20_000)
    requests, particles, width = 24, 8, 5
    prompts = [chained(allocator, 10 + 3 * r)[-1] for r in range(requests)]
    heads_R = np.repeat(prompts, particles)
    allocator.hold(heads_R)
    allocator.release(prompts)
    lengths = 10 + 3 * np.repeat(np.arange(requests), particles)
    for _ in range(30):
        allocated_RB = allocator.allocate(len(heads_R) * width).reshape(-1, width)
        ancestor_R = np.arange(len(heads_R)) // particles * particles + rng.integers(0, particles, len(heads_R))
        counts_R = rng.integers(0, width + 1, len(heads_R))[ancestor_R]
        paths_RB = np.where(np.arange(width) < counts_R[:, None], allocated_RB[ancestor_R], DUMMY_PAGE)
        new_R = allocator.grow(heads_R[ancestor_R], paths_RB, counts_R)
        allocator.hold(new_R)
        allocator.release(heads_R)
        allocator.settle(allocated_RB.ravel(), paths_RB)
        heads_R = new_R
        lengths = lengths[ancestor_R] + counts_R
        allocator.check()
        alive = {page for head, length in zip(heads_R, lengths) for page in allocator.path(head, length).tolist()}
        assert allocator.num_held == len(alive)
    allocator.release(heads_R)
    allocator.check()
    assert allocator.num_free == 20_000


def test_grown_pages_are_counted():
    """Pages added by `grow` are counted while they are held, those of `chain` are not; `count_grown` includes or
    excludes any page of the forest."""
    allocator = PageAllocator(40)
    prompt_B = chained(allocator, 5)
    pages_B = allocator.allocate(6)
    ends = allocator.grow(prompt_B[[-1, -1]], pages_B.reshape(2, 3), np.array([3, 2]))
    allocator.hold(ends)
    allocator.settle(pages_B, [*pages_B[:5]])
    assert allocator.num_grown == 5
    allocator.count_grown(prompt_B[:2], True)
    allocator.count_grown(pages_B[:1], False)
    allocator.count_grown([DUMMY_PAGE], True)
    assert allocator.num_grown == 6
    allocator.release(ends[1:])
    assert allocator.num_grown == 4
    allocator.check()
    with pytest.raises(AssertionError, match="counted that is not in the forest"):
        allocator.count_grown(pages_B[3:4], True)
    allocator.release([ends[0], prompt_B[-1]])
    assert allocator.num_grown == 0 and allocator.num_free == 40
