"""The preparation of a pass over packed rows: the pages of new tokens, and pieces that cover every prefix exactly once.

Local axes: P pieces."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from smc.kernels.packed_rows import PassLayout, PieceShape, prepare
from smc.round.tensors import RowGroups, RowSpans, RowTables
from tests.attention.packed import DEVICE, Built, Case

group = st.tuples(st.integers(0, 90), st.lists(st.integers(0, 2), max_size=6))


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@settings(max_examples=25, deadline=None)
@given(
    groups=st.lists(group, min_size=1, max_size=5),
    heads=st.integers(1, 5),
    pieces=st.integers(1, 20),
    min_tiles=st.integers(1, 3),
    tail=st.none() | st.integers(0, 20),
    longest=st.sampled_from([7, 64, 1000]),
)
def test_pieces_cover_each_query_and_position_once(groups, heads, pieces, min_tiles, tail, longest):
    held = [[(shared + 3 * i, new) for i, new in enumerate(members)] for shared, members in groups]
    built = Built(Case([shared for shared, _ in groups], held, 2, (2, 2), 16, tail=tail))
    shape = PieceShape(heads, 16, 8, pieces, min_tiles, longest)
    prepared = prepare(built.tables(), built.spans(), 2, built.groups(), shape)
    assert torch.equal(prepared.layout.position_T.cpu(), built.position_T)
    assert torch.equal(prepared.layout.page_T.cpu(), built.page_T)
    expected = {}
    for first, size, shared in zip(built.first_G.tolist(), built.size_G.tolist(), built.shared_G.tolist()):
        live = [r for r in range(first, first + size) if built.count_R[r]]
        if live:
            reach = min(int(built.start_R[r] if tail is None else min(built.start_R[r], built.tail_R[r])) for r in live)
            expected[live[0]] = (first + size - live[0], min(shared, reach, longest))
    assert_cover(built, shape, prepared.layout, expected)


def assert_cover(built: Built, shape: PieceShape, layout: PassLayout, expected: dict[int, tuple[int, int]]) -> None:
    """Check that the pieces cover each shared prefix once. `expected` maps a group's first live row to the number of
    rows from it on, and to the number of positions that they share."""
    count, width = int(layout.pieces.count_1), built.case.queries * shape.heads
    assert count <= len(layout.pieces.slot_P)
    seen = np.zeros((built.rows * width, 100), dtype=int)
    entry_of, slots = {}, {int(built.slot_R[lead]): lead for lead in expected}
    for x, queries, slot, begin, end, entry, step in zip(*(field_P[:count].tolist() for field_P in layout.pieces[:-1])):
        lead = slots[slot]
        assert 0 < queries <= shape.block_x and begin % shape.block_p == 0
        assert step == expected[lead][0] * width
        assert lead * width <= x and x + queries <= (lead + expected[lead][0]) * width, "a tile is of one group"
        seen[x : x + queries, begin:end] += 1
        entry_of |= {(x + i, begin): entry + i for i in range(queries)}
    assert len(set(entry_of.values())) == len(entry_of), "two results would meet in the workspace"
    assert max(entry_of.values(), default=0) < shape.entries(built.rows, built.case.queries)
    wanted = np.zeros_like(seen)
    for lead, (size, shared) in expected.items():
        wanted[lead * width : (lead + size) * width, :shared] = 1
        for r in range(lead, lead + size):
            assert_row_finds_its_entries(
                [int(field_R[r]) for field_R in layout.splits], r * width, bool(built.count_R[r]), shared, entry_of
            )
    assert np.array_equal(seen, wanted)


def assert_row_finds_its_entries(
    row: list[int], x: int, live: bool, shared: int, entry_of: dict[tuple[int, int], int]
) -> None:
    found_shared, entry, step, first, splits = row
    begins = sorted(begin for query, begin in entry_of if query == x)
    assert first == 0 and splits == len(begins) * live
    if live:
        assert found_shared == shared
        assert [entry + step * split for split in range(splits)] == [entry_of[x, begin] for begin in begins]


def splits(shared: list[int], sizes: list[int], pieces: int = 16, block_p: int = 64, min_tiles: int = 1) -> list[int]:
    """Return the number of splits of each group. Rows have 32 queries each, a tile has 64."""
    rows = sum(sizes)
    first = np.cumsum([0, *sizes[:-1]])
    tables = RowTables(torch.zeros(1, 20000, dtype=torch.int32, device=DEVICE), int32(*[0] * rows))
    groups = RowGroups(int32(*np.repeat(np.arange(len(sizes)), sizes)), int32(*first), int32(*sizes), int32(*shared))
    starts = int32(*np.repeat(shared, sizes))
    shape = PieceShape(32, 64, block_p, pieces, min_tiles, 20000)
    return prepare(tables, RowSpans(starts, int32(*[1] * rows)), 1, groups, shape).layout.splits.count_R[first].tolist()


@pytest.mark.parametrize(
    ("shared", "rows", "expected"), [(16384, 2, 16), (16384, 6, 5), (16384, 20, 1), (64, 2, 1), (640, 2, 10)]
)
def test_one_group_is_cut_into_a_piece_for_every_program(shared, rows, expected):
    assert splits([shared], [rows]) == [expected]


def test_many_groups_are_cut_no_finer_than_there_are_programs():
    assert splits([4096] * 20, [2] * 20) == [1] * 20
    assert splits([4096] * 4, [2] * 4) == [4] * 4


def test_a_long_prefix_beside_short_ones_is_cut_by_its_share_of_the_work():
    found = splits([16384, 256, 256, 256], [2, 2, 2, 2])
    assert found[0] >= 15
    assert found[1:] == [1, 1, 1]


def test_ended_rows_and_small_splits():
    assert splits([0], [2]) == [0]
    assert splits([640], [2], min_tiles=4) == [3]


@pytest.mark.parametrize(
    ("tail", "pages"), [(None, [5, 6, 0]), (2, [9, 8, 0]), (3, [5, 9, 8]), (4, [5, 6, 9]), (5, [5, 6, 0])]
)
def test_no_page_is_read_beyond_a_table_or_a_tail(tail, pages):
    """The entries after the end of a table or a tail name pages of other requests."""
    table_SL, tail_RB = int32(3, 4, 5, 6, 77, 78)[None, :4], int32(9, 8, 77, 77)[None, :2]
    tails = (None, None) if tail is None else (tail_RB, int32(tail))
    groups, shape = RowGroups(int32(0), int32(0), int32(1), int32(0)), PieceShape(1, 16, 8, 1, 1, 100)
    prepared = prepare(RowTables(table_SL, int32(0), *tails), RowSpans(int32(2), int32(3)), 3, groups, shape)
    assert prepared.layout.page_T.tolist() == pages
