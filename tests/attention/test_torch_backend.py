"""The attention backends in torch against a float64 reference of one query at a time over its row's own table.

Local axes: U segments."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from smc.attention.backend import AttentionBackend, ForwardBatch, TorchAttention
from smc.attention.prompts import FusedAttention
from smc.memory.kv_cache import KVPool
from smc.memory.pages import DUMMY_PAGE
from tests.model.tiny import tiny_config

WIDTH, CAPACITY, DIM, LAYERS = 16, 300, 8, 2
# A segment is (positions shared, [(further positions held, new tokens) of each row]).
Segment = tuple[int, list[tuple[int, int]]]
segment = st.tuples(
    st.integers(0, 6), st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), min_size=1, max_size=4)
)
decode_segment = st.tuples(
    st.integers(0, 6), st.lists(st.tuples(st.integers(0, 4), st.just(1)), min_size=1, max_size=4)
)


class Case:
    """Tables, pool and batch of the given segments, with random keys and values on every page."""

    def __init__(
        self, segments: list[Segment], kv_heads: int, group: int, dummy: float = 1e4, dtype=torch.float32
    ) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.config = tiny_config(num_layers=LAYERS, num_heads=kv_heads * group, num_kv_heads=kv_heads, head_dim=DIM)
        self.pool = KVPool(self.config, CAPACITY, dtype, "cpu")
        for store in (self.pool.keys, self.pool.values):
            store.normal_(generator=self.generator)
            store[:, DUMMY_PAGE] = dummy
        held_R, counts_R = np.array([part for _, members in segments for part in members], dtype=np.int32).T
        shared_U, sizes_U = np.array([shared for shared, _ in segments]), [len(members) for _, members in segments]
        shared_R = np.repeat(shared_U, sizes_U).astype(np.int32)
        starts_R = shared_R + held_R
        row_T = np.repeat(np.arange(len(held_R)), counts_R)
        positions_T = starts_R[row_T] + np.arange(len(row_T)) - np.repeat(np.cumsum(counts_R) - counts_R, counts_R)
        self.table_RL = self._tables(shared_R, np.cumsum([0, *sizes_U]))
        self.unheld = np.setdiff1d(self.table_RL, self.table_RL[np.arange(WIDTH) < (starts_R + counts_R)[:, None]])
        pages_T = self.table_RL[row_T, positions_T]
        self.row_T = row_T
        self.batch = ForwardBatch(
            self.table_RL, starts_R, counts_R, pages_T, positions_T, np.cumsum([0, *sizes_U]), shared_U
        )
        tokens = len(pages_T)
        self.q_THD = self._random(tokens, kv_heads * group).to(dtype)
        self.k_TJD, self.v_TJD = self._random(tokens, kv_heads).to(dtype), self._random(tokens, kv_heads).to(dtype)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, DIM, generator=self.generator)

    def _tables(self, shared_R: np.ndarray, bounds_U: np.ndarray) -> np.ndarray:
        """Tables with pages in random order. The rows of a segment share the pages of its prefix. Past a row's end,
        tables name pages too."""
        pages = 1 + np.random.default_rng(0).permutation(CAPACITY)[: len(shared_R) * WIDTH]
        table_RL = pages.reshape(-1, WIDTH).astype(np.int32)
        for begin, end in pairwise(bounds_U):
            table_RL[begin:end, : shared_R[begin]] = table_RL[begin, : shared_R[begin]]
        return table_RL

    def attend(self, layer: int = 1, backend: type[AttentionBackend] = TorchAttention) -> Tensor:
        return backend().plan(self.pool, self.batch).attend(layer, self.q_THD, self.k_TJD, self.v_TJD)

    def slow(self, layer: int = 1) -> Tensor:
        """Reference: one query and one head at a time, over the pages that the row's own table names. The new keys and
        values must be stored before the call."""
        keys, values = self.pool.keys[layer].double(), self.pool.values[layer].double()
        group = self.config.num_heads // self.config.num_kv_heads
        out_THD = torch.zeros(self.q_THD.shape, dtype=torch.float64)
        for t, (row, position) in enumerate(zip(self.row_T, self.batch.positions_T)):
            pages_L = torch.from_numpy(self.table_RL[row, : position + 1]).long()
            for h in range(self.config.num_heads):
                scores_L = keys[pages_L, h // group] @ self.q_THD[t, h].double() / DIM**0.5
                out_THD[t, h] = scores_L.softmax(0) @ values[pages_L, h // group]
        return out_THD


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (2, 1), (2, 2), (1, 4), (2, 4)])
@settings(max_examples=10, deadline=None)
@given(segments=st.lists(segment, min_size=1, max_size=4) | st.lists(decode_segment, min_size=1, max_size=4))
def test_ragged_segments_equal_attention_of_each_query_alone(kv_heads, group, segments):
    for backend in (TorchAttention, FusedAttention):
        case = Case(segments, kv_heads, group)
        torch.testing.assert_close(case.attend(backend=backend).double(), case.slow(), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize(
    "segments",
    [
        [(0, [(0, 1)])],  # the very first token
        [(0, [(0, 9)])],  # a prefill
        [(5, [(3, 1), (3, 1), (3, 1)])],  # a decode step: rows of equal length, one new token each
        [(6, [(0, 1), (0, 1)]), (6, [(0, 1), (0, 1)])],  # nothing held after the prefix
        [(6, [(4, 6)]), (0, [(0, 1)])],  # one row fills its table, the other has hardly begun
        [(0, [(2, 3), (0, 1)]), (6, [(0, 2)]), (1, [(4, 1), (1, 4), (0, 6)])],
    ],
)
def test_shapes_at_the_edges(segments):
    case = Case(segments, kv_heads=2, group=2)
    torch.testing.assert_close(case.attend().double(), case.slow(), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.bfloat16, 0.03)])
def test_other_dtypes(dtype, tolerance):
    case = Case([(4, [(2, 3), (0, 1)]), (0, [(1, 2)])], kv_heads=2, group=2, dtype=dtype)
    out_THD = case.attend()
    assert out_THD.dtype == dtype
    torch.testing.assert_close(out_THD.double(), case.slow(), atol=tolerance, rtol=tolerance)


@settings(max_examples=10, deadline=None)
@given(segments=st.lists(segment, min_size=1, max_size=3), layer=st.integers(0, LAYERS - 1))
def test_new_keys_and_values_land_on_their_own_pages_only(segments, layer):
    case = Case(segments, kv_heads=2, group=2)
    expected_keys, expected_values = case.pool.keys.clone(), case.pool.values.clone()
    for t, page in enumerate(case.batch.pages_T):
        expected_keys[layer, page], expected_values[layer, page] = case.k_TJD[t], case.v_TJD[t]
    case.attend(layer)
    assert torch.equal(case.pool.keys, expected_keys)
    assert torch.equal(case.pool.values, expected_values)


@settings(max_examples=10, deadline=None)
@given(segments=st.lists(segment, min_size=1, max_size=4))
def test_what_dummy_unheld_and_unwritten_pages_contain_does_not_matter(segments):
    quiet, loud = Case(segments, 2, 2, dummy=0.0), Case(segments, 2, 2, dummy=1e4)
    loud.pool.keys[:, loud.unheld] = torch.nan
    loud.pool.values[:, loud.unheld] = torch.nan
    loud.pool.keys[:, loud.batch.pages_T] = torch.nan
    loud.pool.values[:, loud.batch.pages_T] = torch.nan
    assert torch.equal(loud.attend(), quiet.attend())


@settings(max_examples=10, deadline=None)
@given(segments=st.lists(segment, min_size=1, max_size=4), data=st.data())
def test_recomputed_tokens_are_not_stored(segments, data):
    """A token may be run again for its output alone; its keys and values were stored by the first run."""
    backend = data.draw(st.sampled_from([TorchAttention, FusedAttention]))
    once, again = Case(segments, 2, 2), Case(segments, 2, 2)
    expected = once.attend(backend=backend)
    for stored, old in ((once.pool.keys, again.pool.keys), (once.pool.values, again.pool.values)):
        old.copy_(stored)
    again.batch.pages_T[data.draw(st.lists(st.integers(0, len(again.batch.pages_T) - 1), max_size=6))] = DUMMY_PAGE
    torch.testing.assert_close(again.attend(backend=backend), expected)
    for stored, old in ((once.pool.keys, again.pool.keys), (once.pool.values, again.pool.values)):
        assert torch.equal(stored, old), "a page has changed, or the dummy page"


@settings(max_examples=10, deadline=None)
@given(segments=st.lists(segment, min_size=1, max_size=4), data=st.data())
def test_how_much_of_a_common_past_is_declared_shared_does_not_matter(segments, data):
    declared, less = Case(segments, 2, 2), Case(segments, 2, 2)
    less.batch.shared_U[:] = [data.draw(st.integers(0, shared)) for shared, _ in segments]
    torch.testing.assert_close(less.attend(), declared.attend(), atol=2e-6, rtol=2e-5)


class CountingTensor(torch.Tensor):
    """A tensor that counts the pages gathered from it."""

    gathered = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__getitem__ and isinstance(args[1], torch.Tensor):
            cls.gathered += args[1].numel()
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_shared_prefix_is_read_once_for_all_rows_of_its_segment():
    case = Case([(6, [(2, 1)] * 4), (6, [(2, 1)] * 4)], kv_heads=2, group=2)
    case.pool.keys = case.pool.keys.as_subclass(CountingTensor)
    CountingTensor.gathered = 0
    case.attend()
    assert CountingTensor.gathered == 2 * 6 + 8 * 3
