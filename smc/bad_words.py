"""Texts that an answer must not contain, whatever tokens they are written with: finds the tokens that would complete
one, from the bytes of the answer so far. Knows nothing about constraints and rounds.

The texts are read by a machine of Aho and Corasick (`smc.stops`). After every answer, most tokens lead where they lead
from its first state; only those whose first byte continues a text are read again.

Local axes: P bytes, U tokens that have bytes, Y states of the machine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from smc.stops import DONE, START, TokenBytes, byte_machine

MOST_STATES = 256
"""Maximum number of states whose masks are kept."""


class BadWords:
    """The bad words of a request. Instances are shared by all followers of equal words."""

    def __init__(self, words: tuple[bytes, ...], token_bytes: TokenBytes) -> None:
        self._next_YP, self._bytes = byte_machine(words), token_bytes
        self._longest = max(map(len, words))
        size_V = np.diff(token_bytes.offset_V)
        self._sized_U = np.flatnonzero(size_V)
        """Tokens that have bytes."""
        self._first_U = token_bytes.data_P[token_bytes.offset_V[self._sized_U]]
        """Their first bytes."""
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()
        self._at_start_U = self._completing(START, np.ones(len(self._sized_U), dtype=bool))

    @staticmethod
    @lru_cache(maxsize=64)
    def of(words: tuple[bytes, ...], token_bytes: TokenBytes) -> BadWords:
        return BadWords(words, token_bytes)

    def state_after(self, tokens: Sequence[int]) -> tuple[int, bool]:
        """Return the state after an answer, which depends on its last bytes only, and whether these are free of bad
        words. After a word that a constraint has forced, reading starts again."""
        parts: list[bytes] = []
        left = self._longest - 1
        for token in reversed(tokens):
            if left <= 0:
                break
            parts.append(self._text(token))
            left -= len(parts[-1])
        data = b"".join(reversed(parts))
        return self._read(START, data[max(len(data) - self._longest + 1, 0) :])

    def next_state(self, state: int, token: int) -> tuple[int, bool]:
        """Return the state after one more token, and whether it has completed no word. Only then, and if the bytes
        before it were free of bad words, the state equals that of `state_after`."""
        return self._read(state, self._text(token))

    def forbidden(self, state: int) -> np.ndarray:
        """Return the tokens that would complete a bad word, uint32 [W], a bit for each token."""
        if state in self._kept:
            self._kept.move_to_end(state)
            return self._kept[state]
        reads_again_U = (self._next_YP[state] != self._next_YP[START])[self._first_U]
        is_bad_U = self._at_start_U if state == START else self._at_start_U | self._completing(state, reads_again_U)
        vocab = len(self._bytes.offset_V) - 1
        bits = np.zeros((vocab // 32 + 1) * 32, dtype=bool)
        bits[self._sized_U[is_bad_U]] = True
        while len(self._kept) >= MOST_STATES:
            self._kept.popitem(last=False)
        self._kept[state] = found = np.packbits(bits, bitorder="little").view(np.uint32)
        return found

    def _completing(self, state: int, reads_U: np.ndarray) -> np.ndarray:
        """Return which of the tokens that are to be read complete a word after this state, bool [U]."""
        at = np.flatnonzero(reads_U)
        token = self._sized_U[at]
        begin, end = self._bytes.offset_V[token], self._bytes.offset_V[token + 1]
        states = np.full(len(at), state, dtype=np.int64)
        for offset in range(int((end - begin).max(initial=0))):
            reading = np.flatnonzero(begin + offset < end)
            states[reading] = self._next_YP[states[reading], self._bytes.data_P[begin[reading] + offset]]
        found_U = np.zeros(len(reads_U), dtype=bool)
        found_U[at] = states == DONE
        return found_U

    def _text(self, token: int) -> bytes:
        offset_V = self._bytes.offset_V
        return self._bytes.data_P[offset_V[token] : offset_V[token + 1]].tobytes()

    def _read(self, state: int, data: bytes) -> tuple[int, bool]:
        is_free = True
        for byte in data:
            state = int(self._next_YP[state, byte])
            if state == DONE:
                state, is_free = START, False
        return state, is_free
