"""Block tables: which page holds each position of each row. All changes to pages go through here.

Axes: R rows of a batch, T new tokens of a batch or entries of all moves, M moves, L positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from smc.kv.pages import DUMMY_PAGE, FirstSeen, PageAllocator

RELEASE = -1


@dataclass(frozen=True)
class RowMoves:
    """`dst <- src` for M rows at once, as one simultaneous assignment (a source may itself be a destination).

    Positions below `start` are taken to be the same pages already and are not touched: a group's shared prefix costs nothing.
    """

    dst_M: np.ndarray
    """int32 rows, each at most once."""
    src_M: np.ndarray
    """int32 rows, or RELEASE: the destination gives up all its pages."""
    start_M: np.ndarray
    """int32 first position that may differ; 0 where the destination holds nothing yet or is released."""

    @staticmethod
    def release(rows: np.ndarray) -> RowMoves:
        return RowMoves(rows, np.full_like(rows, RELEASE), np.zeros_like(rows))


@dataclass(frozen=True)
class PrefixMerge:
    """M rows whose tokens agree with those of `src` on [start, end) point to the pages of `src` there: duplicates are freed."""

    dst_M: np.ndarray
    src_M: np.ndarray
    start_M: np.ndarray
    end_M: np.ndarray


class BlockTables:
    """`rows` tables of `width` positions over one allocator. Arguments are checked before anything is written."""

    def __init__(self, rows: int, width: int, capacity: int) -> None:
        self.allocator = PageAllocator(capacity)
        self.table_RL = np.zeros((rows, width), dtype=np.int32)
        self.length_R = np.zeros(rows, dtype=np.int32)
        self._seen = FirstSeen(rows)

    def extend(self, rows_R: np.ndarray, counts_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Give every row `counts` new positions. Returns (pages [T], positions [T]), row after row.

        Raises ValueError if a row or position is out of range, OutOfPages if the pool is exhausted; nothing changes then.
        """
        self._check_rows(rows_R)
        ends_R = self.length_R[rows_R] + counts_R
        if (counts_R < 0).any() or (ends_R > self.table_RL.shape[1]).any():
            raise ValueError(f"positions up to {ends_R.max()} wanted; a row holds {self.table_RL.shape[1]}")
        if not self._seen.distinct(rows_R):
            raise ValueError("a row appears twice in one extension")
        total = int(counts_R.sum())
        pages_T = self.allocator.allocate(total)
        row_T = np.repeat(rows_R, counts_R)
        offset_T = np.arange(total) - np.repeat(np.cumsum(counts_R) - counts_R, counts_R)
        position_T = self.length_R[row_T] + offset_T
        self.table_RL[row_T, position_T] = pages_T
        self.length_R[rows_R] = ends_R
        return pages_T, position_T

    def move(self, moves: RowMoves) -> None:
        """Apply `dst <- src` to tables, lengths and references. No key or value moves."""
        dst_M, src_M = moves.dst_M, moves.src_M
        if not len(dst_M):
            return
        self._check_rows(dst_M)
        self._check_rows(src_M[src_M != RELEASE])
        assert self._seen.distinct(dst_M), "a row is the destination of two moves"
        kept_M = src_M != RELEASE
        length_M = np.where(kept_M, self.length_R[src_M], 0).astype(np.int32)
        end_M = np.maximum(length_M, self.length_R[dst_M])
        self._repoint(dst_M, np.where(kept_M, src_M, dst_M), moves.start_M, end_M, kept_M)
        self.length_R[dst_M] = length_M

    def merge(self, merge: PrefixMerge) -> None:
        """Point rows at another row's pages where their tokens agree. Lengths stay."""
        if not len(merge.dst_M):
            return
        self._check_rows(merge.dst_M)
        self._check_rows(merge.src_M)
        assert self._seen.distinct(merge.dst_M), "a row is the destination of two merges"
        held_M = np.minimum(self.length_R[merge.dst_M], self.length_R[merge.src_M])
        if (merge.end_M > held_M).any():
            raise ValueError(f"a shared prefix of {merge.end_M.max()} positions reaches past what its rows hold")
        self._repoint(merge.dst_M, merge.src_M, merge.start_M, merge.end_M, np.ones(len(merge.dst_M), dtype=bool))

    def check(self) -> None:
        """The books balance: free + held = all, and each page's references equal the table entries that point to it."""
        entries = np.bincount(self.table_RL.ravel(), minlength=self.allocator.capacity + 1)
        entries[DUMMY_PAGE] = 0
        assert (entries == self.allocator.references).all(), "references differ from table entries"
        assert self.allocator.num_free + self.allocator.num_held == self.allocator.capacity, "free + held differ from all pages"
        beyond_RL = np.arange(self.table_RL.shape[1]) >= self.length_R[:, None]
        assert ((self.table_RL == DUMMY_PAGE) == beyond_RL).all(), "a row's entries differ from its length"

    def _repoint(self, dst_M: np.ndarray, src_M: np.ndarray, start_M: np.ndarray, end_M: np.ndarray, kept_M: np.ndarray) -> None:
        """Entries [start, end) of dst become those of src (the dummy page where not kept); references follow."""
        count_M = np.maximum(end_M - start_M, 0)
        move_T = np.repeat(np.arange(len(dst_M)), count_M)
        column_T = np.arange(len(move_T)) + np.repeat(start_M - np.cumsum(count_M) + count_M, count_M)
        dst_T = dst_M[move_T]
        old_T = self.table_RL[dst_T, column_T]
        new_T = self.table_RL[src_M[move_T], column_T]
        if not kept_M.all():
            new_T = np.where(kept_M[move_T], new_T, DUMMY_PAGE)
        changed_T = old_T != new_T
        if not changed_T.all():
            dst_T, column_T, old_T, new_T = dst_T[changed_T], column_T[changed_T], old_T[changed_T], new_T[changed_T]
        self.table_RL[dst_T, column_T] = new_T
        self.allocator.exchange(old_T, new_T)

    def _check_rows(self, rows: np.ndarray) -> None:
        # Read as unsigned, a negative number is a large one: one comparison finds both kinds.
        if (rows.astype(np.uint32) >= len(self.length_R)).any():
            raise ValueError(f"rows {rows.min()}..{rows.max()} given; allowed 0..{len(self.length_R) - 1}")
