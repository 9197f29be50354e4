"""What one rank of a model does with the commands of the coordinator. Knows nothing about requests, particles or Ray.

The leader (rank 0) gets commands over the link and hands their bytes to the other ranks of its tensor-parallel group;
every rank carries out all of them, so what they hold stays equal. Only the leader answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from services.link import codec
from services.link.base import LAYOUT_VERSION, LeaderEnd, check_envelope, failure_text
from services.pb import particles_pb2 as pb
from services.workers.answers import Answers
from smc.executor.model_runner import DraftRunner, TargetRunner
from smc.executor.worker import ModelWorker

Respond = Callable[[], pb.WorkResponse]
"""Waits for what a response tells of."""
Reconnect = Callable[[int, float], bool]
"""Open the link to the other side's leader of this epoch, within so many seconds, beside all else; whether it stands.
Raises RuntimeError if it does not come."""


class Rank:
    """Carries out commands on a worker."""

    def __init__(
        self,
        worker: ModelWorker,
        side: DraftRunner | TargetRunner,
        epoch: int,
        timeout: float,
        reconnect: Reconnect | None = None,
    ) -> None:
        """`reconnect`: of a leader."""
        self.worker, self.side, self.epoch, self.timeout = worker, side, epoch, timeout
        self._reconnect_to = reconnect

    def carry_out(self, request: pb.WorkRequest, answers: Answers | None = None) -> None:
        """Do it, and give `answers` the response, for those commands that have one. Raises LinkError for a message of
        another life."""
        check_envelope(request, self.epoch)
        kind = request.WhichOneof("command")
        if kind == "join":
            self.side.join(codec.to_join(request.join))
            return
        begin = time.monotonic_ns()
        carry_out = {
            "round": self._round,
            "prompt": self._prompt,
            "status": self._status,
            "ping": self._ping,
            "reconnect": self._reconnect,
        }
        respond = carry_out[kind](request, begin)
        if answers is not None:
            answers.put(request.sequence, respond)

    def _response(self, request: pb.WorkRequest, begin: int, end: int, **result) -> pb.WorkResponse:
        envelope: dict[str, Any] = {"version": LAYOUT_VERSION, "epoch": self.epoch, "sequence": request.sequence}
        return pb.WorkResponse(**envelope, begin_ns=begin, end_ns=end, **result)

    def _round(self, request: pb.WorkRequest, _begin: int) -> Respond:
        reading = self.side.round(codec.to_plan(request.round))

        def respond() -> pb.WorkResponse:
            outcome = codec.round_outcome(reading.result())
            work = [pb.Span(name=name, begin_ns=begin, end_ns=end) for name, (begin, end) in reading.spans().items()]
            return self._response(request, work[0].begin_ns, work[-1].end_ns, work=work, round=outcome)

        return respond

    def _prompt(self, request: pb.WorkRequest, _begin: int) -> Respond:
        pending = self.worker.run_prompts(codec.to_prompt_batch(request.prompt))

        def respond() -> pb.WorkResponse:
            outcome = codec.prompt_outcome(pending.result())
            ((begin, end),) = pending.spans().values()
            return self._response(request, begin, end, prompt=outcome)

        return respond

    def _status(self, request: pb.WorkRequest, begin: int) -> Respond:
        device, stages = self.worker.device, self.side.stages
        device_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        outcome = pb.StatusOutcome(
            device_bytes=device_bytes, recorded_rounds=stages.recorded_keys, recorded_bytes=stages.recorded_bytes
        )
        return lambda: self._response(request, begin, time.monotonic_ns(), status=outcome)

    def _reconnect(self, request: pb.WorkRequest, begin: int) -> Respond:
        outcome = pb.ReconnectOutcome()
        try:
            if self._reconnect_to is not None:
                outcome.connected = self._reconnect_to(request.reconnect.epoch, request.reconnect.seconds)
        except RuntimeError as what:
            outcome.error = failure_text(what)
        response = self._response(request, begin, time.monotonic_ns(), reconnect=outcome)
        return lambda: response

    def _ping(self, request: pb.WorkRequest, begin: int) -> Respond:
        response = self._response(request, begin, time.monotonic_ns(), pong=pb.Pong())
        return lambda: response


def lead(rank: Rank, end: LeaderEnd, spread: Callable[[bytes], None] | None) -> None:
    """Serve the coordinator until it says stop. `spread` hands a command to the other ranks. Raises what went wrong,
    after telling it."""
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
