"""Runs the stages of a round on one device: directly, or recorded as CUDA graphs and replayed. Knows nothing about what
the stages do."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import cycle
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from smc.arrays import map_tensors
from smc.once import warn_once
from smc.round.plan import IN_FLIGHT

logger = logging.getLogger(__name__)
Event = int | torch.cuda.Event
"""A point in a device's work; on a CPU, nanoseconds of the monotonic clock."""
TimeSpans = dict[str, tuple[Event, Event]]
Failures = Mapping[int, str]
"""Why constraints cannot be followed any further, by group of a round or by row of prompts."""
NO_FAILURES: Failures = MappingProxyType({})
Made = TypeVar("Made")
MOST_KEYS = 1_280
"""Maximum number of kinds of rounds whose recordings are kept: more than a warm-up makes with K = 32, F = 32 and 512
slots."""
MOST_BYTES = 3 << 30
"""Maximum device memory of recordings, in bytes."""
MARGIN_BYTES = 1 << 30
"""Device memory that is free before each recording beside what the stage takes: for the graph, for kernels that are
loaded, and for another process on the same GPU."""


class AsyncResult:
    """A NamedTuple of tensors that is being copied to the host, where it has NumPy arrays."""

    def __init__(
        self,
        result: Any,
        arrived: Event,
        spans: TimeSpans,
        failures: Failures = NO_FAILURES,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`check`: called when the result has arrived; raises an exception if what computed it has failed."""
        self._result, self._arrived, self._at = result, arrived, 0
        self._arrays: Any = None
        self._spans, self._failures, self._check = spans, failures, check

    def result(self) -> Any:
        """Wait for the copy and return the NamedTuple with NumPy arrays. Pinned memory is copied and freed."""
        if isinstance(self._arrived, int):
            self._check()
            return map_tensors(Tensor.numpy, self._result)
        if self._arrays is None:
            self._arrived.synchronize()
            self._at = time.monotonic_ns()
            self._check()
            self._arrays = map_tensors(lambda host: host.numpy().copy(), self._result)
            with RECORDINGS.apart():
                self._result = None
        return self._arrays

    def failures(self) -> Failures:
        """See `smc.executor.messages.Pending.failures`."""
        return self._failures

    def spans(self) -> dict[str, tuple[int, int]]:
        """Return when each piece of work began and ended, in nanoseconds of the monotonic clock. The pass of a model
        has the name of its role. Call it after `result`: times count back from the moment at which that wait ended."""
        return {name: (self._nanoseconds(begin), self._nanoseconds(end)) for name, (begin, end) in self._spans.items()}

    def _nanoseconds(self, event: Event) -> int:
        if isinstance(event, int):
            return event
        assert not isinstance(self._arrived, int), "events of one device"
        return self._at - int(1e6 * event.elapsed_time(self._arrived))


class Recording(Protocol):
    """Recorded work, such as a CUDA graph."""

    def replay(self) -> None:
        """Queue the work again, on the current stream."""
        ...


@dataclass
class _Kept:
    """All that is kept for rounds of one key."""

    made: dict[str, Any] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    graphs: dict[str, tuple[Recording, Any]] = field(default_factory=dict)
    nbytes: int = 0


class StageRunner:
    """Runs every stage directly. Keeps what the rounds of one key share, for the most recently used keys. If more than
    `MOST_KEYS` keys or `MOST_BYTES` are kept, the least recently used are released first."""

    records = False
    """Whether stages are recorded, once for each key."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._keys: OrderedDict[Hashable, _Kept] = OrderedDict()
        self.evicted = 0
        """Number of keys that have been evicted."""

    @property
    def recorded_keys(self) -> int:
        """Number of kinds of rounds that are kept."""
        return len(self._keys)

    @property
    def recorded_bytes(self) -> int:
        """Device memory of recordings, in bytes."""
        return sum(kept.nbytes for kept in self._keys.values())

    def beside(self) -> StageRunner:
        """Return a runner of another model whose work takes turns with the work of this one."""
        return type(self)(self.device)

    def working(self) -> AbstractContextManager:
        """Return the context in which all work is requested from this device."""
        return contextlib.nullcontext()

    def run(self, key: Hashable, name: str, stage: Callable[[], Any]) -> Any:
        """Run stage `name` of rounds of this key: always the same operations on the same tensors, whose values may
        differ."""
        return stage()

    def run_if(
        self, wanted_1: Tensor, key: Hashable, name: str, stage: Callable[[], tuple[()]], *, host_waits: bool
    ) -> None:
        """Run a stage that changes nothing unless `wanted`, bool [1] on this device, is true. `host_waits`: the host
        may wait for the device, and leave the stage out. A CPU always has the value. Otherwise the device leaves it
        out, where it can."""
        if wanted_1.item():
            self.run(key, name, stage)

    def keep(self, key: Hashable, name: str, make: Callable[[], Made]) -> Made:
        """Return an object that the rounds of one key share. `make` makes it once for as long as the key is kept."""
        made = self._of(key).made
        if name not in made:
            made[name] = make()
        return made[name]

    def event(self) -> Event:
        """Mark a point in this device's work that another device may wait for."""
        return time.monotonic_ns()

    def wait(self, event: Event) -> None:
        """Let later work on this device wait until that point has been reached."""

    def copy_of(self, key: Hashable, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor's copy on this device: always the same tensor, whose values only the next call for this key
        and name changes. On a CPU, where each stage ends before the next begins, return the tensor itself."""
        return tensor

    def read(
        self, key: Hashable, result: Any, spans: TimeSpans, failures: Failures, check: Callable[[], None]
    ) -> AsyncResult:
        """Start copying a NamedTuple of tensors to the host."""
        return AsyncResult(result, self.event(), spans, failures, check)

    def _of(self, key: Hashable) -> _Kept:
        if key in self._keys:
            self._keys.move_to_end(key)
            return self._keys[key]
        while len(self._keys) >= MOST_KEYS or (self._keys and self.recorded_bytes > MOST_BYTES):
            self._finish_work()
            self._keys.popitem(last=False)
            self.evicted += 1
        self._keys[key] = _Kept()
        return self._keys[key]

    def _finish_work(self) -> None:
        """Wait for work that may still use what is kept."""


class _Recordings:
    """The context of every recording. Meanwhile no thread frees what would spoil it or be spoilt. To free another
    recording breaks it off: garbage, which may include those of an engine that is gone, is not collected. To free
    pinned memory marks its last use on the stream that is recorded, and such a mark can never be read: torch raises
    "invalid argument" when it next looks for free pinned memory. Other threads free it inside `apart`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: list[int] = []
        """Threads that record, each once for each recording."""
        self._collects = False

    def __enter__(self) -> None:
        with self._changed:
            if not self._threads:
                self._collects = gc.isenabled()
                gc.disable()
            self._threads.append(threading.get_ident())

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._threads.remove(threading.get_ident())
            if not self._threads and self._collects:
                gc.enable()
            self._changed.notify_all()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Wait until no other thread records; none begins to inside this context."""
        with self._changed:
            self._changed.wait_for(lambda: set(self._threads) <= {threading.get_ident()})
            yield


RECORDINGS = _Recordings()


class GraphRunner(StageRunner):
    """Runs stages on one stream of a GPU. A stage runs directly the first time, which compiles its kernels, and is
    recorded the second time."""

    records = True

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """`stream`: by default a new one, whose work finds all that the current stream has made, such as weights."""
        super().__init__(device)
        self.stream = stream or torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self._pool = torch.cuda.graph_pool_handle()
        self._first: torch.cuda.CUDAGraph | None = None
        """The first graph stays, because the memory pool ends with the last graph that uses it."""

    def beside(self) -> GraphRunner:
        return GraphRunner(self.device, self.stream)

    @contextlib.contextmanager
    def working(self):
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            yield

    def run(self, key: Hashable, name: str, stage: Callable[[], Any]) -> Any:
        recorded = self._of(key)
        if name not in recorded.seen:
            recorded.seen.add(name)
            return stage()
        if name not in recorded.graphs:
            self._record(recorded, name, torch.cuda.CUDAGraph(), stage)
        graph, outputs = recorded.graphs[name]
        graph.replay()
        return outputs

    def _record(self, kept: _Kept, name: str, graph: torch.cuda.CUDAGraph, stage: Callable[[], Any]) -> None:
        """Record a stage. `torch.cuda.graph` would wait for the device and free all cached memory before each
        recording, which later rounds would have to allocate again: half of a warm-up's time."""
        self._make_room()
        failed: Exception | None = None
        try:
            with RECORDINGS, torch.cuda.stream(self.stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    outputs = stage()
                except Exception as error:
                    failed = error
                    raise
                finally:
                    graph.capture_end()
        except Exception:
            # After an error of the stage, to end the recording may raise another one, which says nothing more.
            if failed is not None:
                raise failed from failed.__cause__
            raise
        self._first = self._first or graph
        kept.graphs[name] = (graph, outputs)
        # The next capture reuses what a capture has freed, so only its outputs remain. They are counted by their
        # shapes, so that all ranks agree.
        kept.nbytes += _nbytes(outputs)

    def _make_room(self) -> None:
        """Free cached memory, which a recording cannot use, if there may be too little beside it. A recording takes
        hardly more than the stage took when it ran directly."""
        most = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        if torch.cuda.mem_get_info(self.device)[0] < most + MARGIN_BYTES:
            torch.cuda.empty_cache()

    def run_if(
        self, wanted_1: Tensor, key: Hashable, name: str, stage: Callable[[], tuple[()]], *, host_waits: bool
    ) -> None:
        recorded = self._of(key)
        # Until it is recorded, the stage runs in any case: dummy rounds warm it up.
        if host_waits and name in recorded.graphs and not wanted_1.item():
            return
        if not host_waits and name in recorded.seen and name not in recorded.graphs:
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            self._record(recorded, name, graph, stage)
            recorded.graphs[name] = (_conditional(graph, wanted_1), ())
        self.run(key, name, stage)

    def event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def wait(self, event: Event) -> None:
        assert not isinstance(event, int), "a GPU waits for events of GPUs"
        self.stream.wait_event(event)

    def copy_of(self, key: Hashable, name: str, tensor: Tensor) -> Tensor:
        here = self.keep(key, f"copy of {name}", lambda: torch.empty_like(tensor, device=self.device))
        return here.copy_(tensor, non_blocking=True)

    def read(
        self, key: Hashable, result: Any, spans: TimeSpans, failures: Failures, check: Callable[[], None]
    ) -> AsyncResult:
        def pinned() -> Any:
            return map_tensors(lambda here: torch.empty(here.shape, dtype=here.dtype, pin_memory=True), result)

        host = next(self.keep(key, "hosts", lambda: cycle([pinned() for _ in range(IN_FLIGHT)])))
        map_tensors(lambda there, here: there.copy_(here, non_blocking=True), host, result)
        return AsyncResult(host, self.event(), spans, failures, check)

    def _finish_work(self) -> None:
        self.stream.synchronize()


def _conditional(graph: torch.cuda.CUDAGraph, wanted_1: Tensor) -> Recording:
    """Return a graph that runs the recorded one only if `wanted` says so, or where that is impossible the recorded one,
    whose kernels then run in any case."""
    try:
        from smc.kernels.conditional import ConditionalGraph

        return ConditionalGraph(graph, wanted_1)
    except (ImportError, RuntimeError) as error:
        warn_once(logger, "what is drafted again costs its time also where it is not wanted: %s", error)
        return graph


def _nbytes(values: Any) -> int:
    """Return the bytes of all tensors in tuples."""
    if isinstance(values, tuple):
        return sum(map(_nbytes, values))
    return values.nbytes if isinstance(values, Tensor) else 0
