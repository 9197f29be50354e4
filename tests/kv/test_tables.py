"""Laws of block tables: they follow a model that holds plain lists of pages, and their books balance after every operation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from smc.kv.pages import DUMMY_PAGE, OutOfPages, PageAllocator
from smc.kv.tables import BlockTables

ROWS, WIDTH, CAPACITY = 5, 7, 16
row = st.integers(0, ROWS - 1)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def state(tables: BlockTables) -> tuple:
    allocator = tables.allocator
    free = sorted(allocator._free[: allocator.num_free].tolist())
    return tables.table_RL.tolist(), tables.length_R.tolist(), allocator.held.tolist(), free


class Tables(RuleBasedStateMachine):
    """Random operations. The model holds every row's pages, and those that somebody else took."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = BlockTables(ROWS, WIDTH, CAPACITY)
        self.pages: list[list[int]] = [[] for _ in range(ROWS)]
        self.elsewhere: list[int] = []

    def held(self) -> set[int]:
        return {page for pages in (*self.pages, self.elsewhere) for page in pages}

    @rule(parts=st.lists(st.tuples(row, st.integers(0, 4)), max_size=4, unique_by=lambda part: part[0]))
    def extend(self, parts):
        rows_R, counts_R = (ints(*column) for column in zip(*parts)) if parts else (ints(), ints())
        total = int(counts_R.sum())
        if any(len(self.pages[r]) + new > WIDTH for r, new in parts):
            expected: type[Exception] | None = ValueError
        else:
            expected = OutOfPages if total > CAPACITY - len(self.held()) else None
        if expected:
            before = state(self.tables)
            with pytest.raises(expected):
                self.tables.extend(rows_R, counts_R)
            assert state(self.tables) == before
            return
        pages_T, positions_T = self.tables.extend(rows_R, counts_R)
        assert positions_T.tolist() == [len(self.pages[r]) + i for r, new in parts for i in range(new)]
        assert len(set(pages_T.tolist()) - self.held() - {DUMMY_PAGE}) == len(pages_T) == total
        fresh = iter(pages_T.tolist())
        for r, new in parts:
            self.pages[r] += [next(fresh) for _ in range(new)]

    @rule(rows=st.lists(row, max_size=ROWS, unique=True))
    def release(self, rows):
        self.tables.release(ints(*rows))
        for r in rows:
            self.pages[r] = []

    @rule(count=st.integers(0, 3))
    def take_elsewhere(self, count):
        """Pages of the pool that no row holds, as the particles of a group do."""
        if count <= self.tables.allocator.num_free:
            self.elsewhere += self.tables.allocator.allocate(count).tolist()

    @rule()
    def give_back(self):
        self.tables.allocator.free(ints(*self.elsewhere))
        self.elsewhere = []

    @invariant()
    def tables_equal_the_model(self):
        assert self.tables.length_R.tolist() == [len(pages) for pages in self.pages]
        assert self.tables.table_RL.tolist() == [pages + [DUMMY_PAGE] * (WIDTH - len(pages)) for pages in self.pages]

    @invariant()
    def books_balance(self):
        self.tables.check()
        allocator = self.tables.allocator
        assert allocator.num_free == CAPACITY - len(self.held())
        assert sorted(allocator._free[: allocator.num_free].tolist()) == sorted(set(range(1, CAPACITY + 1)) - self.held())

    def teardown(self):
        self.give_back()
        self.tables.release(np.arange(ROWS, dtype=np.int32))
        self.tables.check()
        assert self.tables.allocator.num_free == CAPACITY


Tables.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestTables = Tables.TestCase


def some_tables() -> BlockTables:
    """Rows 0 and 1 hold 4 positions, row 2 holds 3, row 3 nothing; one page is left."""
    tables = BlockTables(4, WIDTH, 12)
    tables.extend(ints(0, 1, 2), ints(4, 4, 3))
    return tables


WRONG = {
    "extend past the last row": (lambda t: t.extend(ints(3, 4), ints(1, 1)), ValueError),
    "extend before the first row": (lambda t: t.extend(ints(-1), ints(1)), ValueError),
    "extend past the width": (lambda t: t.extend(ints(2, 0), ints(1, WIDTH - 3)), ValueError),
    "extend by less than nothing": (lambda t: t.extend(ints(2, 0), ints(1, -1)), ValueError),
    "extend a row twice": (lambda t: t.extend(ints(2, 2), ints(1, 0)), ValueError),
    "extend beyond the pool": (lambda t: t.extend(ints(2, 3), ints(1, 1)), OutOfPages),
    "release a row that is not there": (lambda t: t.release(ints(2, 4)), ValueError),
    "release a row twice": (lambda t: t.release(ints(2, 2)), ValueError),
    "give back what nobody holds": (lambda t: t.allocator.free(ints(12)), AssertionError),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_refused_call_changes_nothing(what):
    call, error = WRONG[what]
    tables = some_tables()
    assert tables.allocator.num_free == 1 and not tables.allocator.held[12]
    before = state(tables)
    with pytest.raises(error):
        call(tables)
    assert state(tables) == before
    tables.check()


def test_empty_calls_change_nothing():
    tables = some_tables()
    before = state(tables)
    pages_T, positions_T = tables.extend(ints(), ints())
    assert len(pages_T) == len(positions_T) == 0
    tables.release(ints())
    assert state(tables) == before


def test_a_page_given_back_twice_is_seen():
    allocator = PageAllocator(3)
    pages = allocator.allocate(2)
    with pytest.raises(AssertionError, match="twice"):
        allocator.free(pages[[0, 0]])


def test_check_sees_a_lost_page_a_shared_one_and_a_wrong_length():
    def lose_page(tables):
        tables.allocator._num_free -= 1

    def free_page(tables):
        tables.allocator.held[tables.table_RL[0, 0]] = False

    def share_page(tables):
        tables.table_RL[1, 0] = tables.table_RL[0, 0]

    def lose_length(tables):
        tables.length_R[2] -= 1

    for damage in (lose_page, free_page, share_page, lose_length):
        tables = some_tables()
        tables.check()
        damage(tables)
        with pytest.raises(AssertionError):
            tables.check()


def test_the_dummy_page_is_never_handed_out():
    allocator = PageAllocator(3)
    assert sorted(allocator.allocate(3).tolist()) == [1, 2, 3]
    with pytest.raises(OutOfPages):
        allocator.allocate(1)
    allocator.free(ints(1, 3))
    assert sorted(allocator.allocate(2).tolist()) == [1, 3]


def test_a_pool_without_pages_is_refused():
    with pytest.raises(ValueError, match="at least 1 page"):
        PageAllocator(0)
