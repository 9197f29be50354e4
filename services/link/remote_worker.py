"""Workers in other processes, with the engine's interface to workers, over a link. Rounds are timed here, too.

Results are read when the engine asks for them; the worker's begin and end times go into a `Timeline`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from services.link import codec
from services.link.base import LAYOUT_VERSION, CoordinatorEnd, LinkError, check_envelope
from services.pb import particles_pb2 as pb
from smc.executor.messages import DraftReport, ModelLost, PromptBatch, PromptResult, RoundResult
from smc.executor.model_runner import LocalRound
from smc.executor.plan import Program, RoundPlan, SequenceHandoff
from smc.scheduler.stats import Timeline
from smc.types import ModelRole

CLOCK_PINGS = 5
SILENT = frozenset({"join", "stop"})
"""Commands that have no response."""


Result = TypeVar("Result")


class WorkerFailed(LinkError):
    """The worker has reported an error, and ends."""

    def __init__(self, role: ModelRole, what: str) -> None:
        super().__init__(f"the {role} model's worker failed: {what}")
        self.role = role
        self.began_here = not what.startswith(LinkError.__name__)
        """It did not merely lose its link to the other worker."""
        self._what = what

    def __reduce__(self) -> tuple[type[WorkerFailed], tuple[str, str]]:
        return WorkerFailed, (self.role, self._what)


@dataclass(eq=False)
class RemotePending(Generic[Result]):
    """A result that has been requested from the worker."""

    worker: RemoteWorker
    sequence: int
    decode: Callable[[pb.WorkResponse], Result]
    _value: Any = field(default=None, init=False)
    _done: bool = field(default=False, init=False)
    _spans: dict[str, tuple[int, int]] = field(default_factory=dict, init=False)

    def result(self) -> Result:
        """Waits for it. Raises LinkError, or SideLost, if the worker is gone, silent for too long, or has failed."""
        if not self._done:
            response = self.worker.response(self.sequence)
            self._spans = self.worker.spans(response)
            self._value, self._done = self.decode(response), True
        return self._value

    def spans(self) -> dict[str, tuple[int, int]]:
        """What the worker did for it, and when, nanoseconds of our clock; its model's pass has the name of its side.
        After `result`."""
        return self._spans


class RemoteWorker:
    """`smc.executor.messages.Worker` over a link. `side` is `draft` or `target`; `timeout` bounds every wait, in
    seconds."""

    def __init__(
        self,
        role: ModelRole,
        end: CoordinatorEnd,
        incarnation: int,
        timeout: float,
        timeline: Timeline,
        *,
        may_be_lost: bool = False,
    ) -> None:
        """`may_be_lost`: the other side goes on without it. A broken link is then raised as SideLost, and only where
        its results are awaited."""
        self.role, self.incarnation, self.timeout = role, incarnation, timeout
        self._end, self._timeline, self._may_be_lost = end, timeline, may_be_lost
        self._lost: LinkError | None = None
        self._sequence = 0
        self._unanswered = 0
        self._last_sent = time.monotonic()
        self._arrived: dict[int, pb.WorkResponse] = {}
        self._pending: WeakValueDictionary[int, RemotePending] = WeakValueDictionary()
        """Results that may still be read."""
        self._awaited = 0
        """Sequence of the response that is waited for now."""
        self._clock_offset_ns = 0

    def run_prompts(self, batch: PromptBatch) -> RemotePending[PromptResult[np.ndarray]]:
        return self._ask(lambda response: codec.to_prompt_result(response.prompt), prompt=codec.prompt_command(batch))

    def join(self, group: SequenceHandoff) -> None:
        self._send(join=codec.join_command(group))

    def round(self, plan: RoundPlan[np.ndarray]) -> RemotePending[RoundResult[np.ndarray] | DraftReport[np.ndarray]]:
        """The result is the target's, or that of a model alone; the draft's of a pair is its report."""
        decode: Callable[[pb.RoundOutcome], RoundResult[np.ndarray] | DraftReport[np.ndarray]]
        decode = (
            codec.to_draft_report if plan.program is Program.PAIR and self.role == ModelRole.DRAFT else codec.to_result
        )
        return self._ask(lambda response: decode(response.round), round=codec.round_command(plan))

    def ping(self) -> None:
        """Hear from the worker. Raises LinkError, or SideLost, if it does not answer in time."""
        self.response(self._send(ping=pb.Ping()))

    def keep_alive(self, silence: float) -> None:
        """Ping a worker that has nothing to do and has been sent nothing for `silence` seconds. Raises as `ping`."""
        if not self._unanswered and time.monotonic() - self._last_sent >= silence:
            self.ping()

    def status(self) -> pb.StatusOutcome:
        """What memory is in use."""
        return self.response(self._send(status=pb.StatusCommand())).status

    def stop(self) -> None:
        self._send(stop=pb.StopCommand())

    def reconnect(self, incarnation: int, seconds: float) -> bool:
        """Make it open a link to the other side's leader of this incarnation, within so many seconds; called again,
        check whether the link is up. Raises LinkError if that leader does not come."""
        outcome = self.response(
            self._send(reconnect=pb.ReconnectCommand(incarnation=incarnation, seconds=seconds))
        ).reconnect
        if outcome.error:
            raise LinkError(f"the {self.role} has no link to the other side: {outcome.error}")
        return outcome.connected

    def report_to(self, timeline: Timeline) -> None:
        """What it does from now on."""
        self._timeline = timeline

    @property
    def lost(self) -> bool:
        """As far as is known."""
        return self._lost is not None

    def set_lost(self, why: str) -> None:
        """It is gone, as others say."""
        self._lost = self._lost or LinkError(why)

    def close(self) -> None:
        """Close the link. Results in flight are lost."""
        self.set_lost("its link has been closed")
        self._end.close()

    def set_clock(self) -> None:
        """Learn how far the worker's clock is from ours, from the fastest of a few pings."""
        best: tuple[int, int] | None = None
        for _ in range(CLOCK_PINGS):
            before = time.monotonic_ns()
            response = self.response(self._send(ping=pb.Ping()))
            after = time.monotonic_ns()
            if best is None or after - before < best[0]:
                best = (after - before, (before + after - response.begin_ns - response.end_ns) // 2)
        assert best is not None
        self._clock_offset_ns = best[1]

    def response(self, sequence: int) -> pb.WorkResponse:
        """Wait for one command's response; other responses that arrive meanwhile are kept for as long as they may be
        read."""
        try:
            if self._lost is None:
                return self._response(sequence)
        except LinkError as error:
            if not self._may_be_lost:
                raise
            self._lost = error
        raise ModelLost(self.role, str(self._lost)) from self._lost

    def _response(self, sequence: int) -> pb.WorkResponse:
        self._awaited = sequence
        if sequence not in self._arrived:
            begin = time.monotonic_ns()
            while sequence not in self._arrived:
                self._take(self._end.receive(self.timeout))
            self._timeline.waited(begin, time.monotonic_ns())
        return self._arrived.pop(sequence)

    def _take(self, response: pb.WorkResponse) -> None:
        check_envelope(response, self.incarnation)
        kind = response.WhichOneof("result")
        if kind == "failure":
            raise WorkerFailed(self.role, response.failure.message)
        if response.sequence in self._pending or response.sequence == self._awaited:
            self._arrived[response.sequence] = response
        for sequence in [s for s in self._arrived if s not in self._pending and s != self._awaited]:
            del self._arrived[sequence]
        self._unanswered -= 1
        for name, span in self.spans(response).items():
            self._timeline.worked(self.role, name, *span)

    def spans(self, response: pb.WorkResponse) -> dict[str, tuple[int, int]]:
        """The worker's reported work, in times of this process's clock."""
        work = {span.name: (span.begin_ns, span.end_ns) for span in response.work}
        if response.WhichOneof("result") == "prompt":
            work = {"prompt": (response.begin_ns, response.end_ns)}
        offset = self._clock_offset_ns
        return {name: (begin + offset, end + offset) for name, (begin, end) in work.items()}

    def _ask(self, decode: Callable[[pb.WorkResponse], Result], **command) -> RemotePending[Result]:
        pending = RemotePending(self, self._send(**command), decode)
        self._pending[pending.sequence] = pending
        return pending

    def _send(self, **command) -> int:
        self._sequence += 1
        self._last_sent = time.monotonic()
        self._unanswered += not command.keys() & SILENT
        if self._lost is not None:
            return self._sequence
        try:
            self._end.send(
                pb.WorkRequest(version=LAYOUT_VERSION, incarnation=self.incarnation, sequence=self._sequence, **command)
            )
        except LinkError as error:
            if not self._may_be_lost:
                raise
            self._lost = error
        return self._sequence


class RemotePair:
    """`smc.executor.model_runner.RoundExecutor` over two links; its sides talk to each other without us."""

    pipelined = True

    def __init__(self, workers: dict[ModelRole, RemoteWorker]) -> None:
        self._workers = workers

    def join(self, role: ModelRole, group: SequenceHandoff) -> None:
        self._workers[role].join(group)

    def round(self, plan: RoundPlan[np.ndarray]) -> LocalRound:
        roles = self._workers if plan.program is Program.PAIR else (ModelRole(plan.program.value),)
        return LocalRound({role: self._workers[role].round(plan) for role in roles})
