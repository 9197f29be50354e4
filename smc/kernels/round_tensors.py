"""Tensors of a round that several kernels read, packed as arguments of kernels, and the growth of answers within
kernels: what `smc.stops.grow` does to states of stop machines. Fields are named as in the objects of `smc.executor`
that hold the tensors; this module knows nothing else about these.

See `smc.executor` for axes; E entries of the tables, X states, B bytes, V vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from smc import stops
from smc.arrays import map_tensors
from smc.stops import StopTables

Packed = TypeVar("Packed", bound="tuple | None")
DONE, STATES = tl.constexpr(stops.DONE), tl.constexpr(stops.MAX_STATES)


class PlanTensors(NamedTuple):
    """Tensors of a `smc.executor.plan.RoundPlan`."""

    slot_A: Tensor
    group_A: Tensor
    particle_A: Tensor
    seed_A: Tensor
    round_A: Tensor
    alpha_A: Tensor
    first_G: Tensor
    size_G: Tensor
    draws_G: Tensor
    kind_G: Tensor
    target_pages_AQ: Tensor
    begin_pages_AP: Tensor
    branch_pages_XB: Tensor


def row_tokens(rows_WX: Tensor) -> int:
    """Return K, the number of tokens of drafted rows (`smc.executor.messages.DraftedRows.all_WX`)."""
    return (len(rows_WX) - 5) // 2


class DistributionTensors(NamedTuple):
    """Parameters of the token distribution of each batch index, of `smc.distributions.DistributionSpec`."""

    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    alpha_R: Tensor


class SlotTensors(NamedTuple):
    """Tensors of a `smc.executor.state.SlotState`."""

    table_SL: Tensor
    base_S: Tensor
    end_S: Tensor
    limit_S: Tensor
    least_S: Tensor
    pending_SQ: Tensor
    pending_S: Tensor
    ended_S: Tensor
    alive_S: Tensor
    text_S: Tensor
    logw_S: Tensor
    entry_S: Tensor


class BlockTensors(NamedTuple):
    """Tensors of a `smc.executor.verify.Blocks`."""

    origin_A: Tensor
    tokens_AQ: Tensor
    logq_AQ: Tensor
    count_A: Tensor
    ended_A: Tensor
    alive_A: Tensor
    logw_A: Tensor
    open_A: Tensor
    run_A: Tensor


class Sizes(NamedTuple):
    """Sizes of a batch."""

    batch_size: int
    groups: int
    rows: int


def fields_of(kind: type[Packed], source: object) -> Packed:
    """Return the attributes of `source` that `kind` names, as a `kind`."""
    return cast(Any, kind)._make(getattr(source, name) for name in cast(Any, kind)._fields)


def contiguous(tensors: Packed) -> Packed:
    """Return the same tuples with every tensor contiguous."""
    return cast(Packed, map_tensors(Tensor.contiguous, tensors))


class Room:
    """Allocates the tensors that a launch writes, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def longs(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=self._device)

    def ints(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self._device)

    def floats(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    def doubles(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float64, device=self._device)

    def bools(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bool, device=self._device)


class TreeTensors(NamedTuple):
    """Tensors of a `smc.executor.draft.TokenTree`, except for `run_4X`."""

    root_X: Tensor
    tokens_XK: Tensor
    logq_XK: Tensor
    tail_XB: Tensor
    count_X: Tensor
    alive_X: Tensor
    ended_X: Tensor
    before_X: Tensor
    text_X: Tensor
    mass_X: Tensor
    last_X: Tensor
    next_X: Tensor
    cut_X: Tensor
    outcome_X: Tensor

    @staticmethod
    def allocate(room: Room, rows: int, tokens: int, pages: int) -> TreeTensors:
        return TreeTensors(
            root_X=room.longs(rows),
            tokens_XK=room.longs(rows, tokens),
            logq_XK=room.floats(rows, tokens),
            tail_XB=room.ints(rows, pages),
            count_X=room.longs(rows),
            alive_X=room.bools(rows),
            ended_X=room.bools(rows),
            before_X=room.longs(rows),
            text_X=room.longs(rows),
            mass_X=room.doubles(rows),
            last_X=room.longs(rows),
            next_X=room.longs(rows),
            cut_X=room.longs(rows),
            outcome_X=room.longs(rows),
        )


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
    """Number of tokens whose bytes are listed: more or fewer than the tokens that a model can draw (`vocab`)."""

    @staticmethod
    def of(tables: StopTables) -> StopTensors:
        vocab, spelled = tables.is_stop_EV.shape[1], len(tables.offset_V) - 1
        return StopTensors(
            tables.is_stop_EV, vocab, tables.has_strings_E, tables.next_EXB, tables.data_B, tables.offset_V, spelled
        )


@triton.jit
def after_all(state, tokens_A, stride, entry, exists, room, early, tables, K: tl.constexpr):
    """Return int32 states after as many of K tokens as there is `room` for, up to the token that ends the answer, and
    the number of those tokens. The first `early` tokens do not end an answer. `tokens_A` points to the first token of
    each sequence; consecutive tokens are `stride` apart."""
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
    `early` token does not end the answer: a stop string that it completes is not looked for again."""
    drawable = going & (token >= 0) & (token < tables.vocab)
    is_stop = tl.load(tables.is_stop_EV + entry * tables.vocab + token, mask=drawable, other=0) != 0
    state = tl.where(is_stop, DONE, state)
    if tables.next_EXB is not None:
        reads = drawable & (token < tables.spelled)
        reads = reads & (tl.load(tables.has_strings_E + entry, mask=reads, other=0) != 0)
        begin = tl.load(tables.offset_V + token, mask=reads, other=0)
        size = tl.load(tables.offset_V + token + 1, mask=reads, other=0) - begin
        for i in range(tl.max(size, 0)):
            # Bytes are read whatever the state is, so that loads need not wait for it: DONE leads to DONE.
            byte = tl.load(tables.data_B + begin + i, mask=i < size, other=0)
            next_at = tables.next_EXB + (entry * STATES + state) * 256 + byte
            state = tl.where(i < size, tl.load(next_at, mask=i < size, other=0).to(tl.int32), state)
    return tl.where(going & early & (state == DONE), 0, state)
