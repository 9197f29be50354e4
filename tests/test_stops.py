"""Stop strings and stop tokens, compared with a search of the whole text: byte by byte, token by token and round by
round."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smc.api.limits import MAX_STOP_BYTES
from smc.stops import DONE, MAX_STATES, START, StopMachine, StopProgress, StopTables, TokenBytes, grow

CPU = torch.device("cpu")
LONG = 128
"""Number of bytes of the longest tokens in real vocabularies."""
strings = st.lists(st.text("ab", min_size=1, max_size=6).map(str.encode), min_size=1, max_size=4)
texts = st.lists(st.text("abcd", max_size=5).map(str.encode), min_size=1, max_size=12)
UNICODE = ["é", "😀", "ée", "aé", "日本", "本日"]


class Letters:
    """The part of a tokenizer that stops need."""

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens, self.size, self.eos_ids = tokens, len(tokens), ()

    def bytes_of(self, token: int) -> bytes:
        return self.tokens[token]


def over_bytes(machine: StopMachine, text: bytes) -> list[int]:
    """The machine's state after each byte."""
    state, states = START, []
    for byte in text:
        state = int(machine.next_YP[state, byte])
        states.append(state)
    return states


def after(machine: StopMachine, state: int, token: int, tokens: list[bytes]) -> int:
    """The machine's state after one more token."""
    if token in machine.stop_ids:
        return DONE
    for byte in tokens[token] if machine.strings else b"":
        state = int(machine.next_YP[state, byte])
    return state


def assert_found_in(stops: list[bytes], text: bytes) -> None:
    states = over_bytes(StopMachine.of((), stops), text)
    assert [state == DONE for state in states] == [
        any(stop in text[:end] for stop in stops) for end in range(1, len(text) + 1)
    ]


@settings(max_examples=50)
@given(strings, st.text("abc", max_size=20).map(str.encode))
def test_bytes(stops, text):
    assert_found_in(stops, text)


@pytest.mark.parametrize("seed", range(8))
def test_many_strings(seed):
    """64 strings that overlap, contain one another and begin alike."""
    random = np.random.default_rng(seed)
    stops = [bytes(random.choice([97, 98, 99], random.integers(4, 16)).tolist()) for _ in range(64)]
    for _ in range(10):
        assert_found_in(stops, bytes(random.choice([97, 98, 99], 60).tolist()))


def test_one_string_as_long_as_can_be():
    """Every prefix of the string is a state, and each state falls back to the longest prefix that is a suffix of the
    text read."""
    for string in (
        b"a" * MAX_STOP_BYTES,
        b"ab" * (MAX_STOP_BYTES // 2),
        np.random.default_rng(0).bytes(MAX_STOP_BYTES),
    ):
        machine = StopMachine.of((), [string])
        assert len(machine.next_YP) == MAX_STOP_BYTES + 1 <= MAX_STATES
        for text in (string, string[:-1] + string, string[: MAX_STOP_BYTES // 2] + string + b"c"):
            found = [state == DONE for state in over_bytes(machine, text)]
            assert found.index(True) + 1 == text.find(string) + len(string)
            assert all(found[found.index(True) :])


@settings(max_examples=50)
@given(strings, texts, st.data())
def test_tokens(stops, tokens, data):
    """Tokens of any size, also empty ones: a string may begin and end in the middle of a token."""
    machine, state, text = StopMachine.of((), stops), START, b""
    for token in data.draw(st.lists(st.integers(0, len(tokens) - 1), max_size=12)):
        state, text = after(machine, state, token, tokens), text + tokens[token]
        assert (state == DONE) == any(stop in text for stop in stops)


@settings(max_examples=20)
@given(st.lists(st.sampled_from(UNICODE), min_size=1, max_size=3), st.lists(st.sampled_from(UNICODE), max_size=6))
def test_characters_cut_by_tokens(stops, answer):
    assert_found_in([stop.encode() for stop in stops], "".join(answer).encode())


def test_rows_are_followed_alike():
    """A stop token leads to DONE, with or without strings; DONE is final; ids outside the vocabulary change nothing."""
    tokens = [b"a", b"", b"xab" + b"y" * LONG, b"b"]
    tokens_A, state_A = torch.tensor([0, 1, 2, 3, 9, -1, 0]), torch.tensor([START] * 6 + [DONE])
    machine = StopMachine.of([3, 1, 3], [b"ab"])
    assert machine.stop_ids == (1, 3)
    tables = StopTables.allocate(3, len(tokens), TokenBytes.of(Letters(tokens)), CPU)
    tables.set(1, machine)
    tables.set(2, StopMachine.of([1], []))
    one_A = torch.ones(7, dtype=torch.int64)
    with_strings, without = (
        grow(tables, entry * one_A, state_A, tokens_A[:, None], one_A).text_A.tolist() for entry in (1, 2)
    )
    assert with_strings == [2, DONE, DONE, DONE, START, START, DONE]
    assert without == [START, DONE, *[START] * 4, DONE]


def test_equal_content_is_equal():
    one, same = StopMachine.of([2, 1], [b"b", b"a"]), StopMachine.of([1, 2, 2], [b"a", b"b", b"a"])
    assert one == same == StopMachine.of(*one.key)
    assert hash(one) == hash(same) and one.key == same.key
    assert np.array_equal(one.next_YP, same.next_YP)
    assert (
        len({one, StopMachine.of([1], [b"a", b"b"]), StopMachine.of([1, 2], [b"a"]), StopMachine.of([1, 2], [])}) == 4
    )
    assert StopMachine.of([], []).next_YP is None


@pytest.mark.parametrize("count", [1, 2, 64])
def test_what_is_too_long_is_refused(count):
    random = np.random.default_rng(count)
    size = MAX_STOP_BYTES // count
    stops = [random.bytes(size) for _ in range(count - 1)] + [random.bytes(MAX_STOP_BYTES - size * (count - 1))]
    assert len(StopMachine.of((), stops).next_YP) <= MAX_STATES
    with pytest.raises(
        ValueError, match=rf"stop has strings of {MAX_STOP_BYTES + 1} bytes together; allowed: at most {MAX_STOP_BYTES}"
    ):
        StopMachine.of((), [*stops[:-1], stops[-1] + b"x"])


def test_time_does_not_depend_on_the_vocabulary():
    """The time to make a machine does not depend on the vocabulary, which is only read, once for all requests. An
    earlier version built a machine over the tokens for each request: a string of 120 bytes over 128k tokens took 2.4 s
    and 0.4 GB, while other requests waited."""
    random = np.random.default_rng(0)
    letters = Letters([random.bytes(random.integers(1, 12)) for _ in range(64 * 1024)])
    begin = time.process_time()
    assert TokenBytes.of(letters) is TokenBytes.of(letters)
    assert time.process_time() - begin < 0.5
    for count, size in ((64, 15), (1, MAX_STOP_BYTES)):
        stops, seconds = [random.bytes(size) for _ in range(count)], []
        for _ in range(5):
            begin = time.process_time()
            StopMachine.of((), stops)
            seconds.append(time.process_time() - begin)
        assert min(seconds) < 0.05


def test_bytes_of_a_vocabulary():
    tokens = [b"ab", b"", bytes(range(LONG)), b"c"]
    token_bytes = TokenBytes.of(Letters(tokens))
    data_P, offset_V = token_bytes.to(CPU)
    assert (data_P.dtype, offset_V.dtype) == (torch.uint8, torch.int32)
    assert [bytes(data_P[begin:end].tolist()) for begin, end in pairwise(offset_V)] == tokens


def expected(
    answers: list[bytes], tokens: list[bytes], machines: list[StopMachine], entry_A, tokens_AK, room_A
) -> list[tuple[int, bool]]:
    """(count, ends) of every batch index, by a search of its whole text, to which its new tokens are added in
    `answers`."""
    grown = []
    for a, (entry, room) in enumerate(zip(entry_A.tolist(), room_A.tolist())):
        count, ends = 0, room == 0
        for token in tokens_AK[a].tolist()[:room]:
            count += 1
            answers[a] += tokens[token]
            ends = (
                token in machines[entry].stop_ids
                or any(string in answers[a] for string in machines[entry].strings)
                or count == room
            )
            if ends:
                break
        grown.append((count, ends))
    return grown


def counted(growth: StopProgress) -> list[tuple[int, bool]]:
    return list(zip(growth.count_A.tolist(), growth.ends_A.tolist()))


@settings(max_examples=20)
@given(st.lists(strings | st.just([]), min_size=2, max_size=4), texts, st.integers(1, 9), st.integers(0, 2**32))
def test_growth(stops, tokens, k, seed):
    """Answers of different requests grow for some rounds, as a search of their texts and the host's own machines
    predict."""
    random = np.random.default_rng(seed)
    token_bytes, places = TokenBytes.of(Letters(tokens)), 2 * len(stops)
    machines = [StopMachine.of([], [])] + [
        StopMachine.of(random.integers(0, len(tokens), i % 2).tolist(), s) for i, s in enumerate(stops)
    ]
    tables = StopTables.allocate(len(machines), len(tokens), token_bytes, CPU)
    for entry, machine in enumerate(machines[1:], start=1):
        tables.set(entry, machine)
    answers, open_A = [b""] * places, np.ones(places, dtype=bool)
    entry_A, text_A = torch.from_numpy(random.integers(0, len(machines), places)), torch.full((places,), START)
    for _ in range(3):
        tokens_AK = torch.from_numpy(random.integers(0, len(tokens), (places, k)))
        room_A = torch.from_numpy(random.integers(0, k + 3, places) * open_A)
        growth = grow(tables, entry_A, text_A, tokens_AK, room_A)
        assert counted(growth) == expected(answers, tokens, machines, entry_A, tokens_AK, room_A)
        for a in range(places):
            state = int(text_A[a])
            for token in tokens_AK[a, : growth.count_A[a]].tolist():
                state = after(machines[entry_A[a]], state, token, tokens)
            assert growth.text_A[a] == state
        text_A, open_A = growth.text_A, open_A & ~growth.ends_A.numpy()


def test_entries_are_set_anew():
    """A new entry keeps nothing of the former one. The table of machines is allocated once."""
    tokens = [b"a", b"b", b"ab", b""]
    tables = StopTables.allocate(3, len(tokens), TokenBytes.of(Letters(tokens)), CPU)

    def ends(entry: int, *answer: int) -> int:
        """The number of tokens after which the answer ends; 0 if none of them ends it."""
        growth = grow(tables, torch.tensor([entry]), torch.tensor([START]), torch.tensor([answer]), torch.tensor([9]))
        return int(growth.count_A) * int(growth.ends_A)

    tables.set(1, StopMachine.of([3], []))
    assert (ends(0, 0, 3, 1), ends(1, 0, 3, 1)) == (0, 2)
    tables.set(1, StopMachine.of([], [b"ba"]))
    assert tables.next_ZYP.shape == (3, MAX_STATES, 256)
    tables.set(2, StopMachine.of([0, 99], [b"abab"]))
    assert (ends(0, 3, 1, 0), ends(1, 3, 1, 0), ends(1, 2, 2), ends(2, 2, 2), ends(2, 2, 0, 1)) == (0, 3, 2, 2, 2)
    tables.set(2, StopMachine.of([1], [b"aa"]))
    assert (ends(2, 2, 2), ends(2, 2, 1), ends(2, 0, 0, 0)) == (0, 2, 2)
    tables.set(1, StopMachine.of([], []))
    assert ends(1, 1, 0, 3) == 0
