"""The machine of stop strings against a search of the whole text, byte by byte and token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smc.engine.matcher import DONE, MAX_STATES, START, byte_machine, stop_matcher

strings = st.lists(st.text("ab", min_size=1, max_size=6).map(str.encode), min_size=1, max_size=4)


class Letters:
    """As much of a tokenizer as the matcher needs."""

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens, self.size = tokens, len(tokens)

    def bytes_of(self, token: int) -> bytes:
        return self.tokens[token]


@settings(max_examples=300, deadline=None)
@given(strings, st.text("abc", max_size=20).map(str.encode))
def test_bytes(stops, text):
    machine, state = byte_machine(stops), START
    for end, byte in enumerate(text, start=1):
        state = machine[state, byte]
        assert (state == DONE) == any(stop in text[:end] for stop in stops)


@settings(max_examples=300, deadline=None)
@given(strings, st.lists(st.text("abcd", max_size=5).map(str.encode), min_size=1, max_size=12), st.data())
def test_tokens(stops, tokens, data):
    """Tokens of any size, empty ones too: a string may begin and end in the middle of any of them."""
    matcher = stop_matcher(tuple(stops), Letters(tokens))
    state, text = np.array([START]), b""
    for token in data.draw(st.lists(st.integers(0, len(tokens) - 1), max_size=12)):
        state, text = matcher.after(state, np.array([token])), text + tokens[token]
        assert (state[0] == DONE) == any(stop in text for stop in stops)


def test_what_is_too_much_is_refused():
    letters = Letters([bytes([byte]) for byte in range(256)])
    assert len(stop_matcher((b"x" * (MAX_STATES - 1),), letters).next_XC) == MAX_STATES
    with pytest.raises(ValueError, match=f"stop has strings of {MAX_STATES} bytes together"):
        stop_matcher((b"x" * MAX_STATES,), letters)
    # Every piece of the string carries the machine from one place in it to another.
    string = np.random.default_rng(0).bytes(120)
    pieces = Letters([string[begin : begin + size] for begin in range(110) for size in (3, 4, 5, 7, 9)])
    with pytest.raises(ValueError, match="kinds of tokens; allowed"):
        stop_matcher((string,), pieces)
