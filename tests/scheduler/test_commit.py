"""The committed prefix: the longest prefix on which all particles of a group agree."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smc.scheduler.decode import WINDOW, commit_tokens
from smc.scheduler.methods import RULES
from smc.scheduler.planner import SlotBatch
from smc.scheduler.slots import Slots
from smc.types import Decoding

SEQUENCES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=4)


def committed(groups: list[list[list[int]]], junk: int, confirms: bool = False) -> list[int]:
    """Committed lengths that are found for groups of particles with these tokens. The slots contain `junk` after
    them."""
    sequences = [row for rows in groups for row in rows]
    slots = Slots(len(sequences), max(map(len, sequences)) + 1)
    slots.tokens_SL[:] = junk
    members = []
    for rows in groups:
        claimed = slots.claim(len(rows))
        for slot, row in zip(claimed, rows):
            slots.tokens_SL[slot, : len(row)] = row
            slots.length_S[slot] = len(row)
        counters = SimpleNamespace(lag_sum=0)
        # Exact decoding: only the first token is confirmed, the block in flight begins after it. SMC: all tokens have
        # been scored.
        slots.block_S[claimed] = 0 if confirms else slots.length_S[claimed] - 1
        rules = RULES[Decoding.WALK if confirms else Decoding.INDEPENDENT]
        members.append(
            SimpleNamespace(
                slots=claimed,
                particles=np.arange(len(rows)),
                seed=0,
                committed=0,
                lag=0,
                counters=counters,
                rules=rules,
            )
        )
    commit_tokens(slots, SlotBatch(members))
    assert [m.lag for m in members] == [max(map(len, rows)) - m.committed for m, rows in zip(members, groups)]
    return [member.committed for member in members]


@settings(max_examples=25, deadline=None)
@given(st.lists(SEQUENCES, min_size=1, max_size=3), st.integers(2, 9), st.sampled_from([1, WINDOW // 2, WINDOW]))
def test_it_is_the_longest_common_prefix(groups, junk, repeated):
    """Groups of different sizes and lengths side by side, some longer than the comparison window."""
    groups = [[[token for token in row for _ in range(repeated)] for row in rows] for rows in groups]
    for rows, found in zip(groups, committed(groups, junk)):
        assert found == max(n for n in range(min(map(len, rows)) + 1) if all(row[:n] == rows[0][:n] for row in rows))


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_at_the_edge_of_a_window(length):
    assert committed([[[1] * length + [0], [1] * length + [2]], [[0], [1]]], junk=1) == [length, 0]


def test_only_confirmed_tokens_are_committed():
    """In exact decoding the first token of the block in flight is the target's own and is committed; the others are the
    draft's and are not, even if all rows agree on them."""
    assert committed([[[1, 2, 3], [1, 2, 3]]], junk=0, confirms=True) == [1]
