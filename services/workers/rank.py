"""What one rank of a model does with the commands of the coordinator. Knows nothing about requests, particles or Ray.

The leader (rank 0) gets commands over the link and hands their bytes to the other ranks of its tensor-parallel group; every
rank carries out all of them, so tables and pools stay equal. Only the leader answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from services.link import codec
from services.link.base import LAYOUT_VERSION, LeaderEnd, PublishEnd, TakeEnd, check_envelope
from services.pb import particles_pb2 as pb
from smc.engine.messages import SampleResult
from smc.engine.worker import ModelWorker


@dataclass(frozen=True)
class Taken:
    """First tokens that the draft publishes, as the target's `ExtendBatch.next_of`."""

    source: TakeEnd
    command: pb.ExtendCommand
    timeout: float

    def result(self) -> SampleResult:
        shape = (self.command.published_rows, self.command.published_branches)
        tokens_RF = self.source.take(self.command.published, *shape, self.timeout)
        return SampleResult(tokens_RFK=tokens_RF[..., None], logq_RFK=np.zeros(0, dtype=np.float32))


class Rank:
    """Carries out commands on a worker."""

    def __init__(self, worker: ModelWorker, epoch: int, timeout: float, *, leads: bool) -> None:
        self.worker, self.epoch, self.timeout, self.leads = worker, epoch, timeout, leads
        self.publisher: PublishEnd | None = None
        self.source: TakeEnd | None = None

    def carry_out(self, request: pb.WorkRequest) -> pb.WorkResponse | None:
        """Do it. The response, for those commands that have one. Raises LinkError for a message of another life."""
        check_envelope(request, self.epoch)
        kind = request.WhichOneof("command")
        if kind == "move":
            self.worker.move(codec.to_moves(request.move))
            return None
        if kind == "merge":
            self.worker.merge(codec.to_merge(request.merge))
            return None
        begin = time.monotonic_ns()
        result = {"sample": self._sample, "extend": self._extend, "status": self._status, "ping": self._ping}[kind](request)
        envelope = {"version": LAYOUT_VERSION, "epoch": self.epoch, "sequence": request.sequence}
        return pb.WorkResponse(**envelope, begin_ns=begin, end_ns=time.monotonic_ns(), **{kind if kind != "ping" else "pong": result})

    def _sample(self, request: pb.WorkRequest) -> pb.SampleOutcome | None:
        if self.publisher is not None:
            self.worker.publish = lambda tokens_RF: self.publisher.publish(request.sequence, tokens_RF)
        result = self.worker.sample(codec.to_sample_batch(request.sample)).result()
        return codec.sample_outcome(result) if self.leads else None

    def _extend(self, request: pb.WorkRequest) -> pb.ExtendOutcome | None:
        command = request.extend
        if not self.leads:
            # Scores and draws are the leader's business; the others only have to hold its share of keys and values.
            self.worker.extend(replace(codec.to_extend_batch(command, None), labels_T=None, draws=None, law=None))
            return None
        ahead = Taken(self.source, command, self.timeout) if command.published else None
        return codec.extend_outcome(self.worker.extend(codec.to_extend_batch(command, ahead)).result())

    def _status(self, _request: pb.WorkRequest) -> pb.StatusOutcome:
        tables = self.worker.tables
        tables.check()
        return pb.StatusOutcome(pages_free=tables.allocator.num_free, pages_total=tables.allocator.capacity)

    def _ping(self, _request: pb.WorkRequest) -> pb.Pong:
        return pb.Pong()


def lead(rank: Rank, end: LeaderEnd, spread: Callable[[bytes], None] | None) -> None:
    """Serve the coordinator until it says stop. `spread` hands a command to the other ranks. Raises what went wrong, after telling it."""
    while True:
        request = end.receive(rank.timeout)
        if spread is not None:
            spread(request.SerializeToString())
        if request.WhichOneof("command") == "stop":
            return
        try:
            response = rank.carry_out(request)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            failure = pb.Failure(message=message)
            end.send(pb.WorkResponse(version=LAYOUT_VERSION, epoch=rank.epoch, sequence=request.sequence, failure=failure))
            raise
        if response is not None:
            end.send(response)


def follow(rank: Rank, receive: Callable[[], bytes]) -> None:
    """Carry out what the leader hands on, until it is `stop`."""
    while True:
        request = pb.WorkRequest.FromString(receive())
        if request.WhichOneof("command") == "stop":
            return
        rank.carry_out(request)
