"""What one rank of a model does with the commands of the coordinator. Knows nothing about requests, particles or Ray.

The leader (rank 0) gets commands over the link and hands their bytes to the other ranks of its tensor-parallel group; every
rank carries out all of them, so tables and pools stay equal. Only the leader answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.link import codec
from services.link.base import LAYOUT_VERSION, LeaderEnd, check_envelope
from services.pb import particles_pb2 as pb
from services.workers.answers import Answers
from smc.engine.worker import ModelWorker
from smc.resident.sides import DraftSide, PlainSide, TargetSide


@dataclass(frozen=True)
class Sides:
    """This rank's parts in rounds."""

    together: DraftSide | TargetSide
    alone: PlainSide

    def of(self, alone: bool) -> DraftSide | TargetSide | PlainSide:
        return self.alone if alone else self.together


class Rank:
    """Carries out commands on a worker."""

    def __init__(self, worker: ModelWorker, sides: Sides, epoch: int, timeout: float) -> None:
        self.worker, self.sides, self.epoch, self.timeout = worker, sides, epoch, timeout
        self._silent = {"release": self._release, "join": self._join, "leave": self._leave}
        self._answered = {"prompt": self._prompt, "status": self._status, "ping": self._ping}

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
                answers.put(request.sequence, lambda: response)

    def _response(self, request: pb.WorkRequest, begin: int, end: int, **result) -> pb.WorkResponse:
        envelope = {"version": LAYOUT_VERSION, "epoch": self.epoch, "sequence": request.sequence}
        return pb.WorkResponse(**envelope, begin_ns=begin, end_ns=end, **result)

    def _release(self, request: pb.WorkRequest) -> None:
        self.worker.release(codec.to_rows(request.release))

    def _join(self, request: pb.WorkRequest) -> None:
        self.sides.of(request.join.alone).join(codec.to_start(request.join))

    def _leave(self, request: pb.WorkRequest) -> None:
        self.sides.of(request.leave.alone).leave(codec.to_slots(request.leave))

    def _round(self, request: pb.WorkRequest, answers: Answers | None) -> None:
        side, plan = self.sides.of(request.round.alone), codec.to_plan(request.round)
        drafts = isinstance(side, DraftSide)
        reading = side.draft(plan) if drafts else side.round(plan)

        def respond() -> pb.WorkResponse:
            result = reading.result()
            work = [pb.Span(name=name, begin_ns=begin, end_ns=end) for name, (begin, end) in reading.spans().items()]
            outcome = codec.round_outcome(result) if result else pb.RoundOutcome()
            return self._response(request, work[0].begin_ns, work[-1].end_ns, work=work, round=outcome)

        if answers is not None:
            answers.put(request.sequence, respond)
        if drafts:
            side.follow()

    def _prompt(self, request: pb.WorkRequest) -> pb.PromptOutcome:
        return codec.prompt_outcome(self.worker.run_prompts(codec.to_prompt_batch(request.prompt)).result())

    def _status(self, _request: pb.WorkRequest) -> pb.StatusOutcome:
        tables = self.worker.tables
        tables.check()
        allocator, device = tables.allocator, self.worker.device
        device_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        return pb.StatusOutcome(pages_free=allocator.num_free, pages_total=allocator.capacity, device_bytes=device_bytes)

    def _ping(self, _request: pb.WorkRequest) -> pb.Pong:
        return pb.Pong()


def lead(rank: Rank, end: LeaderEnd, spread: Callable[[bytes], None] | None) -> None:
    """Serve the coordinator until it says stop. `spread` hands a command to the other ranks. Raises what went wrong, after telling it."""
    answers = Answers(end, rank.epoch, waits=rank.worker.device.type == "cuda")
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
                answers.fail(request.sequence, error)
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
