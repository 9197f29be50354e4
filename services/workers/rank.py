"""Executes the coordinator's commands on one rank, which holds a part of one model or of both, and sends responses once
their results have left the device. In rounds the leaders of both models exchange tensors (`PeerChannel`). Knows nothing
about requests, particles or Ray.

The leader (rank 0) receives commands over the link and passes their bytes to the other ranks of its tensor-parallel
group. Every rank executes all commands, so the states of the ranks stay equal. Only the leader responds."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from services.link.base import End, LinkError, PeerEnd, failure_text
from services.link.messages import (
    REQUESTS,
    RESPONSES,
    Compile,
    Failure,
    MemoryQuery,
    MemoryUse,
    ModelResult,
    ModelResults,
    Ping,
    Pong,
    Reconnect,
    ReconnectResult,
    Result,
    Stop,
    WorkRequest,
    WorkResponse,
    check_incarnation,
)
from services.workers.memory import is_shortage
from services.workers.tensor_parallel import TensorParallel
from smc.api.constraint import Constraint
from smc.executor.graph_runner import AsyncResult, StageRunner
from smc.executor.messages import Pending, PromptBatch
from smc.executor.round_executor import LocalRoundExecutor, OneModelExecutor
from smc.executor.worker import ModelWorker
from smc.round.plan import RoundPlan, SequenceHandoff
from smc.types import ModelRole

CLOSE_SECONDS = 5.0
logger = logging.getLogger(__name__)
Respond = Callable[[], WorkResponse]
"""Waits for the results of a command, and returns its response."""
Reconnection = Callable[[int, float], bool]
"""Opens a link to the other model's leader in the background. Arguments: its incarnation, and the timeout in seconds.
Returns whether the link is up. Raises RuntimeError if the leader does not connect."""


class ResponseSender:
    """Sends responses to the coordinator in order. `waits`: responses have to wait for results of the device; a thread
    does so, and the next command can be executed meanwhile."""

    def __init__(self, end: End, incarnation: int, *, waits: bool) -> None:
        self._end, self._incarnation = end, incarnation
        self._turn = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[int, Respond] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True) if waits else None
        if self._thread is not None:
            self._thread.start()

    def put(self, sequence: int, respond: Respond) -> None:
        """Send the response that `respond` returns for command `sequence`, after all earlier responses."""
        if self._thread is None:
            self._send(respond())
        else:
            self._queue.put((sequence, respond))

    def fail(self, sequence: int, error: Exception) -> None:
        """Report that the worker could not execute a command and stops; other queued responses may never be sent."""
        self._send(WorkResponse(self._incarnation, sequence, Failure(failure_text(error))))

    def close(self) -> None:
        """Wait until all responses have been sent, at most `CLOSE_SECONDS`."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        for sequence, respond in iter(self._queue.get, None):
            try:
                self._send(respond())
            except Exception as error:  # an error of the device, raised where its work is awaited
                logger.exception("command %d failed", sequence)
                self.fail(sequence, error)
                return

    def _send(self, response: WorkResponse) -> None:
        """Send under a lock: `fail` may be called in another thread than `_run`, and an end takes one message at a
        time."""
        with self._turn:
            self._end.send(RESPONSES.encode(response))


class Rank:
    """Executes commands on the workers of one model or of both, which are on one device."""

    def __init__(
        self,
        workers: Mapping[ModelRole, ModelWorker],
        executor: LocalRoundExecutor | OneModelExecutor,
        incarnation: int,
        timeout: float,
        enough: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        reconnect: Reconnection | None = None,
        when_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """`executor`: runs the workers' part of rounds. `timeout`: seconds to wait for a command. `enough`: in this
        context commands are executed; it explains a lack of memory. `reconnect`: given to leaders that have a peer.
        `when_idle`: called at every ping."""
        self.workers, self.executor, self.incarnation, self.timeout = workers, executor, incarnation, timeout
        self._enough = enough
        self.device = next(iter(workers.values())).device
        self._reconnect_to, self._when_idle = reconnect, when_idle
        self._compiling = ThreadPoolExecutor(1, "compile")
        self._compiled = 0

    def carry_out(self, request: WorkRequest, answers: ResponseSender | None = None) -> None:
        """Execute a command, and pass its response, if it has one, to `answers`. Raises LinkError for a message of
        another incarnation."""
        check_incarnation(request, self.incarnation)
        with self._enough():
            respond = self._begun(request, leads=answers is not None)
        if answers is not None and respond is not None:
            answers.put(request.sequence, respond)

    def _begun(self, request: WorkRequest, *, leads: bool) -> Respond | None:
        """Execute a command as far as the device is not waited for. Returns what responds, if it has a response."""
        command, begin = request.command, time.monotonic_ns()
        match command:
            case SequenceHandoff():
                assert request.role is not None, "a handoff is for one model"
                self.executor.join(request.role, command)
                return None
            case Compile():
                if leads:  # only leaders compute masks
                    self._compiling.submit(self._compile, command.constraint)
                return None
            case RoundPlan():
                return self._respond(request.sequence, self.executor.round(command).readings)
            case PromptBatch():
                assert request.role is not None, "a prompt is for one model"
                pending = self.workers[request.role].run_prompts(command)
                return self._respond(request.sequence, {request.role: pending})
            case MemoryQuery():
                return self._at_once(request.sequence, begin, self._status())
            case Reconnect():
                return self._at_once(request.sequence, begin, self._reconnect(command))
            case Ping():
                self._when_idle()
                return self._at_once(request.sequence, begin, Pong())
            case _:
                raise AssertionError(f"a worker cannot carry out {command}")

    def _at_once(self, sequence: int, begin: int, result: Result) -> Respond:
        response = self._response(sequence, result, begin, time.monotonic_ns())
        return lambda: response

    def _compile(self, constraint: Constraint) -> None:
        try:
            next(iter(self.workers.values())).compile(constraint)  # for all models, which have one vocabulary
        except Exception:  # its request fails when its first mask is needed
            logger.exception("a constraint could not be compiled")
        finally:
            self._compiled += 1

    def _response(self, sequence: int, result: Result, begin: int = 0, end: int = 0) -> WorkResponse:
        return WorkResponse(self.incarnation, sequence, result, begin, end, self._compiled)

    def _respond(self, sequence: int, pending: Mapping[ModelRole, Pending | AsyncResult]) -> Respond:
        def respond() -> WorkResponse:
            found = {
                role: ModelResult(each.result(), each.spans(), dict(each.failures())) for role, each in pending.items()
            }
            return self._response(sequence, ModelResults(found))

        return respond

    def _status(self) -> MemoryUse:
        device = self.device
        return MemoryUse(torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0)

    def _reconnect(self, command: Reconnect) -> ReconnectResult:
        if self._reconnect_to is None:
            return ReconnectResult()
        try:
            return ReconnectResult(connected=self._reconnect_to(command.incarnation, command.seconds))
        except RuntimeError as what:
            return ReconnectResult(error=failure_text(what))


def lead(rank: Rank, end: End, spread: Callable[[bytes], None] | None) -> None:
    """Serve the coordinator until it sends a stop command. `spread` sends a command to the other ranks. Reports errors
    to the coordinator, then raises them. Where they come from is logged here, since their text alone travels; but
    not where memory is short, where the text says what to lower."""
    answers = ResponseSender(end, rank.incarnation, waits=rank.device.type == "cuda")
    try:
        while True:
            message = end.receive(rank.timeout)
            if spread is not None:
                spread(message)
            request = REQUESTS.decode(message)
            if isinstance(request.command, Stop):
                return
            try:
                rank.carry_out(request, answers)
            except Exception as error:
                if not (isinstance(error.__cause__, Exception) and is_shortage(error.__cause__)):
                    logger.exception("command %d failed", request.sequence)
                # Even if the coordinator is gone, this is the error to raise: the store keeps it as the cause.
                with contextlib.suppress(LinkError):
                    answers.fail(request.sequence, error)
                raise
    finally:
        answers.close()


def follow(rank: Rank, receive: Callable[[], bytes]) -> None:
    """Execute the commands that the leader passes on, until a stop command."""
    while True:
        request = REQUESTS.decode(receive())
        if isinstance(request.command, Stop):
            return
        rank.carry_out(request)


class PeerChannel:
    """A `smc.executor.round_executor.Channel`. `end`: the leader's end of the link, None at other ranks. `group`: the
    ranks of this model, None if there is only one."""

    def __init__(
        self,
        end: PeerEnd | None,
        group: TensorParallel | None,
        stages: StageRunner,
        timeout: float,
        *,
        host_waits: bool,
        outlives_peer: bool = False,
    ) -> None:
        """`timeout`: seconds to wait for the other model, where the host has to wait. `host_waits`: see
        `Channel`. `outlives_peer`: if the other model is lost, zeros replace its messages until `reconnect`, so that
        rounds in flight end on every rank; their results are discarded."""
        self._end, self._group, self._stages, self._timeout = end, group, stages, timeout
        self.host_waits, self._outlives_peer = host_waits, outlives_peer
        self._lost = False
        self._coming: tuple[int, Future[PeerEnd]] | None = None

    def reconnect(self, incarnation: int, make: Callable[[], PeerEnd]) -> bool:
        """Connect to the other model's leader of this incarnation. The first call starts `make`, which waits for that
        leader, in a thread. Every call returns whether `make` has completed; then the new end is in use. Raises
        RuntimeError if the leader does not connect; then it counts as lost, too."""
        assert self._end is not None
        if self._coming is None or self._coming[0] != incarnation:
            self._lost = True
            self._end.close()
            self._coming = incarnation, _in_background(make)
        _, coming = self._coming
        if not coming.done():
            return False
        self._coming = None
        try:
            self._end = coming.result()
        except OSError as error:
            raise LinkError(f"no socket for the link: {error}") from error
        self._lost = False
        return True

    def close(self) -> None:
        if self._end is not None:
            self._end.close()

    def send(self, key: Hashable, name: str, tensor: Tensor, *, keeps: bool = False) -> None:
        if self._end is not None and not self._lost:
            try:
                self._end.send(name, tensor if keeps else self._stages.copy_of(key, f"sent {name}", tensor))
            except LinkError as error:
                self._set_lost(error)

    def receive(
        self, key: Hashable, name: str, shape: tuple[int, ...], dtype: torch.dtype, into: Tensor | None = None
    ) -> Tensor:
        here = into
        if here is None:
            here = self._stages.keep(
                key, f"received {name}", lambda: torch.empty(shape, dtype=dtype, device=self._stages.device)
            )
        if self._end is not None:
            self._receive(self._end, name, here)
        return self.share(here)

    def _receive(self, end: PeerEnd, name: str, here: Tensor) -> None:
        if not self._lost:
            try:
                end.receive(name, here, self._timeout)
            except LinkError as error:
                self._set_lost(error)
        if self._lost:
            here.zero_()

    def _set_lost(self, error: LinkError) -> None:
        if not self._outlives_peer:
            raise error
        logger.warning("the other side is lost: %s", error)
        self._lost = True

    def share(self, tensor: Tensor) -> Tensor:
        if self._group is not None:
            self._group.share(tensor)
        return tensor

    def settle(self) -> None:
        if self._end is not None and not self._lost:
            self._end.settle()


def _in_background(make: Callable[[], PeerEnd]) -> Future[PeerEnd]:
    """Call `make` in a daemon thread, which is not joined at the end of the process; return its future result."""
    coming: Future[PeerEnd] = Future()

    def work() -> None:
        try:
            coming.set_result(make())
        except Exception as error:  # raised to the caller, who awaits the result
            coming.set_exception(error)

    threading.Thread(target=work, name="reconnect", daemon=True).start()
    return coming
