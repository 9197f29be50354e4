"""Conversations on disk, as rows of equal width in numbered files that are mapped into memory. Knows nothing about how
they were written or what is learnt from them.

Memory does not grow with the number of rows: a full file is written once, and rows are read where they lie. The rows
after the last full file are in memory, and in a file that is replaced whenever rows are flushed.

Axes: N rows, S token positions."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

ROWS_PER_FILE = 1024
OPEN_FILES = 64
"""Files that are mapped at the same time."""


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """A process that is killed in the middle leaves the file before. So does a full disk, which raises OSError."""
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as opened:
            write(opened)
            opened.flush()
            os.fsync(opened.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as error:  # torch raises the latter
        temporary.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written ({error}); make room on the disk and go on with --resume") from error


@dataclass(frozen=True)
class Conversation:
    """A conversation that the target wrote."""

    number: int
    """Which of all conversations of a run it is: number and seed decide everything in it."""
    temperature: float
    """Of the answers."""
    tokens: tuple[int, ...]
    is_answer: tuple[bool, ...]
    """Marks tokens that the target drew in answers, end-of-text included."""

    @property
    def answer_tokens(self) -> int:
        return sum(self.is_answer)


class ConversationStore:
    """Conversations of one process, in the order of their numbers."""

    def __init__(self, directory: Path, width: int) -> None:
        """`width`: S, tokens of the longest conversation. Opens what is there. Raises ValueError for other rows."""
        self._directory, self.width = directory, width
        self._dtype = np.dtype(
            [("number", "<i8"), ("temperature", "<f4"), ("length", "<i4"), ("tokens", "<i4", width)]
            + [("is_answer", "?", width)]
        )
        directory.mkdir(parents=True, exist_ok=True)
        self._mapped: OrderedDict[int, np.ndarray] = OrderedDict()
        files = sorted(directory.glob("[0-9]*.npy"))
        self._full = len(files)
        self._tail: list[np.void] = []
        if files and len(last := self._read(files[-1])) < ROWS_PER_FILE:
            self._full -= 1
            self._tail = list(last)
        self.tokens = 0
        """Tokens of answers in all rows."""
        self.next_number = 0
        """Number after the last stored conversation's."""
        for file in files:
            rows_N = self._read(file)
            self.tokens += int(rows_N["is_answer"].sum())
            self.next_number = int(rows_N["number"][-1]) + 1

    def __len__(self) -> int:
        return self._full * ROWS_PER_FILE + len(self._tail)

    def append(self, conversation: Conversation) -> None:
        length = len(conversation.tokens)
        assert length <= self.width and conversation.number >= self.next_number
        row_1 = np.zeros(1, self._dtype)
        row = row_1[0]
        row["number"], row["temperature"], row["length"] = conversation.number, conversation.temperature, length
        row["tokens"][:length], row["is_answer"][:length] = conversation.tokens, conversation.is_answer
        self._tail.append(row)
        self.tokens += conversation.answer_tokens
        self.next_number = conversation.number + 1
        if len(self._tail) == ROWS_PER_FILE:
            self.flush()
            self._full += 1
            self._tail = []

    def flush(self) -> None:
        """Write rows that are in memory alone. A process that is killed in the middle leaves the file before."""
        if not self._tail:
            return
        rows_N = np.array(self._tail, self._dtype)
        replace_file(self._file(self._full), lambda opened: np.save(opened, rows_N))

    def rows(self, index_N: Sequence[int]) -> np.ndarray:
        """A structured array [N] with the fields number, temperature, length, tokens [S] and is_answer [S]."""
        found_N = np.empty(len(index_N), self._dtype)
        for n, index in enumerate(index_N):
            file, row = divmod(int(index), ROWS_PER_FILE)
            found_N[n] = self._tail[row] if file == self._full else self._of_file(file)[row]
        return found_N

    def answer_counts(self, first: int, vocab: int) -> np.ndarray:
        """Occurrences of each token in the answers of the rows from `first` on, int64 [V]."""
        count_V = np.zeros(vocab, dtype=np.int64)
        for begin in range(first, len(self), ROWS_PER_FILE):
            rows_N = self.rows(range(begin, min(begin + ROWS_PER_FILE, len(self))))
            count_V += np.bincount(rows_N["tokens"][rows_N["is_answer"]], minlength=vocab)
        return count_V

    def _file(self, number: int) -> Path:
        return self._directory / f"{number:06d}.npy"

    def _of_file(self, number: int) -> np.ndarray:
        if number in self._mapped:
            self._mapped.move_to_end(number)
            return self._mapped[number]
        while len(self._mapped) >= OPEN_FILES:
            self._mapped.popitem(last=False)
        self._mapped[number] = self._read(self._file(number))
        return self._mapped[number]

    def _read(self, file: Path) -> np.ndarray:
        rows_N = np.load(file, mmap_mode="r")
        if rows_N.dtype != self._dtype:
            raise ValueError(
                f"{file}: rows of {rows_N.dtype['tokens'].shape[0]} tokens; this run needs {self.width}; "
                "give another --out, or the options of the run that wrote it"
            )
        return rows_N
