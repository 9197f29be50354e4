"""Constraints over tokens: computes which tokens may follow, with the library llguidance, which only this
file and `smc.grammar.compiler` import.

A `Follower` reads the tokens of answers to one request. For each answer it returns to the beginning that the answer
shares with the previous one and continues from there, so positions of a tree cost little in the right order. Knows
nothing about models, slots and rounds.

Axes: L tokens of an answer, W words of 32 tokens each, R rows."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import NamedTuple

import llguidance
import numpy as np

from smc.api.constraint import Constraint, ConstraintRefused
from smc.bad_words import BadWords
from smc.grammar.compiler import LIMITS, NotCompiled, compiled
from smc.stops import StopMachine, TokenBytes

MOST_KEPT = 256
"""Maximum number of compiled constraints that are kept: the most recently used ones."""
MOST_THREADS = 4
"""Maximum number of threads that compute masks."""
NEVER = sys.maxsize
"""Position of a token that an answer does not contain."""
MOST_COMPILED = 2.0
"""Maximum seconds for compiling. The library counts steps, not seconds, so the limit is checked afterwards."""


class Compiler:
    """Compiles constraints for one vocabulary, and caches them. Thread-safe."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self.token_bytes = token_bytes
        self.vocab = len(token_bytes.offset_V) - 1
        self._seconds: list[float] = []
        self._hits = 0
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, str], llguidance.LLMatcher | NotCompiled] = OrderedDict()

    @staticmethod
    @lru_cache(maxsize=4)
    def of(token_bytes: TokenBytes) -> Compiler:
        return Compiler(token_bytes)

    @property
    def words(self) -> int:
        """W, the number of words of a mask. The bit after those of the vocabulary stands for the end of the answer."""
        return self.vocab // 32 + 1

    @property
    def eos_ids(self) -> np.ndarray:
        """Tokens that end an answer, int64."""
        return np.array(self.token_bytes.eos_ids, dtype=np.int64)

    def check(self, constraint: Constraint) -> None:
        """Compile a constraint. Raises ConstraintRefused."""
        self._start(constraint)

    def warm(self) -> None:
        """Read the vocabulary, which takes half a second for 50,000 tokens."""
        with self._lock:
            self._vocabulary()

    def take_counts(self) -> tuple[list[float], int]:
        """Return the seconds of every constraint that was compiled since the last call, and how many were cached."""
        found, self._seconds, self._hits = (self._seconds, self._hits), [], 0
        return found

    def follower(self, machine: StopMachine) -> Follower:
        """Return a follower that reads answers from their beginning. Raises ConstraintRefused."""
        return Follower(machine, None if machine.constraint is None else self._start(machine.constraint), self)

    def write_masks(self, needed: Iterable[tuple[Follower, Sequence[MaskPath]]], masks_RW: np.ndarray) -> None:
        """Write the masks of several requests, int32, into a contiguous array. Rows without a mask allow all tokens, as
        do rows after an answer that violates the constraint; nothing may depend on the latter. If the library reaches a
        limit, all rows of the path allow no token."""
        masks_RW[:] = -1
        ends = _MaskEnds(self)
        walks = [follower.walk(paths, ends) for follower, paths in needed]
        # Compute one chain of every request at a time, without holding the interpreter's lock.
        address, size = masks_RW.ctypes.data, 4 * self.words
        while walks:
            found = [(walk, next(walk, None)) for walk in walks]
            walks = [walk for walk, chain in found if chain is not None]
            chains = [chain for _, chain in found if chain is not None]
            single = [(chain.matcher, chain.row) for chain in chains if not chain.tokens]
            longer = [(chain.matcher, chain.row, chain.tokens) for chain in chains if chain.tokens]
            if single:
                _executor().unsafe_compute_mask_ptr(single, address, size, len(masks_RW))
            if longer:
                _executor().unsafe_compute_mask_ptr_with_draft_token(longer, address, size, len(masks_RW))
        ends.write(masks_RW)

    def _start(self, constraint: Constraint) -> llguidance.LLMatcher:
        """Return the matcher of a constraint at its beginning. It is shared: copy it before use."""
        if not len(self.token_bytes.data_B):
            raise constraint.refused("the model's tokens stand for no text; leave it out")
        if not self.token_bytes.eos_ids:
            raise constraint.refused("the model has no token that ends texts; leave it out")
        if constraint.after is not None and constraint.after >= self.vocab:
            raise ConstraintRefused(f"after={constraint.after}; allowed: 0..{self.vocab - 1}")
        with self._lock:
            found = self._compiled(constraint)
        if isinstance(found, NotCompiled):
            raise constraint.refused(found.why, found.rule) from found
        return found

    def _compiled(self, constraint: Constraint) -> llguidance.LLMatcher | NotCompiled:
        """Return the constraint's matcher at its beginning, or why it is refused."""
        key = (constraint.kind, constraint.text)
        if key in self._kept:
            self._kept.move_to_end(key)
            self._hits += 1
            return self._kept[key]
        vocabulary, begin = self._vocabulary(), time.perf_counter()
        found: llguidance.LLMatcher | NotCompiled
        try:
            # The library releases the interpreter's lock meanwhile.
            found = compiled(constraint, vocabulary, LIMITS)
        except NotCompiled as error:
            found = error
        seconds = time.perf_counter() - begin
        if seconds > MOST_COMPILED:
            found = NotCompiled(f"it took {seconds:.1f} s to compile, more than {MOST_COMPILED:g} s")
        self._seconds.append(seconds)
        while len(self._kept) >= MOST_KEPT:
            self._kept.popitem(last=False)
        self._kept[key] = found
        return found

    def _vocabulary(self) -> llguidance.LLTokenizer:
        if self._tokenizer is None:
            # An additional token stands for the end, because a model may have several tokens that end texts.
            wrapper = llguidance.TokenizerWrapper(_Vocabulary(self.token_bytes))
            self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=self.vocab + 1, eos_token=self.vocab)
        return self._tokenizer


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


class _Chain(NamedTuple):
    """Masks that the library computes in one call: at the matcher's position, and after each of these tokens. The
    matcher then returns to its position."""

    matcher: llguidance.LLMatcher
    row: int
    tokens: list[int]


class _MaskEnds:
    """Collects what is written after the library has computed its masks, for all rows at once: whether answers may end,
    bad words, and masks copied from other rows."""

    def __init__(self, compiler: Compiler) -> None:
        self._vocab, self._eos_ids = compiler.vocab, compiler.eos_ids
        self.computed: list[range] = []
        """Rows computed by the library, which reports by an additional token whether the answer may end."""
        self.open: list[range] = []
        """Rows of answers that must not end."""
        self.complete: list[range] = []
        """Rows of answers that may only end."""
        self.failed: list[range] = []
        """Rows in which nothing is allowed."""
        self.copies: list[tuple[int, int, int]] = []
        """First row, number of rows, and first row to copy from, which may be a copy itself."""
        self.bad_words: list[tuple[Follower, MaskPath, range]] = []
        """Rows of a path from which bad words are removed."""

    def write(self, masks_RW: np.ndarray) -> None:
        words_RW = masks_RW.view(np.uint32)
        computed, complete = _flat(self.computed), _flat(self.complete)
        may_end = words_RW[computed, self._vocab // 32] >> (self._vocab % 32) & 1
        words_RW[complete] = 0
        for row_R, is_allowed in ((computed, may_end), (_flat(self.open), 0), (complete, 1)):
            for token in self._eos_ids.tolist() if len(row_R) else ():
                word, bit = token // 32, np.uint32(1 << token % 32)
                held_R = words_RW[row_R, word]
                words_RW[row_R, word] = np.where(is_allowed, held_R | bit, held_R & ~bit)
        for follower, path, rows in self.bad_words:
            follower.take_out(path, rows, masks_RW)
        for row, count, source in self.copies:
            masks_RW[row : row + count] = masks_RW[source : source + count]
        for failed in self.failed:
            masks_RW[failed.start : failed.stop] = 0


def _flat(ranges: list[range]) -> np.ndarray:
    """All rows of the ranges, int64."""
    return np.fromiter(itertools.chain.from_iterable(ranges), np.int64)


class Follower:
    """Reads answers to one request, and computes which tokens may follow."""

    def __init__(self, machine: StopMachine, matcher: llguidance.LLMatcher | None, compiler: Compiler) -> None:
        """`matcher`: that of the constraint at its beginning, shared with other followers; None without a
        constraint."""
        self._start = matcher
        self._bad_words = BadWords.of(machine.bad_words, compiler.token_bytes) if machine.bad_words else None
        self._after = None if machine.constraint is None else machine.constraint.after
        self._compiler, self._eos_ids = compiler, frozenset(compiler.eos_ids.tolist())
        self._reset()

    def _reset(self) -> None:
        self._matcher = None if self._start is None else self._start.deep_copy()
        self._answer_L = np.zeros(0, dtype=np.int64)
        """Tokens of the last answer."""
        self._begin = 0 if self._after is None else NEVER
        """Number of its tokens before the constrained text."""
        self._end = NEVER
        """Number of its tokens before the first token that ends the text."""
        self._held = 0
        """Number of tokens of its text that the matcher has read."""

    def masks(self, answer_L: np.ndarray, first: int, masks_RW: np.ndarray) -> None:
        """Write masks as `Compiler.write_masks` does: row r for the token after the answer's first `first + r`
        tokens."""
        self._compiler.write_masks([(self, [MaskPath(answer_L, first, 0, len(masks_RW))])], masks_RW)

    def walk(self, paths: Sequence[MaskPath], ends: _MaskEnds) -> Iterator[_Chain]:
        """Yield the chains that the library has to compute, and record in `ends` what else is to be written. Answers
        are sorted so that those with equal beginnings are neighbours: masks after common tokens are computed once."""
        before: MaskPath | None = None
        for path in sorted(paths, key=lambda path: path.answer_L.tobytes()) if len(paths) > 1 else paths:
            same = self._take(path.answer_L)
            copied = 0 if before is None else self._copied(before, path, same)
            if before is not None and copied:
                ends.copies.append((path.row, copied, before.row + path.first - before.first))
            if self._bad_words is not None:
                ends.bad_words.append((self, path, range(path.row + copied, path.row + path.masks)))
            before = path
            if self._matcher is not None:
                if copied < path.masks:
                    yield from self._compute(self._matcher, path, copied, ends)
                if self._matcher.is_error():
                    ends.failed.append(range(path.row, path.row + path.masks))
                    self._reset()
                    before = None

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

    def _compute(self, matcher: llguidance.LLMatcher, path: MaskPath, copied: int, ends: _MaskEnds) -> Iterator[_Chain]:
        """Yield the chains for the masks of a path that are not copied."""
        answer_L, first, row, count = path
        begin, end, shift = self._begin, min(self._end, len(answer_L)), row - first
        after, last = first + copied, first + count - 1
        if after < begin:
            ends.open.append(range(after + shift, min(begin, last + 1) + shift))
            after = begin
        until = min(last, end)
        if after <= until:
            if not self._read(matcher, after):
                return
            ends.computed.append(range(after + shift, until + 1 + shift))
            yield _Chain(matcher, after + shift, answer_L[after:until].tolist())
            after = until + 1
        if after <= last and (first > end or self._read(matcher, end)):
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
        last = left_W[-1] & np.uint32((1 << self._compiler.vocab % 32) - 1)  # without the library's own end token
        if left_W[:-1].any() or last:
            bits_W[:] = left_W

    def _take(self, answer_L: np.ndarray) -> int:
        """Switch to another answer, and go back to the tokens that it shares with the last one. Return their number."""
        last_L = self._answer_L
        size = min(len(last_L), len(answer_L))
        differs_L = last_L[:size] != answer_L[:size]
        same = int(differs_L.argmax()) if size else 0
        if size and not differs_L[same]:
            same = size
        self._answer_L = answer_L
        new = answer_L[same:].tolist()
        if self._after is not None and self._begin > same:
            self._begin = same + new.index(self._after) + 1 if self._after in new else NEVER
        if self._end >= same:
            ended = (t for t, token in enumerate(new, same) if token in self._eos_ids and t >= self._begin)
            self._end = next(ended, NEVER)
        if self._matcher is not None and self._held > max(same - self._begin, 0):
            self._go_back(self._matcher, max(same - self._begin, 0))
        return same

    def _read(self, matcher: llguidance.LLMatcher, size: int) -> bool:
        """Move the matcher to the position after `size` tokens of the answer. Return whether the text is allowed so
        far."""
        size -= self._begin
        if size < self._held:
            self._go_back(matcher, size)
        new = self._answer_L[self._begin + self._held : self._begin + size].tolist()
        count = matcher.try_consume_tokens(new) if new else 0
        self._held += count
        return count == len(new)

    def _go_back(self, matcher: llguidance.LLMatcher, held: int) -> None:
        matcher.rollback(self._held - held)
        self._held = held

    def ends(self, answer_L: np.ndarray) -> bool:
        """Return whether an answer may end here. It may include the token that ends it."""
        self._take(answer_L[~np.isin(answer_L, list(self._eos_ids))])
        if self._matcher is None:
            return True
        size = len(self._answer_L)
        return self._begin <= size and self._read(self._matcher, size) and self._matcher.is_accepting()


@cache
def _executor() -> llguidance.LLExecutor:
    """Threads that compute masks; they sleep between rounds. Half of the cores are left to other work."""
    return llguidance.LLExecutor(max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // 2)))


class _Vocabulary:
    """The vocabulary in the form that llguidance reads."""

    bos_token_id = None

    def __init__(self, token_bytes: TokenBytes) -> None:
        offset_V, data = token_bytes.offset_V.tolist(), token_bytes.data_B.tobytes()
        self.eos_token_id = len(offset_V) - 1
        tokens = [data[begin:end] for begin, end in pairwise(offset_V)]
        # Tokens without text, and tokens that end answers, occur in no text.
        special = {token for token, text in enumerate(tokens) if not text} | set(token_bytes.eos_ids)
        self.special_token_ids = [*sorted(special), self.eos_token_id]
        self.tokens = [f"<{token}>".encode() if token in special else text for token, text in enumerate(tokens)]
        self.tokens.append(b"<end>")
        self._ids = {text: token for token, text in reversed(list(enumerate(tokens))) if token not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """Split a text into tokens, longest first. The library uses this for texts that a grammar forces; masks do not
        depend on it."""
        return list(self._split(text))

    def _split(self, text: bytes) -> Iterator[int]:
        while text:
            sizes = range(min(self._longest, len(text)), 0, -1)
            size = next((size for size in sizes if text[:size] in self._ids), None)
            if size is not None:
                yield self._ids[text[:size]]
            text = text[size or 1 :]
