"""How answers grow, on the device: `smc.stops.grow` in one launch, a program for every few places.

Nothing reads the host, and the grid follows from shapes alone: it can be captured in a CUDA graph.

Axes: A places, K tokens, E entries of the tables, X states, B bytes, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smc.stops import DONE, MAX_STATES, Growth, StopTables

BLOCK = 32
"""Places of a program, a warp's lanes: each of them waits for the longest token among them."""


def grow(tables: StopTables, entry_A: Tensor, text_A: Tensor, tokens_AK: Tensor, room_A: Tensor) -> Growth:
    """As `smc.stops.grow`: entry, text, room and tokens int32 or int64."""
    places, k = tokens_AK.shape
    assert tables.is_stop_EV.is_contiguous() and entry_A.shape == text_A.shape == room_A.shape == (places,)
    entry_A, text_A, room_A = entry_A.contiguous(), text_A.contiguous(), room_A.contiguous()
    count_A = torch.empty(places, dtype=torch.int64, device=tokens_AK.device)
    ends_A = torch.empty(places, dtype=torch.bool, device=tokens_AK.device)
    after_A = torch.empty_like(count_A)
    if places:
        _grow[(triton.cdiv(places, BLOCK),)](
            entry_A, text_A, tokens_AK, *tokens_AK.stride(), room_A, count_A, ends_A, after_A, places,
            *table_arguments(tables), K=k, STRINGS=tables.next_EXB is not None, DONE=DONE, STATES=MAX_STATES, BLOCK=BLOCK, num_warps=1,
        )  # fmt: skip
    return Growth(count_A, ends_A, after_A)


def table_arguments(tables: StopTables) -> tuple[object, ...]:
    """What `after` is given of the tables."""
    vocab, spelled = tables.is_stop_EV.shape[1], len(tables.offset_V) - 1
    return tables.is_stop_EV, vocab, tables.has_strings_E, tables.next_EXB, tables.data_B, tables.offset_V, spelled


@triton.jit
def _grow(
    entry_A, text_A, tokens_AK, stride_a, stride_k, room_A, count_A, ends_A, after_A, places,
    is_stop_EV, vocab, has_strings_E, next_EXB, data_B, offset_V, spelled,
    K: tl.constexpr, STRINGS: tl.constexpr, DONE: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`spelled` is how many tokens have bytes listed, which may be more or fewer than a model can draw (`vocab`)."""
    a = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = a < places
    entry = tl.load(entry_A + a, mask=inside, other=0).to(tl.int64)
    state = tl.load(text_A + a, mask=inside, other=0).to(tl.int32)
    room = tl.load(room_A + a, mask=inside, other=0)
    tokens = tokens_AK + a.to(tl.int64) * stride_a
    count = tl.zeros((BLOCK,), tl.int64)
    going = inside & (room > 0)
    for k in range(K):
        token = tl.load(tokens + k * stride_k, mask=going, other=-1).to(tl.int64)
        state = after(
            state, token, entry, going, is_stop_EV, vocab, has_strings_E, next_EXB, data_B, offset_V, spelled, STRINGS, DONE, STATES
        )
        count += going.to(tl.int64)
        going = going & (state != DONE) & (count < room)
    tl.store(count_A + a, count, mask=inside)
    tl.store(ends_A + a, (count >= room) | (state == DONE), mask=inside)
    tl.store(after_A + a, state.to(tl.int64), mask=inside)


@triton.jit
def after(
    state, token, entry, going, is_stop_EV, vocab, has_strings_E, next_EXB, data_B, offset_V, spelled,
    STRINGS: tl.constexpr, DONE: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """States int32 of machines after one token each, where they are `going`; tokens and entries int64."""
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
    return state
