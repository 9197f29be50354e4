"""The growth of answers within kernels: what `smc.stops.grow` does to states of stop machines. `tables` is a
`smc.stops.StopTables`."""

from __future__ import annotations

import triton
import triton.language as tl

from smc import stops

START, DONE, STATES = tl.constexpr(stops.START), tl.constexpr(stops.DONE), tl.constexpr(stops.MAX_STATES)
ENDS_EARLY = tl.constexpr(stops.ENDS_EARLY)


@triton.jit
def after_all(state, tokens_A, stride, entry, exists, room, early, tables, K: tl.constexpr):
    """Return int32 states after as many of K tokens as there is `room` for, up to the token that ends the answer, and
    the number of those tokens. The first `early` tokens end an answer only if they are `ENDS_EARLY`. `tokens_A` points
    to the first token of each sequence; consecutive tokens are `stride` apart."""
    going, count = exists & (room > 0), tl.zeros_like(state)
    for k in range(K):
        token = tl.load(tokens_A + k * stride, mask=going, other=-1).to(tl.int64)
        state = after(state, token, entry, going, k < early, tables)
        count += going.to(tl.int32)
        going = going & (state != DONE) & (count < room)
    return state, count


@triton.jit
def after(state, token, entry, going, early, tables):
    """Return int32 states of machines after one token each, where they are `going`; tokens and entries are int64. An
    `early` token ends the answer only if it is `ENDS_EARLY`: a stop string that it completes is not looked for
    again."""
    drawable = going & (token >= 0) & (token < tables.vocab)
    stops_by = tl.load(tables.is_stop_ZV + entry * tables.vocab + token, mask=drawable, other=0)
    state = tl.where(stops_by != 0, DONE, state)
    reads = drawable & (token < tables.spelled)
    reads = reads & (tl.load(tables.has_strings_Z + entry, mask=reads, other=0) != 0)
    begin = tl.load(tables.offset_V + token, mask=reads, other=0)
    size = tl.load(tables.offset_V + token + 1, mask=reads, other=0) - begin
    for i in range(tl.max(size, 0)):
        # Bytes are read whatever the state is, so that loads need not wait for it: DONE leads to DONE.
        byte = tl.load(tables.data_P + begin + i, mask=i < size, other=0)
        next_at = tables.next_ZYP + (entry * STATES + state) * 256 + byte
        state = tl.where(i < size, tl.load(next_at, mask=i < size, other=0).to(tl.int32), state)
    return tl.where(going & early & (stops_by != ENDS_EARLY) & (state == DONE), START, state)
