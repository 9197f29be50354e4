"""Block tables: which page holds each position of each row that runs a prompt.

Axes: R rows of a batch, T new tokens of a batch, L positions.
"""

from __future__ import annotations

import numpy as np

from smc.kv.pages import DUMMY_PAGE, PageAllocator


class BlockTables:
    """`rows` tables of `width` positions over one allocator. Arguments are checked before anything is written."""

    def __init__(self, rows: int, width: int, capacity: int) -> None:
        self.allocator = PageAllocator(capacity)
        self.table_RL = np.zeros((rows, width), dtype=np.int32)
        self.length_R = np.zeros(rows, dtype=np.int32)

    def extend(self, rows_R: np.ndarray, counts_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Give every row `counts` new positions. Returns (pages [T], positions [T]), row after row.

        Raises ValueError if a row or position is out of range, OutOfPages if the pool is exhausted; nothing changes then.
        """
        self._check_rows(rows_R)
        ends_R = self.length_R[rows_R] + counts_R
        if (counts_R < 0).any() or (ends_R > self.table_RL.shape[1]).any():
            raise ValueError(f"positions up to {ends_R.max()} wanted; a row holds {self.table_RL.shape[1]}")
        total = int(counts_R.sum())
        pages_T = self.allocator.allocate(total)
        row_T = np.repeat(rows_R, counts_R)
        offset_T = np.arange(total) - np.repeat(np.cumsum(counts_R) - counts_R, counts_R)
        position_T = self.length_R[row_T] + offset_T
        self.table_RL[row_T, position_T] = pages_T
        self.length_R[rows_R] = ends_R
        return pages_T, position_T

    def release(self, rows_R: np.ndarray) -> None:
        """The rows give up their pages. Raises ValueError if a row is out of range; nothing changes then."""
        self._check_rows(rows_R)
        for row in rows_R.tolist():
            self.allocator.free(self.table_RL[row, : self.length_R[row]])
            self.table_RL[row] = DUMMY_PAGE
            self.length_R[row] = 0

    def check(self) -> None:
        """The books balance: entries are pages that are held, each once, and no row has any beyond its length."""
        held = self.table_RL[self.table_RL != DUMMY_PAGE]
        assert len(np.unique(held)) == len(held), "a page is in two places"
        assert self.allocator.held[held].all(), "a table entry is a page that is free"
        beyond_RL = np.arange(self.table_RL.shape[1]) >= self.length_R[:, None]
        assert ((self.table_RL == DUMMY_PAGE) == beyond_RL).all(), "a row's entries differ from its length"
        self.allocator.check()

    def _check_rows(self, rows_R: np.ndarray) -> None:
        if (rows_R < 0).any() or (rows_R >= len(self.length_R)).any():
            raise ValueError(f"rows {rows_R.min()}..{rows_R.max()} given; allowed 0..{len(self.length_R) - 1}")
        if len(np.unique(rows_R)) != len(rows_R):
            raise ValueError("a row appears twice")
