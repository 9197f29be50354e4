"""A draft's forward passes on a GPU: in one launch where that is faster (`smc.kernels.megakernel`), otherwise in the
launches of `TritonForward`. This is the one place that decides."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from smc.executor.forward import Reader, StaticForward
from smc.executor.graph_runner import RECORDINGS
from smc.executor.invariant_forward import InvariantForward
from smc.executor.triton_forward import TritonForward
from smc.kernels.megakernel import MOST_TOKENS, Megakernel, obstacle, tiles_of
from smc.memory.pages import DUMMY_PAGE
from smc.round.plan import Contexts
from smc.round.tensors import Rows, RowSpans, RowTables
from smc.types import Decoding, ModelRole

POSITIONS = {Contexts.SHORT: 256, Contexts.SINGLE: 2048, Contexts.SHARED: 2048}
"""Positions before each row when the two ways are timed."""
REPLAYS = 10
logger = logging.getLogger(__name__)


class PassKind(NamedTuple):
    """What decides between the ways of running a pass. The same kind always runs in the same way."""

    tiles: int
    """Of the kernel for this number of tokens."""
    queries: int
    contexts: Contexts


class WholePassForward(TritonForward):
    """`TritonForward` that runs passes of few tokens in one launch where it measures that this is faster: each kind of
    pass once, when it first runs. Where every rank has the whole model, the leader's measurement decides for all: the
    two ways round differently, and ranks must draft the same rows. A model that the kernel cannot run has none."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader)
        why = obstacle(self.model, self.pool, reader.width)
        self._whole = None if why else Megakernel(self.model, self.pool, self.rope, reader.width)
        self._is_faster: dict[PassKind, bool] = {}
        self._sharing = reader.sharing
        if why:
            logger.info("no pass of the draft runs in one launch: the kernel %s", why)

    @property
    def workspace_bytes(self) -> int:
        return super().workspace_bytes + (0 if self._whole is None else self._whole.workspace_bytes)

    def __call__(self, tokens_T: Tensor, rows: Rows) -> Tensor:
        if self._whole is not None and len(tokens_T) <= MOST_TOKENS and self._runs_whole(tokens_T, rows):
            return self._whole(tokens_T, rows)
        return super().__call__(tokens_T, rows)

    def check(self) -> None:
        if self._whole is not None:
            self._whole.check()

    def _runs_whole(self, tokens_T: Tensor, rows: Rows) -> bool:
        kind = PassKind(tiles_of(len(tokens_T)), rows.queries, rows.contexts)
        if kind not in self._is_faster:
            if torch.cuda.is_current_stream_capturing():
                return False
            is_faster_1 = torch.tensor([int(self._measure(kind, rows))], device=tokens_T.device)
            self._is_faster[kind] = bool(self._sharing(is_faster_1))
        return self._is_faster[kind]

    def _measure(self, kind: PassKind, like: Rows) -> bool:
        """Return whether one launch is faster for a pass of this kind."""
        assert self._whole is not None
        whole, launches = self._whole, super().__call__
        rows, start_R = timed_rows(kind, like, self), like.spans.start_R
        tokens_T = torch.zeros(len(start_R) * kind.queries, dtype=torch.int64, device=start_R.device)
        one = milliseconds(lambda: whole(tokens_T, rows))
        many = milliseconds(lambda: launches(tokens_T, rows))
        logger.info(
            "draft: passes of %d tokens, %d for a row, %s: %.3f ms in one launch, %.3f ms in many",
            len(tokens_T), kind.queries, kind.contexts.name.lower(), one, many,
        )  # fmt: skip
        return one < many


class InvariantDraftForward(InvariantForward):
    """A draft's passes with `numerics: invariant`: in one order of sums where some answer depends on the draft's bits,
    otherwise, in rounds of walks alone, in whichever way is fastest."""

    def __init__(self, reader: Reader, fastest: StaticForward) -> None:
        """`fastest`: the passes of rounds of walks."""
        super().__init__(reader)
        self._fastest = fastest

    def of(self, decodings: frozenset[Decoding]) -> StaticForward:
        return self if any(ModelRole.DRAFT in each.deciding for each in decodings) else self._fastest

    def check(self) -> None:
        self._fastest.check()


def timed_rows(kind: PassKind, like: Rows, forward: TritonForward) -> Rows:
    """Return the rows of a pass by which the two ways are compared."""
    start = max(0, min(POSITIONS[kind.contexts], forward.longest - kind.queries))
    return rows_at(start, like, pages=forward.pool.keys.shape[1] - 1)


def rows_at(start: int, like: Rows, pages: int) -> Rows:
    """Return rows like these behind `start` positions, which they share. Each of these has a page of its own, as far as
    there are `pages`: kernels are slower at a page that all of them read at once. The pass's own positions have the
    dummy page, so that it stores nothing."""
    position_L = torch.arange(start + like.queries, device=like.tables.table_SL.device)
    table_L = torch.where(position_L < start, position_L % pages + 1, DUMMY_PAGE)
    return like._replace(
        tables=RowTables(table_L.to(like.tables.table_SL.dtype)[None], torch.zeros_like(like.tables.slot_R)),
        spans=RowSpans(torch.full_like(like.spans.start_R, start), torch.full_like(like.spans.count_R, like.queries)),
        groups=like.groups._replace(shared_G=torch.full_like(like.groups.shared_G, start)),
    )


def milliseconds(call: Callable[[], object]) -> float:
    """Return the milliseconds of a call on the GPU when it is replayed from a CUDA graph: the least of three times."""
    torch.cuda.synchronize()
    stream, found = torch.cuda.Stream(), []
    with RECORDINGS, torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            call()
        for _ in range(3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            for _ in range(REPLAYS):
                graph.replay()
            end.record(stream)
            end.synchronize()
            found.append(begin.elapsed_time(end) / REPLAYS)
        del graph
    return min(found)
