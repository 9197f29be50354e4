"""Workers in other processes, used over a link through the engine's interface to workers. A worker has one model, or
both.

A result is read when the engine asks for it; the begin and end times that the worker reports go into a `Timeline`."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar, cast
from weakref import WeakValueDictionary

import numpy as np

from services.link.base import SHARED, End, LinkError
from services.link.messages import (
    REQUESTS,
    RESPONSES,
    SILENT,
    Command,
    Compile,
    Failure,
    MemoryQuery,
    MemoryUse,
    ModelResult,
    ModelResults,
    Ping,
    Reconnect,
    ReconnectResult,
    Stop,
    WorkRequest,
    WorkResponse,
    check_incarnation,
)
from smc.api.constraint import Constraint
from smc.constraints import MOST_KEPT
from smc.executor.messages import ModelLost, PromptBatch, PromptResult
from smc.executor.round_executor import RequestedRound
from smc.round.plan import RoundPlan, SequenceHandoff
from smc.scheduler.stats import Timeline
from smc.types import ModelRole, Numerics

CLOCK_PINGS = 5
OWED_SECONDS = 1.0
"""Silence after which a worker that owes responses is pinged, too. By then it has usually sent them, and nobody reads
them: that of a prompt whose request has ended meanwhile, say."""

Result = TypeVar("Result")


class WorkerFailed(LinkError):
    """The worker has reported an error, and its process ends."""

    def __init__(self, name: str, what: str) -> None:
        """`name`: as of a `RemoteWorker`."""
        worker = "the worker of both models" if name == SHARED else f"the {name} model's worker"
        super().__init__(f"{worker} failed: {what}")
        self.began_here = not what.startswith(LinkError.__name__)
        """See `LinkError`; False if the worker merely lost its link to the other worker."""
        self._name, self._what = name, what

    def __reduce__(self) -> tuple[type[WorkerFailed], tuple[str, str]]:
        return WorkerFailed, (self._name, self._what)


@dataclass(eq=False)
class RemoteCommand:
    """A prompt batch or a round that has been requested from a worker."""

    worker: RemoteWorker
    sequence: int
    _results: ModelResults | None = None

    def of(self, role: ModelRole) -> ModelResult:
        """Wait for the results; return that of one model. Raises as `RemotePending.result`."""
        if self._results is None:
            self._results = cast(ModelResults, self.worker.response(self.sequence).result)
        return self._results.by_role[role]


@dataclass(frozen=True)
class RemotePending(Generic[Result]):
    """One model's result of what has been requested from its worker."""

    command: RemoteCommand
    role: ModelRole

    def result(self) -> Result:
        """Wait for the result. Raises LinkError or ModelLost if the worker is gone, silent for too long, or has
        failed."""
        return cast(Result, self.command.of(self.role).result)

    def spans(self) -> dict[str, tuple[int, int]]:
        """Return the work that the model did for this result: name -> begin and end in nanoseconds of this process's
        clock. A model's pass has the name of its role. Call it after `result`."""
        return self.command.worker.spans(self.command.of(self.role))

    def failures(self) -> dict[int, str]:
        """See `smc.executor.messages.Pending.failures`."""
        return self.command.of(self.role).failures


class RemoteWorker:
    """A process that holds one model or both, or the leader of such processes, over a link. `timeout` limits every
    wait, in seconds. `timeline` records the worker's work."""

    def __init__(
        self,
        name: str,
        end: End,
        incarnation: int,
        timeout: float,
        timeline: Timeline,
        *,
        may_be_lost: bool = False,
    ) -> None:
        """`name`: `draft`, `target` or `shared`, after the models that it holds. `may_be_lost`: the other model goes on
        without this worker, which has one. A broken link is then raised as ModelLost, and only where results are
        awaited."""
        self.name, self.incarnation, self.timeout, self.timeline = name, incarnation, timeout, timeline
        self._end, self._may_be_lost = end, may_be_lost
        self._lost: LinkError | None = None
        self._sequence = 0
        self._unanswered = 0
        self._last_sent = time.monotonic()
        self._arrived: dict[int, WorkResponse] = {}
        self._pending: WeakValueDictionary[int, RemoteCommand] = WeakValueDictionary()
        """Results that may still be read."""
        self._awaited = 0
        """Sequence number of the response that is awaited now."""
        self._clock_offset_ns = 0
        self._compiled = 0
        """Number of constraints that the worker has compiled."""
        self._numbers: OrderedDict[Constraint, int] = OrderedDict()
        """Numbers of the constraints that the worker keeps."""
        self._asked = 0

    def ask(self, command: PromptBatch | RoundPlan, role: ModelRole | None = None) -> RemoteCommand:
        """Request a prompt batch from one model of this worker, or a round from all that take part in it. The result of
        a round is a RoundResult, or a DraftReport from the draft in a round of both models."""
        asked = RemoteCommand(self, self.send(command, role))
        self._pending[asked.sequence] = asked
        return asked

    def send(self, command: Command, role: ModelRole | None = None) -> int:
        """Send a command. Returns its sequence number."""
        self._sequence += 1
        self._last_sent = time.monotonic()
        self._unanswered += not isinstance(command, SILENT)
        if self._lost is not None:
            return self._sequence
        try:
            self._end.send(REQUESTS.encode(WorkRequest(self.incarnation, self._sequence, command, role)))
        except LinkError as error:
            if not self._may_be_lost:
                raise
            self._lost = error
        return self._sequence

    def compile(self, constraint: Constraint) -> int:
        if constraint not in self._numbers:
            self._asked += 1
            self._numbers[constraint] = self._asked
            self.send(Compile(constraint))
            # The worker keeps `MOST_KEPT`, and those that run longest of all; so it may forget others before this does.
            while len(self._numbers) > MOST_KEPT // 2:
                self._numbers.popitem(last=False)
        self._numbers.move_to_end(constraint)
        return self._numbers[constraint]

    def has_compiled(self, number: int) -> bool:
        """Whether a constraint is known to have been compiled, or refused; True, too, if the worker is lost."""
        return self._compiled >= number or self.lost

    def ping(self) -> None:
        """Wait for a sign of life from the worker. Raises LinkError or ModelLost if it does not answer in time."""
        self.response(self.send(Ping()))

    def keep_alive(self, silence: float) -> None:
        """Ping the worker if it has been sent nothing for `silence` seconds. If it owes responses, for at least
        `OWED_SECONDS`: the ping waits for them. Raises as `ping`."""
        least = max(silence, OWED_SECONDS) if self._unanswered else silence
        if time.monotonic() - self._last_sent >= least:
            self.ping()

    def status(self) -> MemoryUse:
        """Return the worker's memory use."""
        return cast(MemoryUse, self.response(self.send(MemoryQuery())).result)

    def stop(self) -> None:
        self.send(Stop())

    def reconnect(self, incarnation: int, seconds: float) -> bool:
        """Make the worker open a link to the other model's leader of this incarnation within `seconds`. Called again,
        checks the link. Returns whether it is up. Raises LinkError if that leader does not connect."""
        result = cast(ReconnectResult, self.response(self.send(Reconnect(incarnation, seconds))).result)
        if result.error:
            raise LinkError(f"the {self.name} has no link to the other side: {result.error}")
        return result.connected

    @property
    def lost(self) -> bool:
        """Whether the worker is known to be lost."""
        return self._lost is not None

    def set_lost(self, why: str) -> None:
        """Record that the worker is gone, as reported by others."""
        self._lost = self._lost or LinkError(why)

    def close(self) -> None:
        """Close the link. Results in flight are lost."""
        self.set_lost("its link has been closed")
        self._end.close()

    def set_clock(self) -> None:
        """Estimate the offset between the worker's clock and this process's, from the fastest of a few pings."""
        samples = []
        for _ in range(CLOCK_PINGS):
            before = time.monotonic_ns()
            response = self.response(self.send(Ping()))
            after = time.monotonic_ns()
            samples.append((after - before, (before + after - response.begin_ns - response.end_ns) // 2))
        _, self._clock_offset_ns = min(samples)

    def response(self, sequence: int) -> WorkResponse:
        """Wait for the response to command `sequence`. Other responses that arrive meanwhile are kept as long as they
        may still be read."""
        try:
            if self._lost is None:
                return self._response(sequence)
        except LinkError as error:
            if not self._may_be_lost:
                raise
            self._lost = error
        raise ModelLost(ModelRole(self.name), str(self._lost)) from self._lost

    def _response(self, sequence: int) -> WorkResponse:
        self._awaited = sequence
        if sequence not in self._arrived:
            begin = time.monotonic_ns()
            while sequence not in self._arrived:
                self._take(RESPONSES.decode(self._end.receive(self.timeout)))
            self.timeline.waited(begin, time.monotonic_ns())
        return self._arrived.pop(sequence)

    def _take(self, response: WorkResponse) -> None:
        check_incarnation(response, self.incarnation)
        if isinstance(response.result, Failure):
            raise WorkerFailed(self.name, response.result.message)
        if response.sequence in self._pending or response.sequence == self._awaited:
            self._arrived[response.sequence] = response
        for sequence in [s for s in self._arrived if s not in self._pending and s != self._awaited]:
            del self._arrived[sequence]
        self._unanswered -= 1
        self._compiled = max(self._compiled, response.compiled)
        if isinstance(response.result, ModelResults):
            for role, result in response.result.by_role.items():
                for name, span in self.spans(result).items():
                    self.timeline.worked(role, name, *span)

    def spans(self, result: ModelResult) -> dict[str, tuple[int, int]]:
        """Return the work that a result reports, in times of this process's clock."""
        offset = self._clock_offset_ns
        return {name: (begin + offset, end + offset) for name, (begin, end) in result.work.items()}


@dataclass(frozen=True)
class RemoteModel:
    """A `smc.executor.messages.Worker`: one model of a worker."""

    worker: RemoteWorker
    role: ModelRole
    numerics: Numerics

    def run_prompts(self, batch: PromptBatch) -> RemotePending[PromptResult[np.ndarray]]:
        return RemotePending(self.worker.ask(batch, self.role), self.role)

    def compile(self, constraint: Constraint) -> int:
        return self.worker.compile(constraint)

    def has_compiled(self, number: int) -> bool:
        return self.worker.has_compiled(number)

    def keep_alive(self, silence: float) -> None:
        self.worker.keep_alive(silence)


class RemotePair:
    """A `smc.executor.round_executor.RoundExecutor` over the links to the workers of both models, or to one that holds
    both. The models exchange tensors directly."""

    pipelined = True

    def __init__(self, workers: Mapping[ModelRole, RemoteWorker]) -> None:
        """`workers`: the worker that holds each model now."""
        self._workers = workers

    def join(self, role: ModelRole, group: SequenceHandoff) -> None:
        self._workers[role].send(group, role)

    def round(self, plan: RoundPlan[np.ndarray]) -> RequestedRound:
        holders = [self._workers[role] for role in plan.kind.roles]
        commands = {worker: worker.ask(plan) for worker in dict.fromkeys(holders)}
        return RequestedRound({role: RemotePending(commands[self._workers[role]], role) for role in plan.kind.roles})
