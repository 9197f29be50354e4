"""Reads the answers of one request under its constraint and its bad words, and finds the library's calls that tell
which tokens may follow. For each answer a reader returns to the beginning that the answer shares with the previous one
and continues from there, so positions of a tree cost little in the right order. Knows nothing about threads and time:
`smc.constraint_masks` carries out the calls."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Generator, Sequence
from typing import NamedTuple

import llguidance
import numpy as np

from smc.arrays import common_length
from smc.bad_words import BadWords
from smc.constraints import Compiler
from smc.grammar.compiler import NO_EXTENSION
from smc.stops import StopMachine

NEVER = sys.maxsize
"""Position of a token that an answer does not contain."""
logger = logging.getLogger(__name__)


class MaskPath(NamedTuple):
    """Masks along an answer, to be written to consecutive rows."""

    answer_L: np.ndarray
    """Tokens of the answer, int64."""
    first: int
    """Number of tokens before the first mask; before each further mask there is one more."""
    row: int
    """Row of the first mask."""
    masks: int
    """Number of masks."""


class Chain(NamedTuple):
    """Masks that the library computes: at the matcher's position, and after each of these tokens up to one that is not
    allowed. The matcher then returns to its position."""

    matcher: llguidance.LLMatcher
    row: int
    tokens: list[int]


class Read(NamedTuple):
    """Let the matcher read a token. The result says whether it did; if not, the matcher can no longer be used."""

    matcher: llguidance.LLMatcher
    token: int


Calls = Generator[Chain | Read, bool, None]


class MaskEnds:
    """Collects what is written after the library has computed its masks, for all rows at once: whether answers may end,
    bad words, and masks copied from other rows."""

    def __init__(self, compiler: Compiler, masks_RW: np.ndarray) -> None:
        self._vocab, self._eos_ids, self.masks_RW = compiler.vocab, compiler.eos_ids, masks_RW
        self.computed: list[range] = []
        """Rows computed by the library, which reports by an additional token whether the answer may end."""
        self.open: list[range] = []
        """Rows of answers that must not end."""
        self.complete: list[range] = []
        """Rows of answers that may only end."""
        self.copies: list[tuple[int, int, int]] = []
        """First row, number of rows, and first row to copy from, which may be a copy itself."""
        self.bad_words: list[tuple[AnswerReader, MaskPath, range]] = []
        """Rows of a path from which bad words are removed."""

    def allows(self, row: int, token: int) -> bool:
        """Whether the library's mask in a row allows a token."""
        return bool(self.masks_RW[row, token // 32] >> token % 32 & 1)

    def write(self) -> None:
        masks_RW = self.masks_RW
        words_RW = masks_RW.view(np.uint32)
        computed, complete = _flat(self.computed), _flat(self.complete)
        may_end = words_RW[computed, self._vocab // 32] >> (self._vocab % 32) & 1
        words_RW[complete] = 0
        for row_R, is_allowed in ((computed, may_end), (_flat(self.open), 0), (complete, 1)):
            for token in self._eos_ids.tolist() if len(row_R) else ():
                word, bit = token // 32, np.uint32(1 << token % 32)
                held_R = words_RW[row_R, word]
                words_RW[row_R, word] = np.where(is_allowed, held_R | bit, held_R & ~bit)
        for reader, path, rows in self.bad_words:
            reader.take_out(path, rows, masks_RW)
        for row, count, source in self.copies:
            masks_RW[row : row + count] = masks_RW[source : source + count]


def _flat(ranges: list[range]) -> np.ndarray:
    """All rows of the ranges, int64."""
    return np.fromiter(itertools.chain.from_iterable(ranges), np.int64)


class AnswerReader:
    """Reads answers to one request, and finds the library's calls that tell which tokens may follow."""

    def __init__(self, start: llguidance.LLMatcher | None, machine: StopMachine, compiler: Compiler) -> None:
        """`start`: matcher of the constraint at its beginning, shared with other readers; None without a
        constraint."""
        self._start = start
        self._bad_words = BadWords.of(machine.bad_words, compiler.token_bytes) if machine.bad_words else None
        self._after = None if machine.constraint is None else machine.constraint.after
        self._vocab, self._eos_ids = compiler.vocab, frozenset(compiler.eos_ids.tolist())
        self.failure: str | None = None
        """Why the constraint cannot be followed any further."""
        self.accepts = True
        """After `read_all`: whether the answer may end."""
        self._matcher = None if start is None else start.deep_copy()
        self._answer_L = np.zeros(0, dtype=np.int64)
        """Tokens of the last answer."""
        self._begin = 0 if self._after is None else NEVER
        """Number of its tokens before the constrained text."""
        self._end = NEVER
        """Number of its tokens before the first token that ends the text."""
        self._held = 0
        """Number of tokens of its text that the matcher has read."""
        self._refused = NEVER
        """Number of its tokens before the first one that is known not to be allowed."""

    def walk(self, paths: Sequence[MaskPath], ends: MaskEnds, scratch: int) -> Calls:
        """Yield the calls of the library, and record in `ends` what else is to be written. Answers are sorted so that
        those with equal beginnings are neighbours: masks after common tokens are computed once. `scratch`: a row that
        may be written."""
        before: MaskPath | None = None
        for path in sorted(paths, key=lambda path: path.answer_L.tobytes()) if len(paths) > 1 else paths:
            same = self._take(path.answer_L)
            copied = 0 if before is None else self._copied(before, path, same)
            if before is not None and copied:
                ends.copies.append((path.row, copied, before.row + path.first - before.first))
            if self._bad_words is not None:
                ends.bad_words.append((self, path, range(path.row + copied, path.row + path.masks)))
            before = path
            if self._matcher is not None and copied < path.masks:
                yield from self._compute(self._matcher, path, copied, ends, scratch)
                if self.failure is not None:
                    return

    def read_all(self, answer_L: np.ndarray, ends: MaskEnds) -> Calls:
        """Yield the calls that read a whole answer, and set `accepts`."""
        self._take(answer_L[~np.isin(answer_L, list(self._eos_ids))])
        if self._matcher is None:
            return
        size = len(self._answer_L)
        is_read = self._begin <= size and (yield from self._read(size, ends, 0))
        self.accepts = is_read and self._matcher.is_accepting()

    def _copied(self, before: MaskPath, path: MaskPath, same: int) -> int:
        """Number of leading masks of a path that equal those of the path before. `same`: tokens common to their
        answers."""
        first = path.first
        if before.first > first:
            return 0
        last = min(same, before.first + before.masks - 1, first + path.masks - 1)
        if before.first < first:
            # Masks after the end depend on where a path begins, if its text is not allowed.
            last = min(last, self._end)
        return max(last - first + 1, 0)

    def _compute(
        self, matcher: llguidance.LLMatcher, path: MaskPath, copied: int, ends: MaskEnds, scratch: int
    ) -> Calls:
        """Yield the calls for the masks of a path that are not copied."""
        answer_L, first, row, count = path
        begin, end, shift = self._begin, min(self._end, len(answer_L)), row - first
        after, last = first + copied, first + count - 1
        if after < begin:
            ends.open.append(range(after + shift, min(begin, last + 1) + shift))
            after = begin
        until = min(last, end)
        if after <= until:
            if not (yield from self._read(after, ends, scratch)):
                return
            tokens = answer_L[after:until].tolist()
            assert self._matcher is not None, "read just now"
            yield Chain(self._matcher, after + shift, tokens)
            if self._matcher.is_error():
                self._fail(self._matcher)
                return
            ends.computed.append(range(after + shift, until + 1 + shift))
            refused = (i for i, token in enumerate(tokens, after) if not ends.allows(i + shift, token))
            self._refused = min(self._refused, next(refused, NEVER))
            after = until + 1
        if after <= last and (first > end or (yield from self._read(end, ends, scratch))):
            ends.complete.append(range(after + shift, last + 1 + shift))

    def take_out(self, path: MaskPath, rows: range, masks_RW: np.ndarray) -> None:
        """Forbid tokens that would complete a bad word, unless the constraint then allows no token at all."""
        assert self._bad_words is not None, "called only with bad words"
        bad, size = self._bad_words, path.first + rows.start - path.row
        answer = path.answer_L.tolist()
        state, is_free = bad.state_after(answer[:size])
        for row in rows:
            self._forbid(bad.forbidden(state), masks_RW[row])
            if row + 1 < rows.stop:
                if is_free:
                    state, is_free = bad.next_state(state, answer[size])
                size += 1
                if not is_free:
                    state, is_free = bad.state_after(answer[:size])

    def _forbid(self, forbidden_W: np.ndarray, mask_W: np.ndarray) -> None:
        bits_W = mask_W.view(np.uint32)
        left_W = bits_W & ~forbidden_W
        last = left_W[-1] & np.uint32((1 << self._vocab % 32) - 1)  # without the library's own end token
        if left_W[:-1].any() or last:
            bits_W[:] = left_W

    def _take(self, answer_L: np.ndarray) -> int:
        """Switch to another answer, and go back to the tokens that it shares with the last one. Return their number."""
        same = common_length(self._answer_L, answer_L)
        self._answer_L = answer_L
        new = answer_L[same:].tolist()
        if self._after is not None and self._begin > same:
            self._begin = same + new.index(self._after) + 1 if self._after in new else NEVER
        if self._end >= same:
            ended = (t for t, token in enumerate(new, same) if token in self._eos_ids and t >= self._begin)
            self._end = next(ended, NEVER)
        if self._refused >= same:
            self._refused = NEVER
        if self._held > max(same - self._begin, 0):
            self._go_back(max(same - self._begin, 0))
        return same

    def _read(self, size: int, ends: MaskEnds, scratch: int) -> Generator[Chain | Read, bool, bool]:
        """Move the matcher to the position after `size` tokens of the answer. Return whether the text is allowed so
        far."""
        if size > self._refused:
            return False
        size -= self._begin
        if size < self._held:
            self._go_back(size)
        for token in self._answer_L[self._begin + self._held : self._begin + size].tolist():
            assert self._matcher is not None, "a constraint that has not failed"
            if not (yield Read(self._matcher, token)):
                yield from self._explain(token, ends, scratch)
                return False
            self._held += 1
        return True

    def _explain(self, token: int, ends: MaskEnds, scratch: int) -> Calls:
        """Find out why the matcher did not read a token: it is not allowed there, or the constraint has failed. A
        matcher that has not read a token is of no further use, so another one reads the tokens before it."""
        assert self._start is not None and self._matcher is not None, "a constraint that has not failed"
        broken, self._matcher = self._matcher, self._start.deep_copy()
        for earlier in self._answer_L[self._begin : self._begin + self._held].tolist():
            if not (yield Read(self._matcher, earlier)):
                self._fail(self._matcher)
                return
        yield Chain(self._matcher, scratch, [])
        if self._matcher.is_error():
            self._fail(self._matcher)
        elif token < self._vocab and ends.allows(scratch, token):
            self._fail(broken)
        else:
            self._refused = self._begin + self._held

    def _fail(self, matcher: llguidance.LLMatcher) -> None:
        self.failure, self._matcher = _reason(matcher.get_error(), len(self._answer_L)), None

    def _go_back(self, held: int) -> None:
        assert self._matcher is not None, "a constraint that has not failed"
        self._matcher.rollback(self._held - held)
        self._held = held


def _reason(error: str, size: int) -> str:
    """Return why a constraint failed at an answer of `size` tokens, from the library's message."""
    if error.startswith(NO_EXTENSION):
        return f"allows nothing after {size} tokens of the answer; change it so that each alternative can be completed"
    logger.info("a constraint failed after %d tokens: %s", size, error.partition("\n")[0])
    why = "allows too many alternatives" if "items" in error else "became too complex to be followed"
    return f"{why} after {size} tokens of the answer; simplify it"
