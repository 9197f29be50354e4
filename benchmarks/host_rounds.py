"""Simulates a service whose host and GPU limit each other, without a GPU.

    python -m benchmarks.host_rounds --traces FILE --latency FILE [--host 1 3] [--requests 16 64] [--slots 64]
        [--prompts 0.0056 0.0008] [--steps 300]

The real scheduler decodes exactly, in lockstep on one GPU, as many requests at a time as `--requests`; whenever one
ends the next begins. Answers are replayed (`benchmarks.traces`), rounds take the seconds of a latency model, as in
`benchmarks.policy`, and passes over prompts those of `--prompts` (target, draft). The GPU does all this one after
another. The host's time is the CPU time that the scheduler really takes here, times `--host`: 3 gave about the rounds
of a service in benchmarks/notes/speed.md, whose processes also exchange messages. Prompts have a few
tokens. Prints tokens a second, the time of a round, and that of the host in it, tokens a round of a request, and
prompts that share a pass."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.load import ClosedLoop
from benchmarks.policy import TreeSize, VirtualClock, config_of
from benchmarks.traces import TraceLibrary, load, replay_engine, replayed_request
from smc.api.engine_config import GPU_PREFILL, EngineConfig
from smc.api.request import Output
from smc.executor.messages import Pending, PromptBatch
from smc.executor.round_executor import RoundExecutor
from smc.round.plan import RoundPlan, SequenceHandoff
from smc.scheduler.speculation import LatencyModel
from smc.types import ModelRole

MOST = TreeSize(particles=8, block=8, branches=1)
"""The largest tree."""
LINK, BACK = 0.002, 0.0005
"""Seconds from a request of work until a GPU may begin it, and from its end until the host has the result."""
FIRST_STEPS = 100
"""Steps that are not counted."""


class Clock:
    """Time of a host and of a GPU, in seconds."""

    def __init__(self, slowness: float) -> None:
        self._slowness, self._began = slowness, time.thread_time()
        self._outside = self._waited = self._free = 0.0
        """CPU time that is not the host's; seconds that it has waited; when the GPU has done all work."""

    @property
    def worked(self) -> float:
        """Seconds that the host has worked."""
        return self._slowness * (time.thread_time() - self._began - self._outside)

    @property
    def now(self) -> float:
        return self.worked + self._waited

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Work in here takes the host no time."""
        begin = time.thread_time()
        try:
            yield
        finally:
            self._outside += time.thread_time() - begin

    def queue(self, seconds: float) -> float:
        """Queue work for the GPU. Return when it will end."""
        self._free = max(self._free, self.now + LINK) + seconds
        return self._free

    def wait(self, end: float) -> None:
        """Let the host wait for the result of work that ends then."""
        self._waited += max(0.0, end + BACK - self.now)


@dataclass(frozen=True)
class QueuedWork:
    """A `smc.executor.messages.Pending` whose result the GPU has later."""

    clock: Clock
    pending: Pending[Any]
    seconds: float
    end: float
    name: str
    """Of its span."""

    def result(self) -> Any:
        self.clock.wait(self.end)
        with self.clock.outside():
            return self.pending.result()

    def failures(self) -> dict[int, str]:
        return {}

    def spans(self) -> dict[str, tuple[int, int]]:
        return {self.name: (0, int(1e9 * self.seconds))}


class GpuRounds:
    """A `RoundExecutor` whose rounds take their time on a GPU."""

    pipelined = True

    def __init__(self, rounds: RoundExecutor, clock: Clock, latency: LatencyModel, config: EngineConfig) -> None:
        self._rounds, self._clock = VirtualClock(rounds, latency, config), clock

    def join(self, role: ModelRole, group: SequenceHandoff) -> None:
        with self._clock.outside():
            self._rounds.join(role, group)

    def round(self, plan: RoundPlan[np.ndarray]) -> QueuedWork:
        with self._clock.outside():
            pending, seconds = self._rounds.round(plan), self._rounds.advance()
        return QueuedWork(self._clock, pending, seconds, self._clock.queue(seconds), ModelRole.TARGET)


@dataclass(frozen=True)
class Simulated:
    """What steps with a number of requests brought."""

    requests: int
    steps: int
    seconds: float
    host_seconds: float
    tokens: int
    answers: int
    """Answers that ended. The first token of each comes from its prompt."""
    passes: int
    """Passes of the target over prompts."""

    def __str__(self) -> str:
        each, host = (1e3 * seconds / self.steps for seconds in (self.seconds, self.host_seconds))
        return (
            f"{self.requests} requests: {self.tokens / self.seconds:,.0f} tokens a second; round {each:.2f} ms, "
            f"host {host:.2f}; {(self.tokens - self.answers) / self.steps / self.requests:.2f} tokens a round; "
            f"{self.answers / max(1, self.passes):.2f} prompts a pass"
        )


class ServiceLoop(ClosedLoop):
    """Submits requests as the service does, while rounds run."""

    def step(self) -> list[Output]:
        self.wave += 1
        outputs = self.engine.step(self._submit_missing)
        self._remove_finished(outputs)
        return outputs


def simulate(
    library: TraceLibrary,
    latency: LatencyModel,
    requests: int,
    *,
    slots: int,
    slowness: float,
    prompts: Sequence[float],
    steps: int,
) -> Simulated:
    """`slowness`: of the host; `prompts`: seconds of a pass over prompts, of the target and of the draft."""
    clock, passes = Clock(slowness), 0
    config = replace(config_of("lockstep", MOST, "adaptive"), max_slots=slots, **GPU_PREFILL)
    engine = replay_engine(library, config, lambda rounds: GpuRounds(rounds, clock, latency, config))
    engine.latency = latency

    def timed(role: ModelRole, seconds: float) -> Callable[[PromptBatch], QueuedWork]:
        run = engine.workers[role].run_prompts

        def run_prompts(batch: PromptBatch) -> QueuedWork:
            nonlocal passes
            passes += role is ModelRole.TARGET
            with clock.outside():
                pending = run(batch)
            return QueuedWork(clock, pending, seconds, clock.queue(seconds), "prompt")

        return run_prompts

    for role, seconds in zip((ModelRole.TARGET, ModelRole.DRAFT), prompts, strict=True):
        worker: Any = engine.workers[role]
        worker.run_prompts = timed(role, seconds)
    asked = (replayed_request(library, number, MOST.particles) for number in itertools.count())
    loop = ServiceLoop(engine, asked, requests)
    for _ in range(FIRST_STEPS):
        loop.step()
    passes, begin, worked, tokens, answers = 0, clock.now, clock.worked, 0, 0
    for _ in range(steps):
        outputs = loop.step()
        tokens += sum(len(output.tokens) for output in outputs)
        answers += sum(output.answer is not None for output in outputs)
    return Simulated(requests, steps, clock.now - begin, clock.worked - worked, tokens, answers, passes)


def main(argv: Sequence[str] | None = None) -> list[Simulated]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="file of traces (benchmarks.policy)")
    parser.add_argument("--latency", type=Path, required=True, help="latency model, as JSON")
    parser.add_argument("--subject", help="name of the prompts; default: all")
    parser.add_argument("--temperature", type=float, help="default: all")
    parser.add_argument("--host", type=float, nargs="+", default=[1.0, 3.0], help="times this CPU's; default: 1 3")
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 64], help="default: 16 64")
    parser.add_argument("--slots", type=int, default=64, help="rows of all trees together; default: %(default)s")
    parser.add_argument(
        "--prompts", type=float, nargs=2, default=[0.0056, 0.0008], metavar=("TARGET", "DRAFT"),
        help="seconds of a pass; default: 0.0056 0.0008",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    given = parser.parse_args(argv)
    library, latency = load(given.traces), LatencyModel.from_json(given.latency.read_text())
    library.offer_averages()
    kinds = sorted({(trace.subject, trace.temperature) for trace in library.traces})
    found = []
    for subject, temperature in kinds:
        if given.subject not in (None, subject) or given.temperature not in (None, temperature):
            continue
        part = library.part(subject, temperature)
        for requests, slowness in itertools.product(given.requests, given.host):
            found.append(
                simulate(
                    part, latency, requests, slots=given.slots, slowness=slowness, prompts=given.prompts,
                    steps=given.steps,
                )
            )  # fmt: skip
            print(f"{subject}, temperature {temperature:g}, host x {slowness:g}: {found[-1]}", flush=True)
    return found


if __name__ == "__main__":
    main()
