"""Laws of block tables: they follow a model that holds plain lists of pages, and their books balance after every operation."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from smc.kv.pages import DUMMY_PAGE, OutOfPages, PageAllocator
from smc.kv.tables import RELEASE, BlockTables, PrefixMerge, RowMoves

ROWS, WIDTH, CAPACITY = 5, 7, 16
row = st.integers(0, ROWS - 1)
token = st.integers(0, 1)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def columns(tuples: list[tuple[int, ...]], count: int) -> list[np.ndarray]:
    return [ints(*column) for column in zip(*tuples)] if tuples else [ints()] * count


def state(tables: BlockTables) -> tuple:
    allocator = tables.allocator
    free = sorted(allocator._free[: allocator.num_free].tolist())
    return tables.table_RL.tolist(), tables.length_R.tolist(), allocator.references.tolist(), free


def common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


class Tables(RuleBasedStateMachine):
    """Random operations. The model holds every row's pages, and the token that each page was allocated for."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = BlockTables(ROWS, WIDTH, CAPACITY)
        self.pages: list[list[int]] = [[] for _ in range(ROWS)]
        self.token_of: dict[int, int] = {}

    def held(self) -> set[int]:
        return {page for pages in self.pages for page in pages}

    def tokens(self, r: int) -> list[int]:
        return [self.token_of[page] for page in self.pages[r]]

    @rule(parts=st.lists(st.tuples(row, st.lists(token, max_size=4)), max_size=4, unique_by=lambda part: part[0]))
    def extend(self, parts):
        rows_R, counts_R = columns([(r, len(new)) for r, new in parts], 2)
        total = int(counts_R.sum())
        if any(len(self.pages[r]) + len(new) > WIDTH for r, new in parts):
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
        assert positions_T.tolist() == [len(self.pages[r]) + i for r, new in parts for i in range(len(new))]
        assert len(set(pages_T.tolist()) - self.held() - {DUMMY_PAGE}) == len(pages_T) == total
        fresh = iter(pages_T.tolist())
        for r, new in parts:
            for t in new:
                page = next(fresh)
                self.token_of[page] = t
                self.pages[r].append(page)

    @rule(data=st.data(), dst=st.lists(row, max_size=ROWS, unique=True), skip=st.booleans())
    def move(self, data, dst, skip):
        """Copies, releases and permutations; with `skip`, from as late a start as the tables allow."""
        moves = []
        for d in dst:
            source = data.draw(st.just(RELEASE) | row)
            start = common(self.pages[d], self.pages[source]) if skip and source != RELEASE else 0
            moves.append((d, source, start))
        self.tables.move(RowMoves(*columns(moves, 3)))
        old = [list(pages) for pages in self.pages]
        for d, source, _ in moves:
            self.pages[d] = [] if source == RELEASE else list(old[source])

    @rule(order=st.permutations(range(ROWS)))
    def permute(self, order):
        self.tables.move(RowMoves(np.arange(ROWS, dtype=np.int32), ints(*order), np.zeros(ROWS, dtype=np.int32)))
        self.pages = [list(self.pages[r]) for r in order]

    @precondition(lambda self: len(self.held()) > 1)
    @rule(data=st.data(), source=row, dst=st.lists(row, min_size=1, unique=True))
    def merge(self, data, source, dst):
        """Rows of equal tokens share pages; none of their tokens changes."""
        tokens = [self.tokens(r) for r in range(ROWS)]
        merges = []
        for d in dst:
            agree = common(tokens[d], tokens[source])
            start = data.draw(st.integers(0, agree))
            merges.append((d, source, start, data.draw(st.integers(start, agree))))
        self.tables.merge(PrefixMerge(*columns(merges, 4)))
        old = list(self.pages[source])
        for d, _, start, end in merges:
            self.pages[d][start:end] = old[start:end]
        assert [self.tokens(r) for r in range(ROWS)] == tokens

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
        self.tables.move(RowMoves.release(np.arange(ROWS, dtype=np.int32)))
        self.tables.check()
        assert self.tables.allocator.num_free == CAPACITY


Tables.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestTables = Tables.TestCase


def shared_tables() -> BlockTables:
    """Row 0 holds 4 positions, row 1 shares 2 of them and has 2 of its own, row 2 holds 3, row 3 nothing."""
    tables = BlockTables(4, WIDTH, 10)
    tables.extend(ints(0), ints(2))
    tables.move(RowMoves(ints(1), ints(0), ints(0)))
    tables.extend(ints(0, 1, 2), ints(2, 2, 3))
    return tables


WRONG = {
    "extend past the last row": (lambda t: t.extend(ints(3, 4), ints(1, 1)), ValueError),
    "extend before the first row": (lambda t: t.extend(ints(-1), ints(1)), ValueError),
    "extend past the width": (lambda t: t.extend(ints(2, 0), ints(1, WIDTH - 3)), ValueError),
    "extend by less than nothing": (lambda t: t.extend(ints(2, 0), ints(1, -1)), ValueError),
    "extend a row twice": (lambda t: t.extend(ints(2, 2), ints(1, 0)), ValueError),
    "extend beyond the pool": (lambda t: t.extend(ints(2, 3), ints(1, 1)), OutOfPages),
    "move to a row that is not there": (lambda t: t.move(RowMoves(ints(2, 4), ints(0, 0), ints(0, 0))), ValueError),
    "move from a row that is not there": (lambda t: t.move(RowMoves(ints(2, 3), ints(0, 4), ints(0, 0))), ValueError),
    "move from neither a row nor RELEASE": (lambda t: t.move(RowMoves(ints(2, 3), ints(0, -2), ints(0, 0))), ValueError),
    "move to a row twice": (lambda t: t.move(RowMoves(ints(2, 2), ints(0, 1), ints(0, 0))), AssertionError),
    "merge past the destination": (lambda t: t.merge(PrefixMerge(ints(1, 2), ints(0, 0), ints(0, 0), ints(2, 4))), ValueError),
    "merge past the source": (lambda t: t.merge(PrefixMerge(ints(1, 0), ints(0, 2), ints(0, 0), ints(2, 4))), ValueError),
    "merge to a row that is not there": (lambda t: t.merge(PrefixMerge(ints(1, 4), ints(0, 0), ints(0, 0), ints(2, 0))), ValueError),
    "merge from a row that is not there": (lambda t: t.merge(PrefixMerge(ints(1, 2), ints(0, -1), ints(0, 0), ints(2, 0))), ValueError),
    "merge to a row twice": (lambda t: t.merge(PrefixMerge(ints(1, 1), ints(0, 2), ints(2, 2), ints(3, 3))), AssertionError),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_refused_call_changes_nothing(what):
    call, error = WRONG[what]
    tables = shared_tables()
    before = state(tables)
    assert tables.allocator.num_free == 1
    with pytest.raises(error):
        call(tables)
    assert state(tables) == before
    tables.check()


def test_empty_calls_change_nothing():
    tables = shared_tables()
    before = state(tables)
    pages_T, positions_T = tables.extend(ints(), ints())
    assert len(pages_T) == len(positions_T) == 0
    tables.move(RowMoves.release(ints()))
    tables.merge(PrefixMerge(ints(), ints(), ints(), ints()))
    assert state(tables) == before


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(0, 4), st.permutations(range(4)))
def test_skipping_a_shared_start_gives_the_same_tables(data, shared, order):
    """A group's rows share a prefix; moves that start after it equal moves that start at 0."""
    tables = BlockTables(4, WIDTH, 40)
    tables.extend(ints(0), ints(shared))
    tables.move(RowMoves(ints(1, 2, 3), ints(0, 0, 0), ints(0, 0, 0)))
    tables.extend(ints(0, 1, 2, 3), ints(*(data.draw(st.integers(0, WIDTH - shared)) for _ in range(4))))
    source = ints(*(data.draw(st.sampled_from([r, order[r]])) for r in range(4)))
    skipping = deepcopy(tables)
    tables.move(RowMoves(ints(*range(4)), source, ints(0, 0, 0, 0)))
    skipping.move(RowMoves(ints(*range(4)), source, ints(*[data.draw(st.integers(0, shared)) for _ in range(4)])))
    assert state(skipping) == state(tables)
    skipping.check()


def test_a_shared_page_is_freed_with_its_last_reference():
    tables = shared_tables()
    shared = tables.table_RL[0, :2].copy()
    tables.move(RowMoves.release(ints(0)))
    assert (tables.allocator.references[shared] == 1).all()
    assert tables.allocator.num_free == 3
    tables.move(RowMoves.release(ints(1)))
    assert (tables.allocator.references[shared] == 0).all()
    assert tables.allocator.num_free == 7


def test_check_sees_a_lost_reference_a_lost_page_and_a_wrong_length():
    def lose_reference(tables):
        tables.allocator.references[tables.table_RL[0, 0]] -= 1

    def lose_page(tables):
        tables.allocator._num_free -= 1

    def lose_length(tables):
        tables.length_R[2] -= 1

    for damage in (lose_reference, lose_page, lose_length):
        tables = shared_tables()
        tables.check()
        damage(tables)
        with pytest.raises(AssertionError):
            tables.check()


def test_the_dummy_page_is_never_handed_out():
    allocator = PageAllocator(3)
    assert sorted(allocator.allocate(3).tolist()) == [1, 2, 3]
    with pytest.raises(OutOfPages):
        allocator.allocate(1)
    allocator.exchange(ints(1, 3, 0), ints(0, 0, 0))
    assert sorted(allocator.allocate(2).tolist()) == [1, 3]


def test_a_pool_without_pages_is_refused():
    with pytest.raises(ValueError, match="at least 1 page"):
        PageAllocator(0)
