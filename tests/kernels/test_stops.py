"""The kernel that advances answers and detects their end, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smc.api.limits import MAX_STOP_BYTES
from smc.kernels import stops as kernels
from smc.kernels.stops import after_all
from smc.stops import DONE, START, StopMachine, StopProgress, StopTables, TokenBytes
from smc.stops import grow as reference
from tests.test_stops import LONG, Letters

BLOCK = 32
"""Batch indices per program."""
random = np.random.default_rng(0)
TOKENS = [
    b"a",
    b"b",
    b"ab",
    b"",
    b"bab",
    "é".encode()[:1],
    "é".encode()[1:],
    b"abc" * 5,
    bytes(random.choice([97, 98], LONG).tolist()),
]
MACHINES = [
    StopMachine.of([3], []),
    StopMachine.of([], [b"ba"]),
    StopMachine.of([1, 5], [b"abab", "é".encode(), b"bb"]),
    StopMachine.of([], [b"a" * MAX_STOP_BYTES]),
    StopMachine.of([], [bytes(random.choice([97, 98], 15).tolist()) for _ in range(64)]),
    StopMachine.of([0], []),
    StopMachine.of([0, 1, 2], [b"bab"], early_ids=[1, 2]),
]
NO_TOKENS = [-1, -(2**31), len(TOKENS), 10**6, 2**31 - 1]
VOCAB = len(TOKENS) + 2
"""A model draws from more ids than its tokenizer has."""

FINISHED = kernels.DONE


def grow(
    tables: StopTables,
    entry_A: torch.Tensor,
    text_A: torch.Tensor,
    tokens_AK: torch.Tensor,
    room_A: torch.Tensor,
    early_A: torch.Tensor | None = None,
) -> StopProgress:
    places, k = tokens_AK.shape
    count_A, after_A = torch.empty(2, places, dtype=torch.int64, device=tokens_AK.device)
    ends_A = torch.empty(places, dtype=torch.bool, device=tokens_AK.device)
    if places:
        _grow[(triton.cdiv(places, BLOCK),)](
            *(given_A.contiguous() for given_A in (entry_A, text_A)), tokens_AK, *tokens_AK.stride(),
            room_A.contiguous(),
            torch.zeros_like(room_A) if early_A is None else early_A.contiguous(), count_A, ends_A, after_A, places,
            tables, K=k, BLOCK=BLOCK, num_warps=1,
        )  # fmt: skip
    return StopProgress(count_A, ends_A, after_A)


@triton.jit
def _grow(
    entry_A, text_A, tokens_AK, stride_a, stride_k, room_A, early_A, count_A, ends_A, after_A, places,
    tables, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    a = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = a < places
    entry = tl.load(entry_A + a, mask=inside, other=0).to(tl.int64)
    text, room = tl.load(text_A + a, mask=inside, other=0).to(tl.int32), tl.load(room_A + a, mask=inside, other=0)
    state, count = after_all(
        text, tokens_AK + a.to(tl.int64) * stride_a, stride_k, entry, inside, room,
        tl.load(early_A + a, mask=inside, other=0),
        tables, K,
    )  # fmt: skip
    tl.store(count_A + a, count.to(tl.int64), mask=inside)
    tl.store(ends_A + a, (count >= room) | (state == FINISHED), mask=inside)
    tl.store(after_A + a, state.to(tl.int64), mask=inside)


def tables_on(device: torch.device, machines: list[StopMachine], vocab: int = VOCAB) -> StopTables:
    tables = StopTables.allocate(len(machines) + 1, vocab, TokenBytes.of(Letters(TOKENS)), device)
    for entry, machine in enumerate(machines, start=1):
        tables.set(entry, machine)
    return tables


def assert_same(tables: StopTables, *arguments: torch.Tensor) -> None:
    expected = reference(tables, *arguments)
    actual = grow(tables, *arguments)
    for name in ("count_A", "ends_A", "text_A"):
        assert getattr(actual, name).dtype == getattr(expected, name).dtype
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name


def draw(generator: np.random.Generator, entries: int, places: int, k: int, wild: float) -> list[np.ndarray]:
    """Random entries, states, tokens, room and numbers of early tokens. States lie anywhere in the machines; a share
    `wild` of the tokens does not exist."""
    entry_A = generator.integers(0, entries, places)
    states_A = np.array([2, *(2 if m.next_YP is None else len(m.next_YP) for m in MACHINES)])[entry_A]
    text_A = np.where(generator.random(places) < 0.3, generator.integers(0, states_A), START)
    tokens_AK = generator.integers(0, VOCAB, (places, k))
    tokens_AK = np.where(generator.random((places, k)) < wild, generator.choice(NO_TOKENS, (places, k)), tokens_AK)
    return [entry_A, text_A, tokens_AK, *generator.integers((0, -2), (k + 3, k + 3), (places, 2)).T]


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, len(MACHINES)),
    st.integers(1, 2 * BLOCK + 1),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([VOCAB, len(TOKENS), len(TOKENS) - 2]),
    st.integers(0, 2**32),
)
def test_equals_the_torch_one(device, machines, places, k, wild, dtype, vocab, seed):
    arguments = draw(np.random.default_rng(seed), machines + 1, places, k, wild)
    arguments = [torch.from_numpy(argument).to(device, dtype) for argument in arguments]
    assert_same(tables_on(device, MACHINES[:machines], vocab), *arguments)


def test_many_places_and_rounds(device):
    """States are carried from round to round; the tokens are a slice of a wider tensor."""
    tables, places = tables_on(device, MACHINES), 2 * BLOCK + 1
    generator = np.random.default_rng(1)
    entry_A, text_A, *_ = (torch.from_numpy(a).to(device) for a in draw(generator, len(MACHINES) + 1, places, 1, 0.0))
    for k in (3, 1):
        _, _, tokens_AK, *given = (torch.from_numpy(a).to(device) for a in draw(generator, 1, places, 2 * k, 0.1))
        assert_same(tables, entry_A, text_A, tokens_AK[:, ::2], *given)
        assert_same(tables, entry_A, text_A, tokens_AK.t()[:k].t(), *given)
        text_A = grow(tables, entry_A, text_A, tokens_AK[:, ::2], *given).text_A


def test_all_in_one_state(device):
    """Cases: no room, DONE before, no condition that could end the answer, the last byte of the longest string, and
    only tokens without bytes."""
    tables, k = tables_on(device, MACHINES), 3
    for entry, text, token, room, expected in [
        (2, START, 2, 0, (0, True, START)),
        (2, DONE, 3, 9, (1, True, DONE)),
        (0, DONE, -1, 9, (1, True, DONE)),
        (0, START, 8, 9, (k, False, START)),
        (0, START, 8, k, (k, True, START)),
        (4, MAX_STOP_BYTES, 0, 9, (1, True, DONE)),
        (4, MAX_STOP_BYTES, 3, 9, (k, False, MAX_STOP_BYTES)),
        (1, START, 3, 9, (1, True, DONE)),
    ]:
        place = [torch.full((BLOCK + 1,), value, device=device) for value in (entry, text, room)]
        growth = grow(tables, place[0], place[1], torch.full((BLOCK + 1, k), token, device=device), place[2])
        for values, value in zip((growth.count_A, growth.ends_A, growth.text_A), expected):
            assert (values == value).all()
    none_A = torch.zeros(0, dtype=torch.int64, device=device)
    assert len(grow(tables, none_A, none_A, none_A[:, None].expand(0, k), none_A).count_A) == 0


@pytest.mark.parametrize("vocab", [VOCAB, len(TOKENS)])
def test_nothing_is_read_beyond_the_vocabulary(device, vocab):
    """Data after the end of the tables would end every answer: bytes of tokens outside the vocabulary, and stop tokens
    of further entries."""
    tables = tables_on(device, [StopMachine.of([], [b"a"]), StopMachine.of(range(vocab), [])], vocab)
    size = len(tables.data_P)
    more_V = torch.tensor([0, size] * 8, dtype=torch.int32, device=device)
    tables = tables._replace(offset_V=torch.cat((tables.offset_V, more_V))[: len(TOKENS) + 1])
    for token in range(len(TOKENS), len(TOKENS) + 8):
        one_A = torch.ones(2, dtype=torch.int64, device=device)
        growth = grow(tables, one_A, one_A * START, torch.full((2, 2), token, device=device), one_A * 9)
        assert growth.count_A.tolist() == [2, 2] and not growth.ends_A.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="records a CUDA graph")
def test_a_recorded_graph_sees_entries_set_later(device):
    tables = tables_on(device, MACHINES[:1])
    one_A, tokens_AK = torch.ones(3, dtype=torch.int64, device=device), torch.tensor([[1, 0, 1]] * 3, device=device)
    arguments = (one_A, one_A * START, tokens_AK, one_A * 9)
    grow(tables, *arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        growth = grow(tables, *arguments)
    for machine in (MACHINES[1], MACHINES[0], MACHINES[2]):
        tables.set(1, machine)
        graph.replay()
        expected = reference(tables, *arguments)
        assert torch.equal(growth.count_A, expected.count_A) and torch.equal(growth.ends_A, expected.ends_A)
