"""How answers grow, within kernels: what `smc.stops.grow` does to states of stop machines.

Axes: A places, K tokens, E entries of the tables, X states, B bytes, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from smc.stops import StopTables


def table_arguments(tables: StopTables) -> tuple[object, ...]:
    """What `after` is given of the tables."""
    vocab, spelled = tables.is_stop_EV.shape[1], len(tables.offset_V) - 1
    return tables.is_stop_EV, vocab, tables.has_strings_E, tables.next_EXB, tables.data_B, tables.offset_V, spelled


@triton.jit
def after_all(
    state, tokens_A, stride, entry, exists, room, early, is_stop_EV, vocab, has_strings_E, next_EXB, data_B, offset_V, spelled,
    K: tl.constexpr, STRINGS: tl.constexpr, DONE: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """States int32 after those of K tokens that there is `room` for, up to the one that ends the answer; and how many
    those are. The first `early` end none. `tokens_A` points to the first of each, `stride` apart."""
    going, count = exists & (room > 0), tl.zeros_like(state)
    for k in range(K):
        token = tl.load(tokens_A + k * stride, mask=going, other=-1).to(tl.int64)
        state = after(
            state, token, entry, going, k < early,
            is_stop_EV, vocab, has_strings_E, next_EXB, data_B, offset_V, spelled, STRINGS, DONE, STATES,
        )  # fmt: skip
        count += going.to(tl.int32)
        going = going & (state != DONE) & (count < room)
    return state, count


@triton.jit
def after(
    state, token, entry, going, early, is_stop_EV, vocab, has_strings_E, next_EXB, data_B, offset_V, spelled,
    STRINGS: tl.constexpr, DONE: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """States int32 of machines after one token each, where they are `going`; tokens and entries int64. One that is
    `early` does not end the answer: what is complete with it is not looked for again. `spelled` is how many tokens have
    bytes listed, which may be more or fewer than a model can draw (`vocab`)."""
    drawable = going & (token >= 0) & (token < vocab)
    is_stop = tl.load(is_stop_EV + entry * vocab + token, mask=drawable, other=0) != 0
    state = tl.where(is_stop, DONE, state)
    if STRINGS:
        reads = drawable & (token < spelled)
        reads = reads & (tl.load(has_strings_E + entry, mask=reads, other=0) != 0)
        begin = tl.load(offset_V + token, mask=reads, other=0)
        size = tl.load(offset_V + token + 1, mask=reads, other=0) - begin
        for i in range(tl.max(size, 0)):
            # Bytes are read whatever the state, so that they need not wait for it: DONE leads to DONE.
            byte = tl.load(data_B + begin + i, mask=i < size, other=0)
            next_at = next_EXB + (entry * STATES + state) * 256 + byte
            state = tl.where(i < size, tl.load(next_at, mask=i < size, other=0).to(tl.int32), state)
    return tl.where(going & early & (state == DONE), 0, state)
