"""Constraints over tokens: which tokens may follow, by the library llguidance, which is imported here alone.

A `Follower` reads the tokens of answers to one request. It goes back to what the next answer has in common with the one
before and reads on from there, so positions of a tree cost little when they come in order. Knows nothing about models,
slots and rounds.

Axes: L tokens of an answer, W words of 32 tokens each, R rows."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import llguidance
import numpy as np

from smc.api.constraint import Constraint
from smc.stops import StopMachine, TokenBytes

LIMITS = llguidance.LLParserLimits(verbose_errors=False)
"""Otherwise the library's own: a million steps of regular expressions, half a million symbols, 50,000 items a mask."""
WHITESPACE = r"\x20|\x0A[\x20\x09]{0,40}"
"""Between tokens of JSON, at most: a space, or a line end and an indentation. Small models write blanks for ever where
they may. A schema can say otherwise (`x-guidance`)."""
MOST_KEPT = 256
"""Compiled constraints, those used last."""
MOST_COMPILED = 2.0
"""Seconds that compiling may take. The library counts steps, not seconds, so this is seen afterwards."""


class CompilerCounts:
    """What a compiler has done since the last `take`."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._hits = 0

    def count(self, seconds: float | None) -> None:
        """A constraint was asked for: compiled in so many seconds, or kept already (None)."""
        if seconds is None:
            self._hits += 1
        else:
            self._seconds.append(seconds)

    def take(self) -> tuple[list[float], int]:
        """Seconds of every constraint that was compiled, and how many were kept already."""
        found, self._seconds, self._hits = (self._seconds, self._hits), [], 0
        return found


class Compiler:
    """Compiles constraints for one vocabulary, and keeps them. Several threads may use it."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes
        self.vocab = len(token_bytes.offset_V) - 1
        self.counts = CompilerCounts()
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, str], llguidance.LLMatcher | str] = OrderedDict()

    @staticmethod
    @lru_cache(maxsize=4)
    def of(token_bytes: TokenBytes) -> Compiler:
        return Compiler(token_bytes)

    @property
    def words(self) -> int:
        """W: words of a mask, with a bit after the vocabulary's own for the end."""
        return self.vocab // 32 + 1

    @property
    def eos_ids(self) -> np.ndarray:
        """int64 tokens that end an answer."""
        return np.array(self._bytes.eos_ids, dtype=np.int64)

    def check(self, constraint: Constraint) -> None:
        """Compile it. Raises ValueError, in the library's own words where it is the library that refuses it."""
        self._start(constraint)

    def warm(self) -> None:
        """Read the vocabulary, which takes half a second for 50,000 tokens."""
        with self._lock:
            self._vocabulary()

    def follower(self, machine: StopMachine) -> Follower:
        """Reads answers from their beginning. Raises ValueError."""
        return Follower(machine, None if machine.constraint is None else self._start(machine.constraint), self)

    def _start(self, constraint: Constraint) -> llguidance.LLMatcher:
        """The constraint at its beginning; others have it, too."""
        if not len(self._bytes.data_B):
            raise ValueError("constraint is given, but the model's tokens stand for no text; leave it out")
        if not self._bytes.eos_ids:
            raise ValueError("constraint is given, but the model has no token that ends texts; leave it out")
        if constraint.after is not None and constraint.after >= self.vocab:
            raise ValueError(f"constraint: after={constraint.after}; allowed: 0..{self.vocab - 1}")
        with self._lock:
            matcher = self._compiled(constraint)
        if isinstance(matcher, str):
            raise ValueError(f"constraint: the {constraint.kind} is refused: {matcher}")
        return matcher

    def _compiled(self, constraint: Constraint) -> llguidance.LLMatcher | str:
        """At its beginning, or why it is refused."""
        key = (constraint.kind, constraint.text)
        if key in self._kept:
            self._kept.move_to_end(key)
            self.counts.count(None)
            return self._kept[key]
        vocabulary, begin = self._vocabulary(), time.perf_counter()
        found: llguidance.LLMatcher | str
        try:
            # Without the interpreter's lock, as long as it takes.
            found = llguidance.LLMatcher(vocabulary, _grammar(constraint), log_level=0, limits=LIMITS)
            if found.is_error():
                found = found.get_error().strip()
        except ValueError as error:
            found = str(error)
        seconds = time.perf_counter() - begin
        if seconds > MOST_COMPILED:
            found = f"it took {seconds:.1f} s to compile, more than {MOST_COMPILED:g} s"
        self.counts.count(seconds)
        while len(self._kept) >= MOST_KEPT:
            self._kept.popitem(last=False)
        self._kept[key] = found
        return found

    def _vocabulary(self) -> llguidance.LLTokenizer:
        if self._tokenizer is None:
            # One token more than there are is the end: a model may have several that end texts.
            wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._bytes))
            self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=self.vocab + 1, eos_token=self.vocab)
        return self._tokenizer


class Follower:
    """Reads answers to one request, and says which tokens may follow."""

    def __init__(self, machine: StopMachine, matcher: llguidance.LLMatcher | None, compiler: Compiler) -> None:
        """`matcher`: of the constraint, at its beginning; others have it, too."""
        self._start, self._bad_words = matcher, machine.bad_words
        self._after = None if machine.constraint is None else machine.constraint.after
        self._matcher = None if matcher is None else matcher.deep_copy()
        self._vocab, self._words, self._eos_ids = compiler.vocab, compiler.words, compiler.eos_ids
        self._text_L = np.zeros(0, dtype=np.int64)
        """What it has read."""

    def masks(self, answer_L: np.ndarray, first: int, masks_RW: np.ndarray) -> None:
        """Write masks, int32 in a contiguous array: row r, of what may come after the answer's first `first + r` tokens.
        One of all tokens where the answer is none that the constraint allows, so that nothing may depend on it; one of
        no token where the library has reached a limit."""
        masks_RW[:] = -1
        if self._matcher is not None:
            self._masks(self._matcher, answer_L, first, masks_RW)
        for row, mask_W in enumerate(masks_RW):
            self._take_out(answer_L[: first + row], mask_W)

    def _masks(self, matcher: llguidance.LLMatcher, answer_L: np.ndarray, first: int, masks_RW: np.ndarray) -> None:
        """Of the constraint."""
        begin = self._begin(answer_L)
        over = (answer_L[begin:, None] == self._eos_ids).any(-1).nonzero()[0]
        end = begin + int(over[0]) if len(over) else len(answer_L)
        for row, size in enumerate(range(first, first + len(masks_RW))):
            if size < begin:  # reasons, and does not end so
                _set(masks_RW[row], self._eos_ids, False)
            elif size > end:  # is complete, and shorter than it was to be
                masks_RW[row] = 0
                _set(masks_RW[row], self._eos_ids, True)
            elif not self._read(matcher, answer_L[begin:size]):
                break
            else:
                # A grammar that is complete allows the end alone.
                matcher.unsafe_compute_mask_ptr(masks_RW[row].ctypes.data, 4 * self._words)
                may_end = bool(masks_RW[row, self._vocab // 32] >> (self._vocab % 32) & 1)
                _set(masks_RW[row], self._eos_ids, may_end)
        if matcher.is_error():
            masks_RW[:] = 0
            assert self._start is not None, "of a constraint"
            self._matcher, self._text_L = self._start.deep_copy(), self._text_L[:0]

    def _take_out(self, answer_L: np.ndarray, mask_W: np.ndarray) -> None:
        """Tokens that would complete a bad word, unless nothing were left of what the constraint allows."""
        bad = [
            word[-1]
            for word in self._bad_words
            if len(word) - 1 <= len(answer_L) and tuple(answer_L[len(answer_L) - len(word) + 1 :].tolist()) == word[:-1]
        ]
        if bad:
            before_W = mask_W.copy()
            _set(mask_W, np.array(bad), False)
            last_W = mask_W.copy()
            last_W[-1] &= (1 << self._vocab % 32) - 1  # the library's own end is no token
            if not last_W.any():
                mask_W[:] = before_W

    def _begin(self, answer_L: np.ndarray) -> int:
        """Tokens of the answer before the text; more than there are where it has not begun."""
        if self._after is None:
            return 0
        (found,) = np.nonzero(answer_L == self._after)
        return int(found[0]) + 1 if len(found) else len(answer_L) + 1

    def _read(self, matcher: llguidance.LLMatcher, text_L: np.ndarray) -> bool:
        """Read a text, from what it has in common with the last one; whether it is allowed so far."""
        last_L = self._text_L
        size = min(len(last_L), len(text_L))
        (different,) = np.nonzero(last_L[:size] != text_L[:size])
        same = int(different[0]) if len(different) else size
        if same < len(last_L):
            matcher.rollback(len(last_L) - same)
        new = text_L[same:].tolist()
        count = matcher.try_consume_tokens(new) if new else 0
        self._text_L = text_L[: same + count].copy()
        return count == len(new)

    def ends(self, answer_L: np.ndarray) -> bool:
        """Whether an answer may end so. What ends it may be in it."""
        answer_L = answer_L[~np.isin(answer_L, self._eos_ids)]
        begin = self._begin(answer_L)
        if self._matcher is None:
            return True
        return begin <= len(answer_L) and self._read(self._matcher, answer_L[begin:]) and self._matcher.is_accepting()


def _set(mask_W: np.ndarray, ids: np.ndarray, allowed: bool) -> None:
    bits_W = mask_W.view(np.uint32)
    for token in ids.tolist():
        bit = np.uint32(1 << token % 32)
        bits_W[token // 32] = bits_W[token // 32] | bit if allowed else bits_W[token // 32] & ~bit


def _grammar(constraint: Constraint) -> str:
    """In the library's form. Raises ValueError."""
    if constraint.kind in ("json_object", "json_schema"):
        schema = constraint.text or '{"type": "object"}'
        has_own = '"x-guidance"' in schema
        return llguidance.LLMatcher.grammar_from_json_schema(
            schema, defaults=None if has_own else {"whitespace_pattern": WHITESPACE}
        )
    if constraint.kind == "choice":
        return llguidance.grammar_from("choice", json.dumps(constraint.choices))
    if constraint.kind == "regex":
        return llguidance.grammar_from("regex", constraint.text)
    return llguidance.grammar_from("grammar", constraint.text)


class _Vocabulary:
    """As llguidance reads one."""

    bos_token_id = None

    def __init__(self, token_bytes: TokenBytes) -> None:
        offset_V, data = token_bytes.offset_V.tolist(), token_bytes.data_B.tobytes()
        self.eos_token_id = len(offset_V) - 1
        tokens = [data[begin:end] for begin, end in pairwise(offset_V)]
        # What stands for no text, and what ends an answer, is in no text.
        special = {token for token, text in enumerate(tokens) if not text} | set(token_bytes.eos_ids)
        self.special_token_ids = [*sorted(special), self.eos_token_id]
        self.tokens = [f"<{token}>".encode() if token in special else text for token, text in enumerate(tokens)]
        self.tokens.append(b"<end>")
        self._ids = {text: token for token, text in reversed(list(enumerate(tokens))) if token not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text, the longest first. The library asks for those of texts that a grammar forces; masks do not
        depend on them."""
        return list(self._split(text))

    def _split(self, text: bytes) -> Iterator[int]:
        while text:
            sizes = range(min(self._longest, len(text)), 0, -1)
            size = next((size for size in sizes if text[:size] in self._ids), None)
            if size is not None:
                yield self._ids[text[:size]]
            text = text[size or 1 :]
