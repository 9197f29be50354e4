"""What one rank of a model does with the commands of the coordinator. Knows nothing about requests, particles or Ray.

The leader (rank 0) gets commands over the link and hands their bytes to the other ranks of its tensor-parallel group; every
rank carries out all of them, so tables and pools stay equal. Only the leader answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from services.link import codec, rounds
from services.link.base import LAYOUT_VERSION, LeaderEnd, PeerEnd, check_envelope
from services.pb import particles_pb2 as pb
from services.workers.answers import Answers
from smc.engine.messages import SampleResult
from smc.engine.worker import ModelWorker
from smc.resident.sides import DraftSide, PlainSide, TargetSide


@dataclass(frozen=True)
class Taken:
    """First tokens that the draft publishes, as the target's `ExtendBatch.next_of`."""

    source: PeerEnd
    command: pb.ExtendCommand
    device: torch.device
    timeout: float

    def result(self) -> SampleResult:
        tokens_RF = torch.empty(self.command.published_rows, self.command.published_branches, dtype=torch.int32, device=self.device)
        self.source.take("first", self.command.published, tokens_RF, self.timeout)
        return SampleResult(tokens_RFK=tokens_RF[..., None], logq_RFK=np.zeros(0, dtype=np.float32))


@dataclass(frozen=True)
class Resident:
    """This rank's parts in resident rounds."""

    together: DraftSide | TargetSide
    alone: PlainSide

    def of(self, alone: bool) -> DraftSide | TargetSide | PlainSide:
        return self.alone if alone else self.together


class Rank:
    """Carries out commands on a worker."""

    def __init__(
        self, worker: ModelWorker, epoch: int, timeout: float, *, leads: bool, peer: PeerEnd | None = None, resident: Resident | None = None
    ) -> None:
        self.worker, self.epoch, self.timeout, self.leads = worker, epoch, timeout, leads
        self._peer, self._resident = peer, resident
        self._silent = {"move": self._move, "merge": self._merge, "join": self._join, "leave": self._leave}
        self._answered = {"sample": self._sample, "extend": self._extend, "status": self._status, "ping": self._ping}

    def carry_out(self, request: pb.WorkRequest, answers: Answers | None = None) -> None:
        """Do it, and give `answers` the response, for those commands that have one. Raises LinkError for a message of another life."""
        check_envelope(request, self.epoch)
        kind = request.WhichOneof("command")
        if kind in self._silent:
            self._silent[kind](request)
        elif kind == "round":
            self._round(request, answers)
        else:
            begin = time.monotonic_ns()
            result = {"pong" if kind == "ping" else kind: self._answered[kind](request)}
            if answers is not None:
                response = self._response(request, begin, time.monotonic_ns(), **result)
                answers.put(lambda: response)

    def _response(self, request: pb.WorkRequest, begin: int, end: int, **result) -> pb.WorkResponse:
        envelope = {"version": LAYOUT_VERSION, "epoch": self.epoch, "sequence": request.sequence}
        return pb.WorkResponse(**envelope, begin_ns=begin, end_ns=end, **result)

    def _move(self, request: pb.WorkRequest) -> None:
        self.worker.move(codec.to_moves(request.move))

    def _merge(self, request: pb.WorkRequest) -> None:
        self.worker.merge(codec.to_merge(request.merge))

    def _join(self, request: pb.WorkRequest) -> None:
        self._resident.of(request.join.alone).join(rounds.to_start(request.join, self.worker.name))

    def _leave(self, request: pb.WorkRequest) -> None:
        self._resident.of(request.leave.alone).leave(rounds.to_slots(request.leave))

    def _round(self, request: pb.WorkRequest, answers: Answers | None) -> None:
        side, plan = self._resident.of(request.round.alone), rounds.to_plan(request.round)
        drafts = isinstance(side, DraftSide)
        reading = side.draft(plan) if drafts else side.round(plan)

        def respond() -> pb.WorkResponse:
            result = reading.result()
            begin, end = reading.spans()[self.worker.name]
            return self._response(request, begin, end, round=rounds.round_outcome(result) if result else pb.RoundOutcome())

        if answers is not None:
            answers.put(respond)
        if drafts:
            side.follow()

    def _sample(self, request: pb.WorkRequest) -> pb.SampleOutcome | None:
        if self._peer is not None:
            self.worker.publish = lambda tokens_RF: self._peer.give("first", request.sequence, tokens_RF.int())
        result = self.worker.sample(codec.to_sample_batch(request.sample)).result()
        return codec.sample_outcome(result) if self.leads else None

    def _extend(self, request: pb.WorkRequest) -> pb.ExtendOutcome | None:
        command = request.extend
        if not self.leads:
            # Scores and draws are the leader's business; the others only have to hold its share of keys and values.
            self.worker.extend(replace(codec.to_extend_batch(command, None), labels_T=None, draws=None, law=None))
            return None
        ahead = Taken(self._peer, command, self.worker.device, self.timeout) if command.published else None
        return codec.extend_outcome(self.worker.extend(codec.to_extend_batch(command, ahead)).result())

    def _status(self, _request: pb.WorkRequest) -> pb.StatusOutcome:
        tables = self.worker.tables
        tables.check()
        return pb.StatusOutcome(pages_free=tables.allocator.num_free, pages_total=tables.allocator.capacity)

    def _ping(self, _request: pb.WorkRequest) -> pb.Pong:
        return pb.Pong()


def lead(rank: Rank, end: LeaderEnd, spread: Callable[[bytes], None] | None) -> None:
    """Serve the coordinator until it says stop. `spread` hands a command to the other ranks. Raises what went wrong, after telling it."""
    answers = Answers(end, waits=rank.worker.device.type == "cuda")
    try:
        while True:
            request = end.receive(rank.timeout)
            if spread is not None:
                spread(request.SerializeToString())
            if request.WhichOneof("command") == "stop":
                return
            try:
                rank.carry_out(request, answers)
            except Exception as error:
                failure = pb.Failure(message=f"{type(error).__name__}: {error}")
                answers.put(lambda: pb.WorkResponse(version=LAYOUT_VERSION, epoch=rank.epoch, sequence=request.sequence, failure=failure))  # noqa: B023
                raise
    finally:
        answers.close()


def follow(rank: Rank, receive: Callable[[], bytes]) -> None:
    """Carry out what the leader hands on, until it is `stop`."""
    while True:
        request = pb.WorkRequest.FromString(receive())
        if request.WhichOneof("command") == "stop":
            return
        rank.carry_out(request)
