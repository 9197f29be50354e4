"""How answers grow, within kernels: what `smc.stops.grow` does to states of stop machines.

Axes: A batch indices, K tokens, E entries of the tables, X states, B bytes, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from smc import stops
from smc.stops import StopTables

DONE, STATES = tl.constexpr(stops.DONE), tl.constexpr(stops.MAX_STATES)


class StopTensors(NamedTuple):
    """The tensors of `smc.stops.StopTables`."""

    is_stop_EV: Tensor
    vocab: int
    has_strings_E: Tensor
    next_EXB: Tensor | None
    """None: no request has stop strings."""
    data_B: Tensor
    offset_V: Tensor
    spelled: int
    """Tokens whose bytes are listed: more or fewer than the tokens that a model can draw (`vocab`)."""

    @staticmethod
    def of(tables: StopTables) -> StopTensors:
        vocab, spelled = tables.is_stop_EV.shape[1], len(tables.offset_V) - 1
        return StopTensors(
            tables.is_stop_EV, vocab, tables.has_strings_E, tables.next_EXB, tables.data_B, tables.offset_V, spelled
        )


@triton.jit
def after_all(state, tokens_A, stride, entry, exists, room, early, tables, K: tl.constexpr):
    """States int32 after as many of K tokens as there is `room` for, up to the token that ends the answer; and how many
    tokens those are. The first `early` tokens do not end an answer. `tokens_A` points to the first of each, `stride`
    apart."""
    going, count = exists & (room > 0), tl.zeros_like(state)
    for k in range(K):
        token = tl.load(tokens_A + k * stride, mask=going, other=-1).to(tl.int64)
        state = after(state, token, entry, going, k < early, tables)
        count += going.to(tl.int32)
        going = going & (state != DONE) & (count < room)
    return state, count


@triton.jit
def after(state, token, entry, going, early, tables):
    """States int32 of machines after one token each, where they are `going`; tokens and entries int64. An `early` token
    does not end the answer: a stop string that it completes is not looked for again."""
    drawable = going & (token >= 0) & (token < tables.vocab)
    is_stop = tl.load(tables.is_stop_EV + entry * tables.vocab + token, mask=drawable, other=0) != 0
    state = tl.where(is_stop, DONE, state)
    if tables.next_EXB is not None:
        reads = drawable & (token < tables.spelled)
        reads = reads & (tl.load(tables.has_strings_E + entry, mask=reads, other=0) != 0)
        begin = tl.load(tables.offset_V + token, mask=reads, other=0)
        size = tl.load(tables.offset_V + token + 1, mask=reads, other=0) - begin
        for i in range(tl.max(size, 0)):
            # Bytes are read whatever the state, so that they need not wait for it: DONE leads to DONE.
            byte = tl.load(tables.data_B + begin + i, mask=i < size, other=0)
            next_at = tables.next_EXB + (entry * STATES + state) * 256 + byte
            state = tl.where(i < size, tl.load(next_at, mask=i < size, other=0).to(tl.int32), state)
    return tl.where(going & early & (state == DONE), 0, state)
