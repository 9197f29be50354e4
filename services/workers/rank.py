"""Executes the coordinator's commands on one rank, which holds a part of one model or of both, and sends responses once
their results have left the device. Knows nothing about requests, particles or Ray.

The leader (rank 0) receives commands over the link and passes their bytes to the other ranks of its tensor-parallel
group. Every rank executes all commands, so the states of the ranks stay equal. Only the leader responds.

Within the group activations are summed. Small sums use one kernel of torch's symmetric memory, where NCCL needs several
hops. NVLink multicast stays off: these kernels do not need it, and a program that dies while it holds multicast memory
can take a host's GPUs out of service."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from services.link.base import End, LinkError, failure_text
from services.link.distributed import FRAME, frames, make_group, message_in
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
from services.link.store import GroupStore
from smc.api.constraint import Constraint
from smc.executor.graph_runner import AsyncResult
from smc.executor.messages import Pending, PromptBatch
from smc.executor.round_executor import LocalRoundExecutor, OneModelExecutor
from smc.executor.worker import ModelWorker
from smc.round.plan import RoundPlan
from smc.round.slot_state import SequenceHandoff
from smc.types import ModelRole

ROOM = 8 << 20
"""Bytes of the largest sum in symmetric memory."""
ONE_SHOT = 256 << 10
"""Bytes up to which every rank reads the whole parts of all ranks. For larger sums each rank sums its share, and
distributes the result."""
SUMMED = (torch.bfloat16, torch.float32)
_FROM_LEADER = dist.BroadcastOptions()
_FROM_LEADER.rootRank = 0
_FROM_LEADER.rootTensor = 0
CLOSE_SECONDS = 5.0
logger = logging.getLogger(__name__)
Respond = Callable[[], WorkResponse]
"""Waits for the results of a command, and returns its response."""
Reconnection = Callable[[int, float], bool]
"""Opens a link to the other model's leader in the background. Arguments: its incarnation, and the timeout in seconds.
Returns whether the link is up. Raises RuntimeError if the leader does not connect."""


class SymmetricSum:
    """Sums parts that lie in buffers of symmetric memory, which all ranks can read."""

    def __init__(self) -> None:
        """Allocate a buffer on the current GPU. Raises RuntimeError or ImportError if torch cannot share it."""
        # torch reads these at the rendezvous of buffers. If each rank sees only its own GPU, all GPUs have number 0.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        from torch.distributed import _symmetric_memory as symmetric

        self._buffer = symmetric.empty(
            ROOM, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device())
        )

    @staticmethod
    def between(store: dist.Store, name: str, rank: int, degree: int) -> SymmetricSum | None:
        """Set up the sum of all ranks; return None, on every rank alike, unless all ranks are in one container of one
        host and their GPUs can read each other's memory. This is a collective: the ranks report the result of every
        step to each other, since a rank that stopped alone would leave the others waiting."""
        if len(set(exchange(store, f"{name}/host", rank, degree, _host_and_container()))) > 1:
            return None
        made: list[SymmetricSum] = []
        steps = {"made": lambda: made.append(SymmetricSum()), "met": lambda: made[0].meet(store, name, rank, degree)}
        for step, act in steps.items():
            errors = list(filter(None, exchange(store, f"{name}/{step}", rank, degree, _error_of(act))))
            if errors:
                if rank == 0:
                    print(
                        f"smcserve: sums over GPUs go over NCCL; symmetric memory is not to be had: {errors[0]}",
                        file=sys.stderr,
                    )
                return None
        return made[0]

    def meet(self, store: dist.Store, name: str, rank: int, degree: int) -> None:
        """Share the buffers between the ranks. Raises RuntimeError if a GPU cannot read another one's memory."""
        from torch._C._distributed_c10d import _register_process_group
        from torch.distributed import _symmetric_memory as symmetric
        from torch.distributed.distributed_c10d import GroupName

        self._name, self._group = name, dist.ProcessGroup(dist.PrefixStore(name, store), rank, degree)
        self._group._set_group_name(GroupName(name))
        _register_process_group(GroupName(name), self._group)
        symmetric.rendezvous(self._buffer, GroupName(name))

    def room(self, tokens: int, features: int, dtype: torch.dtype) -> Tensor | None:
        """Return the part of the buffer for a tensor [tokens, features], which is summed there without a copy; None if
        its size or type is not supported."""
        size = tokens * features * dtype.itemsize
        if size > ROOM or size % 16 or dtype not in SUMMED:
            return None
        return self._buffer[:size].view(dtype).view(tokens, features)

    def __call__(self, here: Tensor) -> Tensor:
        """Return the sum of the parts in all ranks' `room`, bitwise equal on every rank. It is valid until another part
        is written there.

        The wait for a rank that has died has no limit: the GPU waits until the worker group kills this process."""
        if here.numel() * here.element_size() <= ONE_SHOT:
            return torch.ops.symm_mem.one_shot_all_reduce(here, "sum", self._name)
        return torch.ops.symm_mem.two_shot_all_reduce_(here, "sum", self._name)


def _error_of(act: Callable[[], object]) -> str:
    """Call `act`; return its error in one line, or an empty string if it succeeds."""
    try:
        act()
    except (RuntimeError, ImportError, AttributeError) as error:
        return " ".join(str(error).split())[:300] or type(error).__name__
    return ""


def _host_and_container() -> str:
    """Return a name of this process's host and container. Processes with equal names can find each other's sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join((boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "mnt"))))


def exchange(store: dist.Store, name: str, rank: int, degree: int, word: str) -> list[str]:
    """Publish `word` for this rank; return the words of all ranks in order of rank."""
    store.set(f"{name}/{rank}", word)
    return [store.get(f"{name}/{other}").decode() for other in range(degree)]


class TensorParallel:
    """Rank `rank` of `degree` that share models, a `smc.model.parallel.Reduce`. On GPUs small sums of activations use
    symmetric memory, large ones NCCL; commands always go over gloo."""

    def __init__(
        self,
        store: GroupStore,
        name: str,
        rank: int,
        degree: int,
        device: torch.device,
        timeout: float,
        in_order: bool = False,
    ) -> None:
        """`in_order`: add the ranks' parts one after another, whatever the size of the sum. Symmetric memory always
        does; NCCL's order depends on the size, if there are more than two ranks."""
        self._degree, self._in_order = degree, in_order and degree > 2
        self._commands = make_group(store, f"{name}/commands", rank, degree, timeout)
        self._device, on_cpu = device, device.type == "cpu"
        self._sums = make_group(store, f"{name}/sums", rank, degree, timeout, "cpu" if on_cpu else device)
        self._few = None if on_cpu else SymmetricSum.between(store, f"{name}/few", rank, degree)

    def room(self, tokens: int, features: int, dtype: torch.dtype) -> Tensor:
        """See `smc.model.parallel.Reduce`."""
        here = None if self._few is None else self._few.room(tokens, features, dtype)
        return torch.empty(tokens, features, dtype=dtype, device=self._device) if here is None else here

    def __call__(self, part: Tensor) -> Tensor:
        """See `smc.model.parallel.Reduce`."""
        few, (tokens, features) = self._few, part.shape
        here = None if few is None else few.room(tokens, features, part.dtype)
        if few is not None and here is not None:
            return few(here if here.data_ptr() == part.data_ptr() else here.copy_(part))
        try:
            if self._in_order:
                return self._add_in_order(part)
            self._sums.allreduce([part]).wait()
        except RuntimeError as error:
            raise LinkError(f"a rank of the group is gone: {error}") from error
        return part

    def _add_in_order(self, part: Tensor) -> Tensor:
        """Sum a large part in place: piece by piece in symmetric memory, or else from copies of all parts. Rounds after
        each addition, as symmetric memory does."""
        few, features = self._few, part.shape[1]
        if few is not None and few.room(1, features, part.dtype) is not None:
            for piece in part.split(ROOM // (features * part.element_size())):
                here = few.room(len(piece), features, piece.dtype)
                assert here is not None, "as many rows as there is room for"
                piece.copy_(few(here.copy_(piece)))
            return part
        parts = [torch.empty_like(part) for _ in range(self._degree)]
        self._sums.allgather([parts], [part]).wait()
        part.copy_(parts[0])
        for other in parts[1:]:
            part += other
        return part

    def share(self, tensor: Tensor) -> None:
        """Replace the tensor's values, in place on every rank, with those of rank 0."""
        try:
            self._sums.broadcast([tensor], _FROM_LEADER).wait()
        except RuntimeError as error:
            raise LinkError(f"a rank of the group is gone: {error}") from error

    def spread(self, data: bytes) -> None:
        """On the leader: send a command to the other ranks."""
        for frame in frames(data):
            self._broadcast(frame)

    def receive(self) -> bytes:
        """On other ranks: return the leader's next command. Raises LinkError if the leader is gone, or silent past the
        group's timeout."""
        return message_in(self._next(FRAME), self._next)

    def _next(self, size: int) -> Tensor:
        """Return the next frame, which has this size."""
        frame = torch.empty(size, dtype=torch.uint8)
        self._broadcast(frame)
        return frame

    def _broadcast(self, tensor: Tensor) -> None:
        try:
            self._commands.broadcast([tensor], _FROM_LEADER).wait()
        except RuntimeError as error:
            raise LinkError(f"the group's leader is gone or silent: {error}") from error


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
    to the coordinator, then raises them."""
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
