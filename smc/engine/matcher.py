"""Stop strings as a machine that reads tokens: after each one it is in the next state, and in `DONE` once a string is complete.

Tokens that move it alike are of one kind, so its table is small whatever the vocabulary; a device can follow it without asking anyone.
The machine over bytes is that of Aho and Corasick (Communications of the ACM 18, 1975).

Axes: X states, B = 256 bytes, C kinds of tokens, V vocabulary, P particles, K tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from smc.models.tokenizer import Tokenizer

START, DONE = 0, 1
MAX_STATES = 128
MAX_KINDS = 512
"""What a model keeps room for, for each slot."""


@dataclass(frozen=True)
class StopMatcher:
    kind_V: np.ndarray
    """int16 kind of every token."""
    next_XC: np.ndarray
    """int16 state after a token, by the state before it and the token's kind."""

    def after(self, state_P: np.ndarray, tokens_P: np.ndarray) -> np.ndarray:
        """States after one token each."""
        return self.next_XC[state_P, self.kind_V[tokens_P]]


@lru_cache(maxsize=32)
def stop_matcher(strings: tuple[bytes, ...], tokenizer: Tokenizer) -> StopMatcher:
    """Raises ValueError if the strings are too long together for a machine of `MAX_STATES` states or `MAX_KINDS` kinds of tokens."""
    next_XB = byte_machine(strings)
    if len(next_XB) > MAX_STATES:
        raise ValueError(f"stop has strings of {sum(map(len, strings))} bytes together; allowed: about {MAX_STATES - 2}")
    next_XV = _over_tokens(next_XB, [tokenizer.bytes_of(token) for token in range(tokenizer.size)])
    # Columns are told apart by a random sum: two that differ have the same one with probability 2^-64.
    factor_X = np.random.default_rng(0).integers(-(2**62), 2**62, len(next_XV))
    _, first_C, kind_V = np.unique(factor_X @ next_XV, return_index=True, return_inverse=True)
    if len(first_C) > MAX_KINDS:
        raise ValueError(
            f"stop has strings that tell apart {len(first_C)} kinds of tokens; allowed: {MAX_KINDS}. Give fewer or shorter ones"
        )
    return StopMatcher(kind_V.astype(np.int16), next_XV[:, first_C].astype(np.int16))


def byte_machine(strings: Sequence[bytes]) -> np.ndarray:
    """Next state [X, B]. `START` and `DONE` come first, then one state for every proper beginning of a string."""
    beginnings = {string[:size] for string in strings for size in range(1, len(string))}
    # One that contains a whole string is never reached: the machine is done before.
    reached = sorted((b for b in beginnings if not any(string in b for string in strings)), key=lambda b: (len(b), b))
    number = {b"": START} | {beginning: i for i, beginning in enumerate(reached, start=2)}
    next_XB = np.empty((len(reached) + 2, 256), dtype=np.int64)
    next_XB[DONE] = DONE
    for beginning, state in number.items():
        shorter = next((number[beginning[i:]] for i in range(1, len(beginning)) if beginning[i:] in number), START)
        next_XB[state] = next_XB[shorter] if beginning else START
        for byte in {string[len(beginning)] for string in strings if string.startswith(beginning) and len(string) > len(beginning)}:
            longer = beginning + bytes([byte])
            next_XB[state, byte] = number.get(longer, DONE)
    return next_XB


def _over_tokens(next_XB: np.ndarray, tokens: list[bytes]) -> np.ndarray:
    """Next state [X, V] after all bytes of each token."""
    # Bytes that are in no string all lead to START: tokens that differ in those alone are run once.
    plain = bytes(np.flatnonzero((next_XB[[START, *range(DONE + 1, len(next_XB))]] == START).all(axis=0)).tolist())
    alike = bytes.maketrans(plain, plain[:1] * len(plain))
    number: dict[bytes, int] = {}
    which_V = np.array([number.setdefault(token.translate(alike), len(number)) for token in tokens])
    size_U = np.array([len(token) for token in number])
    by_size_U = np.argsort(-size_U, kind="stable")
    distinct, size_U = list(number), size_U[by_size_U]
    data = np.frombuffer(b"".join(distinct[i] for i in by_size_U), dtype=np.uint8).astype(np.intp)
    begin_U, flat = np.cumsum(size_U) - size_U, next_XB.ravel()
    state_XU = np.repeat(np.arange(len(next_XB))[:, None], len(distinct), axis=1)
    for offset in range(int(size_U.max(initial=0))):
        longer = int((size_U > offset).sum())
        state_XU[:, :longer] = flat.take(state_XU[:, :longer] * 256 + data[begin_U[:longer] + offset])
    after_XU = np.empty_like(state_XU)
    after_XU[:, by_size_U] = state_XU
    return after_XU[:, which_V]
