"""Masks of the tokens that may follow the answers of running requests: a `Follower` for each request, and a
`MaskWriter` that computes the masks of many requests within a budget of time.

Knows nothing about models, slots and rounds, nor how an answer is read (`smc.mask_reader`).

A constraint that cannot be followed any further has failed: its request ends, and no further mask is computed for it.
The library cannot be interrupted, and one of its calls may take seconds. So its calls run in other threads, without the
interpreter's lock, and a wait for them has a limit. Usually one thread computes the masks of all requests. If it takes
too long, its work is abandoned, and every request is computed again in a thread of its own. Those that take more than
their share of processor time there fail; the others are not affected. At most one request whose masks may take long
takes part in a round (`smc.scheduler.mask_turns`)."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import llguidance
import numpy as np

from smc.api.constraint import FIELD, Constraint, ConstraintFailed, ConstraintRefused
from smc.api.request import Answer, FinishReason
from smc.constraints import Compiler
from smc.grammar.compiler import MOST_ACCEPTED
from smc.mask_reader import AnswerReader, Calls, Chain, MaskEnds, MaskPath, Read
from smc.stops import StopMachine

SHARED_SECONDS, SHARED_SECONDS_EACH = 0.05, 0.01
"""Maximum seconds of a round in which the masks of all requests at one model are computed together: in general, and in
addition for each request."""
ROUND_SECONDS, LEAST_SECONDS = 0.2, 0.03
"""Maximum seconds of processor time that the masks of one request may take in a round at one model: if few requests
take long, and if many do."""
ALL_SECONDS = 0.3
"""Maximum seconds of processor time for masks that are computed alone, in a round at one model, divided among the
requests that take long."""
WAIT_SECONDS = 1.0
"""Maximum seconds that a round waits at one model for masks that are computed alone and have used `LEAST_SECONDS`."""
PATIENCE_SECONDS = 3.0
"""The same for masks that have used less, because a busy machine gives them little processor time."""
STUCK_SECONDS = 0.2
"""Maximum seconds that a round waits at one model for masks that wait for the work of a request that has failed."""
REQUEST_SECONDS = 10.0
"""Maximum seconds of processor time that the masks of a request may take at one model. Masks that are computed together
with those of others do not count."""
END_SECONDS = 1.0
"""Maximum seconds for the last check of an answer's end."""
CHEAP_SECONDS = 0.01
"""Masks of a request that take less in a call are computed together with those of others again."""
POLL_SECONDS = 0.005
"""Time between two looks at the processor time of a thread."""
MOST_THREADS = 4
"""Maximum number of threads that compute the masks of all requests."""
LEAST_PRIORITY = 19
"""Priority of threads whose work was abandoned, as in `nice`."""
THREAD_CLOCK = 6
"""Kind of Linux clocks that count the processor time of one thread."""


class Follower:
    """Follows the constraint and the bad words of one request at one model."""

    def __init__(self, machine: StopMachine, compiler: Compiler) -> None:
        """Raises ValueError if the constraint is refused."""
        self._machine, self._compiler = machine, compiler
        self.failure: str | None = None
        """Why the constraint cannot be followed any further."""
        self.alone = False
        """Whether its masks are computed in a thread of its own."""
        self.seconds = 0.0
        """Time that its masks took alone."""
        self.start = None if machine.constraint is None else compiler.start(machine.constraint, MOST_ACCEPTED)
        """The matcher at the beginning, which requests with the same constraint share."""
        self.reader = AnswerReader(self.start, machine, compiler)

    @staticmethod
    def of(machine: StopMachine, compiler: Compiler) -> Follower:
        """Return a follower; it has failed if the constraint is refused, although another process has accepted it: that
        one needed less time to compile it."""
        try:
            return Follower(machine, compiler)
        except ConstraintRefused as error:
            follower = Follower(StopMachine.of((), (), (), None, machine.bad_words), compiler)
            follower.failure = f"{FIELD}: {error.why}"
            return follower

    @property
    def constrained(self) -> bool:
        return self.start is not None

    def restart(self) -> None:
        """Leave the reader to a thread that may still use it."""
        self.reader = AnswerReader(self.start, self._machine, self._compiler)

    def fail(self, why: str) -> None:
        """Let the constraint fail. Its matcher is released."""
        assert self._machine.constraint is not None, "bad words do not fail"
        self.failure = self.failure or f"{FIELD}: the {self._machine.constraint.kind} {why}"
        self.start = None
        self.restart()

    def ends(self, answer_L: np.ndarray) -> bool | None:
        """Return whether an answer may end here; None if that is not known after `END_SECONDS`. The answer may include
        the token that ends it."""
        ends = MaskEnds(self._compiler, np.zeros((1, self._compiler.words), dtype=np.int32))
        until = time.monotonic() + END_SECONDS
        drive = _Drive([self.reader.read_all(answer_L, ends)], ends, _shared_executor()[0], until=until)
        drive.run()
        return None if drive.abandoned else self.reader.accepts


def check_end(compiler: Compiler, constraint: Constraint, tokens: Sequence[int], reason: FinishReason) -> None:
    """Raise ConstraintFailed for an answer that ended by itself where its constraint does not allow an end. This is the
    last check of every answer; masks ensure it already."""
    if reason is not FinishReason.EOS:
        return
    # A constraint that is refused now was accepted when its request came: then nothing is known against the end.
    if Follower.of(StopMachine.of((), (), (), constraint), compiler).ends(np.array(tokens)) is False:
        raise ConstraintFailed(f"{FIELD}: the answer ended where the {constraint.kind} does not allow an end")


def check_particles(compiler: Compiler, constraint: Constraint, answer: Answer) -> Answer:
    """Return an answer whose particles that ended where the constraint does not allow an end count as cut off: their
    finish reason is `LENGTH`."""
    checked = []
    for particle in answer.particles or ():
        try:
            check_end(compiler, constraint, particle.tokens, particle.finish_reason)
        except ConstraintFailed:
            checked.append(replace(particle, finish_reason=FinishReason.LENGTH))
        else:
            checked.append(particle)
    return replace(answer, particles=tuple(checked)) if checked else answer


def check_answer(compiler: Compiler, constraint: Constraint, answer: Answer) -> Answer:
    """Check the end of an answer as `check_end` does, and return it as `check_particles` does. An error names the
    caller's field."""
    try:
        check_end(compiler, constraint, answer.tokens, answer.finish_reason)
    except ConstraintFailed as error:
        raise constraint.failed(str(error)) from error
    return check_particles(compiler, constraint, answer)


class _Drive:
    """Carries out the library's calls of several walks, one of each at a time, without the interpreter's lock."""

    def __init__(
        self,
        walks: Iterable[Calls],
        ends: MaskEnds,
        executor: llguidance.LLExecutor,
        *,
        single: bool = False,
        until: float = math.inf,
    ) -> None:
        """`single`: compute one mask at a time, so that abandoned work ends soon; `until`: when the work is abandoned,
        in seconds of the monotonic clock."""
        self._walks, self._ends, self._executor, self._single = list(walks), ends, executor, single
        self._until = until
        self.abandoned = False
        """The results are not needed any more; nothing further is computed."""
        self._address = ends.masks_RW.ctypes.data
        self._shape = (4 * ends.masks_RW.shape[1], len(ends.masks_RW))
        # With a second matcher, which reads nothing, the library reads a single token without the interpreter's lock.
        self._idle: list[tuple[llguidance.LLMatcher, int]] = []

    def run(self) -> None:
        """Carry out all calls, then write the rest of the masks."""
        found: list[tuple[Calls, Chain | Read]] = []
        for walk in self._walks:
            _advance(walk, None, found)
        while found and not self.abandoned:
            if time.monotonic() > self._until:
                self.abandoned = True
                return
            calls, found = found, []
            reads = [(walk, call) for walk, call in calls if isinstance(call, Read)]
            chains = [(walk, call) for walk, call in calls if isinstance(call, Chain)]
            results = self._read([(call.matcher, call.token) for _, call in reads]) if reads else []
            if chains:
                self._compute([call for _, call in chains])
            if self.abandoned:
                return
            for (walk, _), result in zip((*reads, *chains), (*results, *[True] * len(chains))):
                _advance(walk, result, found)
        if not self.abandoned:
            self._ends.write()

    def _read(self, reads: list[tuple[llguidance.LLMatcher, int]]) -> list[bool]:
        if len(reads) == 1:
            self._idle = self._idle or [(_broken_matcher().deep_copy(), 0)]
        return self._executor.consume_token_par(reads + self._idle)[: len(reads)]

    def _compute(self, chains: list[Chain]) -> None:
        if self._single:
            for chain in chains:
                self._compute_singly(chain)
            return
        single = [(chain.matcher, chain.row) for chain in chains if not chain.tokens]
        longer = [(chain.matcher, chain.row, chain.tokens) for chain in chains if chain.tokens]
        if single:
            self._executor.unsafe_compute_mask_ptr(single, self._address, *self._shape)
        if longer:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(longer, self._address, *self._shape)

    def _compute_singly(self, chain: Chain) -> None:
        matcher, row, read = chain.matcher, chain.row, 0
        self._executor.unsafe_compute_mask_ptr([(matcher, row)], self._address, *self._shape)
        for token in chain.tokens:
            if self.abandoned or matcher.is_error() or not self._ends.allows(row + read, token):
                break
            if not self._read([(matcher, token)])[0]:
                return
            read += 1
            self._executor.unsafe_compute_mask_ptr([(matcher, row + read)], self._address, *self._shape)
        if read and not matcher.is_error():
            matcher.rollback(read)


def _advance(walk: Calls, result: bool | None, found: list[tuple[Calls, Chain | Read]]) -> None:
    """Give a walk the result of its last call, and add its next call to `found`, if it has one."""
    try:
        found.append((walk, next(walk) if result is None else walk.send(result)))
    except StopIteration:
        return


class MaskWriter:
    """Computes the masks at one model, within a budget of time for each round."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._memory_RW = np.zeros((0, compiler.words), dtype=np.int32)
        self._helper: ThreadPoolExecutor | None = None
        self._helper_threads: tuple[int, ...] = ()
        """Native id of the helper's thread."""
        self._abandoned: list[_Abandoned] = []
        self.begin_round()

    def begin_round(self) -> None:
        """Renew the budget."""
        self._together, self._wait_left = 0.0, WAIT_SECONDS
        self._seconds: dict[Follower, float] = {}
        """Processor time of this round that the masks of each follower took alone."""

    def write(self, needed: Sequence[tuple[Follower, Sequence[MaskPath]]], masks_RW: np.ndarray) -> None:
        """Write the masks of several requests, int32. Rows without a mask allow all tokens, as do rows after an answer
        that violates the constraint; nothing may depend on the latter. Rows of constraints that have failed allow
        none. Returns in time, whatever the constraints are (see the beginning of this file)."""
        masks_RW[:] = -1
        sound = [(follower, paths) for follower, paths in needed if follower.failure is None]
        together = [one for one in sound if not one[0].alone]
        alone = [one for one in sound if one[0].alone]
        if together and not self._write_together(together, masks_RW):
            for follower, _ in together:
                follower.alone = follower.constrained
            alone += [one for one in together if one[0].alone]
            self._write_now([one for one in together if not one[0].alone], masks_RW)
        if alone:
            self._write_alone(alone, masks_RW)
        for follower, _ in sound:
            if follower.failure is None and follower.reader.failure is not None:
                follower.fail(follower.reader.failure)
        for follower, paths in needed:
            for path in paths if follower.failure is not None else ():
                masks_RW[path.row : path.row + path.masks] = 0

    def _write_together(self, needed: list[tuple[Follower, Sequence[MaskPath]]], masks_RW: np.ndarray) -> bool:
        """Compute masks in one thread. Return False if that takes too long."""
        if not any(follower.constrained for follower, _ in needed):
            self._write_now(needed, masks_RW)
            return True
        left = SHARED_SECONDS + SHARED_SECONDS_EACH * len(needed) - self._together
        if left <= 0:
            return False
        drive, found_RW = self._drive(needed, len(masks_RW), self._memory_RW, _shared_executor()[0])
        if self._helper is None:
            self._helper = ThreadPoolExecutor(1, "masks")
            self._helper_threads = (self._helper.submit(threading.get_native_id).result(),)
        began = time.monotonic()
        try:
            work = self._helper.submit(drive.run)
            work.result(left)
        except TimeoutError:
            drive.abandoned = True
            starts = tuple(follower.start for follower, _ in needed if follower.start is not None)
            threads = (*_shared_executor()[1], *self._helper_threads)
            self._abandoned.append(_Abandoned(starts, work.done, threads, failed=False))
            for follower, _ in needed:
                follower.restart()
            self._helper.shutdown(wait=False)
            self._helper, self._memory_RW = None, self._memory_RW[:0].copy()
            _shared_executor.cache_clear()
            return False
        finally:
            self._together += time.monotonic() - began
        self._memory_RW = found_RW if len(found_RW) > len(self._memory_RW) else self._memory_RW
        masks_RW[:] = found_RW[: len(masks_RW)]
        return True

    def _write_now(self, needed: list[tuple[Follower, Sequence[MaskPath]]], masks_RW: np.ndarray) -> None:
        """Write masks of requests without a constraint, whose rows need no call of the library."""
        ends = MaskEnds(self._compiler, masks_RW)
        _Drive([follower.reader.walk(paths, ends, 0) for follower, paths in needed], ends, _shared_executor()[0]).run()

    def _drive(
        self,
        needed: list[tuple[Follower, Sequence[MaskPath]]],
        rows: int,
        memory_RW: np.ndarray,
        executor: llguidance.LLExecutor,
        *,
        single: bool = False,
    ) -> tuple[_Drive, np.ndarray]:
        """Return the work for these masks, and the memory that it writes: `rows` rows, and a further one for each
        request."""
        total = rows + len(needed)
        if len(memory_RW) < total:
            memory_RW = np.empty((total, self._compiler.words), dtype=np.int32)
        memory_RW[:total] = -1
        ends = MaskEnds(self._compiler, memory_RW)
        walks = [follower.reader.walk(paths, ends, rows + i) for i, (follower, paths) in enumerate(needed)]
        return _Drive(walks, ends, executor, single=single), memory_RW

    def _write_alone(self, needed: list[tuple[Follower, Sequence[MaskPath]]], masks_RW: np.ndarray) -> None:
        """Compute the masks of each request in a thread of its own. Those that take too long fail."""
        works = []
        for follower, paths in needed:
            count = sum(path.masks for path in paths)
            first_rows = itertools.accumulate((path.masks for path in paths), initial=0)
            moved = [path._replace(row=row) for path, row in zip(paths, first_rows)]
            none_RW = np.empty((0, self._compiler.words), dtype=np.int32)
            executor, threads = _new_executor(1)
            drive, found_RW = self._drive([(follower, moved)], count, none_RW, executor, single=True)
            works.append((follower, paths, _Work(drive, threads), found_RW))
        # A busy machine takes long to start the threads. The last one has as much time as the others.
        began = time.monotonic()
        deadline = began + self._wait_left
        running = works
        while running := [one for one in running if not one[2].wait(POLL_SECONDS / len(running))]:
            took = [work.seconds() for *_, work, _ in running]
            share = min(ROUND_SECONDS, max(LEAST_SECONDS, ALL_SECONDS / max(sum(s > LEAST_SECONDS for s in took), 1)))
            used: defaultdict[llguidance.LLMatcher | None, float] = defaultdict(float)
            sizes = Counter(follower.start for follower, *_ in running)
            for (follower, *_), seconds in zip(running, took):
                used[follower.start] += seconds
            # Matchers of one constraint wait for each other in the library, also for those of abandoned work.
            most = {start: max(ROUND_SECONDS, LEAST_SECONDS * size) for start, size in sizes.items()}
            self._abandoned = [one for one in self._abandoned if not one.has_ended()]
            now = time.monotonic()
            for (follower, _, work, _), own in zip(running, took):
                start = follower.start
                ahead = [one for one in self._abandoned if start in one.starts]
                others = sum(one.seconds() for one in ahead)
                is_stuck = now > began + STUCK_SECONDS and any(one.failed for one in ahead)
                is_over = now > (deadline if own > LEAST_SECONDS else began + PATIENCE_SECONDS)
                is_late = used[start] + others > most[start] or is_stuck or is_over
                if own > self._left(follower, share) or is_late:
                    work.abandon()
                    assert start is not None, "a constraint that has not failed"
                    self._abandoned.append(_Abandoned((start,), work.has_ended, (), failed=True))
                    follower.fail(_too_slow(follower.seconds + own))
            running = [one for one in running if one[0].failure is None]
        for follower, paths, work, found_RW in works:
            if follower.failure is None:
                self._count(follower, work.seconds())
                row = 0
                for path in paths:
                    masks_RW[path.row : path.row + path.masks] = found_RW[row : row + path.masks]
                    row += path.masks
        self._wait_left = deadline - time.monotonic()

    def _left(self, follower: Follower, share: float) -> float:
        """Seconds of processor time that the masks of a request may take now. `share`: its share of the round."""
        return min(share - self._seconds.get(follower, 0.0), REQUEST_SECONDS - follower.seconds)

    def _count(self, follower: Follower, seconds: float) -> None:
        follower.seconds += seconds
        self._seconds[follower] = self._seconds.get(follower, 0.0) + seconds
        follower.alone = seconds > CHEAP_SECONDS


def _too_slow(seconds: float) -> str:
    limit = f"for {REQUEST_SECONDS:g} s in all" if seconds > REQUEST_SECONDS else "for a few tokens"
    return f"takes too much time {limit}; simplify it"


class _Abandoned:
    """Work whose results are not needed any more, but which has not ended: a call of the library cannot be stopped."""

    def __init__(
        self,
        starts: tuple[llguidance.LLMatcher, ...],
        has_ended: Callable[[], bool],
        threads: tuple[int, ...],
        *,
        failed: bool,
    ) -> None:
        """`starts`: matchers of its constraints at their beginnings; `threads`: native ids of those whose processor
        time counts for these constraints; `failed`: its request has failed."""
        self.starts, self.has_ended, self._threads, self.failed = frozenset(starts), has_ended, threads, failed
        self._before = sum(map(_processor_seconds, threads))

    def seconds(self) -> float:
        """Return the processor time since it was abandoned."""
        return max(sum(map(_processor_seconds, self._threads)) - self._before, 0.0)


class _Work:
    """Work in a thread of its own, and in that of its executor."""

    def __init__(self, drive: _Drive, executor_threads: Iterable[int]) -> None:
        """`executor_threads`: native ids of the executor's threads."""
        self._drive, self._done, self._begun = drive, threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._threads = list(executor_threads)
        self._seconds = 0.0
        threading.Thread(target=self._run, name="masks of one request", daemon=True).start()

    def has_ended(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` until the work has ended. Return whether it has. Raises its error."""
        is_done = self._done.wait(seconds)
        if self._error is not None:
            raise self._error
        return is_done

    def seconds(self) -> float:
        """Return the processor time of the threads so far."""
        if self._done.is_set() or not self._begun.is_set():
            return self._seconds
        return sum(map(_processor_seconds, self._threads))

    def abandon(self) -> None:
        """Let the work end after the current call of the library. It hardly slows other threads until then."""
        self._drive.abandoned = True
        _lower(self._threads)

    def _run(self) -> None:
        self._threads.append(threading.get_native_id())
        self._begun.set()
        try:
            self._drive.run()
        except BaseException as error:  # raised to the thread that waits
            self._error = error
        self._seconds = sum(map(_processor_seconds, self._threads))
        self._done.set()


def _processor_seconds(thread: int) -> float:
    """Return the processor time of a thread of this process, by its native id; 0 if it has ended."""
    try:
        return time.clock_gettime(~thread << 3 | THREAD_CLOCK)
    except OSError:
        return 0.0


def _lower(threads: Iterable[int]) -> None:
    """Give threads of this process, by their native ids, the least priority."""
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, thread, LEAST_PRIORITY)


def _new_executor(count: int) -> tuple[llguidance.LLExecutor, tuple[int, ...]]:
    """Return an executor, and the native ids of its threads; none if they are not known because other threads began at
    the same time."""
    before = set(os.listdir("/proc/self/task"))
    executor = llguidance.LLExecutor(count)
    new = set(os.listdir("/proc/self/task")) - before
    return executor, tuple(map(int, new)) if len(new) == count else ()


@cache
def _shared_executor() -> tuple[llguidance.LLExecutor, tuple[int, ...]]:
    """Threads that compute masks, with their native ids; they sleep between rounds. Half of the cores are left to other
    work."""
    return _new_executor(max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // 2)))


@cache
def _broken_matcher() -> llguidance.LLMatcher:
    """A matcher that reads no token."""
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_OneToken()), n_vocab=1, eos_token=0)
    return llguidance.LLMatcher(tokenizer, "start: (", log_level=0)


class _OneToken:
    """A vocabulary of one token, in the form that llguidance reads."""

    bos_token_id, eos_token_id = None, 0
    special_token_ids, tokens = (0,), (b"<end>",)

    def __call__(self, text: bytes) -> list[int]:
        return []
