"""Executes the coordinator's commands on one rank of a model, and sends responses once their results have left the
device. Knows nothing about requests, particles or Ray.

The leader (rank 0) gets commands over the link and hands their bytes to the other ranks of its tensor-parallel group;
every rank executes all of them, so their states stay equal. Only the leader responds."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from services.link import codec
from services.link.base import LAYOUT_VERSION, LeaderEnd, check_envelope, failure_text
from services.pb import particles_pb2 as pb
from smc.executor.model_runner import DraftRunner, TargetRunner
from smc.executor.worker import ModelWorker

CLOSE_SECONDS = 5.0

logger = logging.getLogger(__name__)


class ResponseSender:
    """`waits`: what responses tell of may take a while; a thread waits for it, so that the next command can be carried
    out."""

    def __init__(self, end: LeaderEnd, incarnation: int, *, waits: bool) -> None:
        self._end, self._incarnation = end, incarnation
        self._turn = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[int, Callable[[], pb.WorkResponse]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True) if waits else None
        if self._thread is not None:
            self._thread.start()

    def put(self, sequence: int, respond: Callable[[], pb.WorkResponse]) -> None:
        """Send what `respond` returns for command `sequence`, after all that was put before it."""
        if self._thread is None:
            self._send(respond())
        else:
            self._queue.put((sequence, respond))

    def fail(self, sequence: int, error: Exception) -> None:
        """Report that the worker could not execute a command and stops; other queued responses may never be sent."""
        failure = pb.Failure(message=failure_text(error))
        self._send(
            pb.WorkResponse(version=LAYOUT_VERSION, incarnation=self._incarnation, sequence=sequence, failure=failure)
        )

    def close(self) -> None:
        """After everything has been sent, or has taken too long."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        for sequence, respond in iter(self._queue.get, None):
            try:
                self._send(respond())
            except Exception as error:  # of the device, raised where its work is awaited
                logger.exception("command %d failed", sequence)
                self.fail(sequence, error)
                return

    def _send(self, response: pb.WorkResponse) -> None:
        """A failure is reported by another thread than what was put before it, and an end takes one message at a
        time."""
        with self._turn:
            self._end.send(response)


Respond = Callable[[], pb.WorkResponse]
"""Waits for the results of a response."""
Reconnect = Callable[[int, float], bool]
"""Open the link to the other side's leader of this incarnation, within so many seconds, beside all else; whether it
stands. Raises RuntimeError if it does not come."""


class Rank:
    """Carries out commands on a worker."""

    def __init__(
        self,
        worker: ModelWorker,
        side: DraftRunner | TargetRunner,
        incarnation: int,
        timeout: float,
        reconnect: Reconnect | None = None,
    ) -> None:
        """`reconnect`: of a leader."""
        self.worker, self.side, self.incarnation, self.timeout = worker, side, incarnation, timeout
        self._reconnect_to = reconnect

    def carry_out(self, request: pb.WorkRequest, answers: ResponseSender | None = None) -> None:
        """Execute a command, and give `answers` its response if it has one. Raises LinkError for a message of another
        incarnation."""
        check_envelope(request, self.incarnation)
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
        envelope: dict[str, Any] = {
            "version": LAYOUT_VERSION,
            "incarnation": self.incarnation,
            "sequence": request.sequence,
        }
        return pb.WorkResponse(**envelope, begin_ns=begin, end_ns=end, **result)

    def _round(self, request: pb.WorkRequest, _begin: int) -> Respond:
        reading = self.side.round(codec.to_plan(request.round))

        def respond() -> pb.WorkResponse:
            outcome = codec.round_outcome(reading.result())
            work = [pb.Span(name=name, begin_ns=begin, end_ns=end) for name, (begin, end) in reading.spans().items()]
            begin, end = min(span.begin_ns for span in work), max(span.end_ns for span in work)
            return self._response(request, begin, end, work=work, round=outcome)

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
                outcome.connected = self._reconnect_to(request.reconnect.incarnation, request.reconnect.seconds)
        except RuntimeError as what:
            outcome.error = failure_text(what)
        response = self._response(request, begin, time.monotonic_ns(), reconnect=outcome)
        return lambda: response

    def _ping(self, request: pb.WorkRequest, begin: int) -> Respond:
        response = self._response(request, begin, time.monotonic_ns(), pong=pb.Pong())
        return lambda: response


def lead(rank: Rank, end: LeaderEnd, spread: Callable[[bytes], None] | None) -> None:
    """Serve the coordinator until it sends a stop command. `spread` hands a command to the other ranks. Raises errors
    after reporting them."""
    answers = ResponseSender(end, rank.incarnation, waits=rank.worker.device.type == "cuda")
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
