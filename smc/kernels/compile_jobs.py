"""Compiles kernels before they are launched, many at a time: what a compilation is (`CompileJob`), how launches name
the ones that they need without being made (`recorded`), and the processes that compile (`CompilePool`). These write to
Triton's cache on disk, where the launches that follow find the kernels. Knows nothing about rounds and models.

Processes, not threads: a fifth of the time of Triton 3.6 is Python's, under the interpreter's lock, so 16 threads would
be at most 4 times as fast as one, and slow down what this process does meanwhile. The processes get their jobs over
pipes. They run this module, not the program that starts them, and use no GPU.

    python -m smc.kernels.compile_jobs          # such a process"""

from __future__ import annotations

import hashlib
import importlib
import io
import logging
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.jit import JITFunction

try:
    from triton._C.libtriton import get_cache_invalidating_env_vars
except ImportError as error:  # another version of Triton: kernels are compiled when they are first launched
    raise ImportError(f"Triton {triton.__version__} does not say what its cache depends on") from error

logger = logging.getLogger(__name__)
PROCESS_BYTES = 640 << 20
"""Memory for a process that compiles, about twice what it takes: torch and Triton are most of it."""
MOST_PROCESSES = 32
REPORT_SECONDS = 10.0
"""Time between two lines of the log while kernels are compiled."""


class Job(Protocol):
    """A compilation. It is pickled for the process that runs it."""

    @property
    def name(self) -> str: ...

    def is_cached(self) -> bool:
        """Return whether the cache on disk has the compiled kernel."""
        ...

    def run(self) -> None:
        """Compile the kernel into the cache, if it is not there. Raises what the compiler raises."""
        ...


Need = Callable[[Job], None]
"""Called with a kernel that a launch needs."""


@dataclass(frozen=True)
class CompileJob:
    """One variant of a kernel, in Triton's terms."""

    kernel: JITFunction
    signature: dict[str, Any]
    """Types of the arguments."""
    constants: dict[tuple[int, ...], Any]
    """Values of constants, by path."""
    attributes: dict[tuple[int, ...], Any]
    """What is known of the values of other arguments, such as that a pointer is a multiple of 16, by path."""
    options: dict[str, Any]
    target: GPUTarget
    language: type[ASTSource]
    """Triton's or Gluon's form of a source."""

    @property
    def name(self) -> str:
        return f"{self.kernel.__module__}.{self.kernel.__qualname__}"

    def is_cached(self) -> bool:
        source, backend = self._source(), make_backend(self.target)
        options = backend.parse_options(self.options)
        key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
        cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        file = f"{source.name[:150]}.json"
        return file in (cache.get_group(file) or {})

    def run(self) -> None:
        triton.compile(self._source(), target=self.target, options=self.options)

    def _source(self) -> ASTSource:
        return self.language(self.kernel, self.signature, self.constants, self.attributes)


class _Pickler(pickle.Pickler):
    """Pickles kernels by their names, also those that are constants of other kernels."""

    def persistent_id(self, value: object) -> tuple[str, str] | None:
        if not isinstance(value, JITFunction):
            return None
        name = (value.__module__, value.__qualname__)
        if _named(name) is not value:
            raise pickle.PicklingError(f"{name} is not the name of {value}")
        return name


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, name: tuple[str, str]) -> Any:
        return _named(name)


def _named(name: tuple[str, str]) -> Any:
    return getattr(importlib.import_module(name[0]), name[1], None)


def pickled(job: Job) -> bytes:
    """Return a job for another process. Raises PicklingError if its kernel has no name that other processes know."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(job)
    return buffer.getvalue()


def unpickled(data: bytes) -> Job:
    return _Unpickler(io.BytesIO(data)).load()


class _NotLaunched:
    """Stands for a compiled kernel, and launches nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None: ...

    def run(self, *_: object) -> None: ...


_RECORDERS: list[Any] = []
"""Those of all contexts of `recorded` that this process is in."""


def is_recording() -> bool:
    """Whether launches may do nothing (`recorded`), so that results decide nothing."""
    return bool(_RECORDERS)


@contextmanager
def recorded(need: Need) -> Iterator[None]:
    """In this context a launch whose kernel this process has not compiled or loaded yet does nothing, except that
    `need` is called, once for each variant."""
    compile_now, variants = JITFunction._do_compile, []

    def record(
        self: JITFunction,
        key: Any,
        signature: Any,
        device: Any,
        constants: Any,
        options: Any,
        attributes: Any,
        *_: object,
    ) -> _NotLaunched:
        kernels, _, target, *_ = self.device_caches[device]
        need(CompileJob(self, signature, constants, attributes, dict(options.__dict__), target, self.ASTSource))
        kernels[key] = stands_for = _NotLaunched()
        variants.append((kernels, key))
        return stands_for

    JITFunction._do_compile = record
    _RECORDERS.append(record)
    try:
        yield
    finally:
        JITFunction._do_compile = compile_now
        _RECORDERS.pop()
        for kernels, key in variants:
            kernels.pop(key, None)


class CompilerWatch:
    """Counts the kernels that this process compiles itself, which are those that nobody has compiled before."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._seconds = 0.0
        triton.knobs.compilation.listener = self.compiled

    def report(self) -> None:
        """Log the kernels since the last report, if there are any."""
        names, seconds = self._names, self._seconds
        self._names, self._seconds = [], 0.0
        if names:
            most = ", ".join(f"{name} ({count})" for name, count in Counter(names).most_common())
            logger.info("compiled %d kernels at their first launch, in %.1f s: %s", len(names), seconds, most)

    def compiled(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        """Note what the compiler has done, as Triton tells it."""
        if not cache_hit:
            self._names.append(src.name)
            self._seconds += times.total / 1e6


@dataclass
class Compiled:
    """What a pool has done."""

    kernels: int = 0
    """Kernels that have been compiled."""
    failed: int = 0
    """Kernels that have not. Their first launch compiles them."""
    error: str = ""
    """Why the first of these has not."""
    seconds: float = 0.0
    """Time that all processes have spent."""
    processes: int = 0


class CompilePool:
    """Processes that compile. They start with the first job, so a pool without jobs costs nothing."""

    def __init__(self, processes: int, command: tuple[str, ...] = (sys.executable, "-m", __name__)) -> None:
        self._most, self._command = processes, command
        self._jobs: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._submitted = 0
        self._done = Compiled()

    def submit(self, job: Job) -> None:
        """Queue a job."""
        try:
            data = pickled(job)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            self._count(error=f"{job.name}: {error}")
            return
        self._jobs.put(data)
        self._submitted += 1
        if len(self._threads) < min(self._most, self._submitted):
            self._threads.append(threading.Thread(target=self._use_process, name="compile", daemon=True))
            self._threads[-1].start()

    def wait(self) -> Compiled:
        """Wait until all jobs are done or have failed, and end the processes. Say in the log how far they are."""
        for _ in self._threads:
            self._jobs.put(None)
        begin = reported = time.monotonic()
        for thread in self._threads:
            while thread.is_alive():
                thread.join(REPORT_SECONDS / 10)
                if time.monotonic() - reported >= REPORT_SECONDS:
                    reported = time.monotonic()
                    done = f"{self._done.kernels} of {self._submitted} kernels"
                    logger.info("compiled %s, for %.0f s so far", done, reported - begin)
        with suppress(queue.Empty):
            # What is left when every process has ended early.
            while True:
                if self._jobs.get_nowait() is not None:
                    self._count(error="no process is left")
        self._done.processes = len(self._threads)
        return self._done

    def _use_process(self) -> None:
        """Start a process, and give it jobs until there are none, or until it ends."""
        job = None
        try:
            with subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment()
            ) as process:
                assert process.stdin is not None and process.stdout is not None
                while (job := self._jobs.get()) is not None:
                    pickle.dump(job, process.stdin)
                    process.stdin.flush()
                    error, seconds = pickle.load(process.stdout)
                    self._count(error=error, seconds=seconds)
                process.stdin.close()
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self._count(error=f"a process that compiles has ended: {error}", failed=int(job is not None))

    def _count(self, *, error: str = "", seconds: float = 0.0, failed: int | None = None) -> None:
        """Count a job, which has failed if there is an error. `failed`: number of jobs that the error ends."""
        with self._lock:
            self._done.kernels += not error
            self._done.failed += bool(error) if failed is None else failed
            self._done.error = self._done.error or error
            self._done.seconds += seconds


def _environment() -> dict[str, str]:
    """Return the environment of a process that compiles: it finds the same packages, and no GPU."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}


def is_interpreted() -> bool:
    """Return whether kernels are interpreted, so that there is nothing to compile."""
    return triton.knobs.runtime.interpret


def possible_processes() -> int:
    """Return how many processes may compile: one for each core that this process may use, as far as half of the free
    memory suffices."""
    cores, free = len(os.sched_getaffinity(0)), _free_bytes()
    return max(1, min(cores, MOST_PROCESSES, free // 2 // PROCESS_BYTES))


def _free_bytes() -> int:
    """Return the free memory of this machine, or of this container if that is less."""
    found = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))))
    with suppress(OSError, ValueError):
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))  # "max" without a limit
    return min(found, default=0)


class _Target:
    """Stands for the driver of a GPU, which a process that compiles does not have."""

    def __init__(self, target: GPUTarget) -> None:
        self.get_current_target = lambda: target


def serve(jobs: BinaryIO, answers: BinaryIO) -> None:
    """Compile jobs until there are no more. Answers each with an error, empty if there was none, and the seconds."""
    while True:
        try:
            data = pickle.load(jobs)
        except EOFError:
            return
        begin, error = time.monotonic(), ""
        try:
            job = unpickled(data)
            if isinstance(job, CompileJob):
                triton.runtime.driver.set_active(_Target(job.target))
            job.run()
        except Exception as failure:  # whatever the compiler raises, the first launch of this kernel raises it again
            error = f"{type(failure).__name__}: {failure}"[:500] or "unknown"
        pickle.dump((error, time.monotonic() - begin), answers)
        answers.flush()


if __name__ == "__main__":
    pipe = os.fdopen(os.dup(1), "wb")
    # What compilers print must not get between the answers.
    os.dup2(2, 1)
    # The module under its own name, by which jobs refer to its classes.
    importlib.import_module("smc.kernels.compile_jobs").serve(sys.stdin.buffer, pipe)
