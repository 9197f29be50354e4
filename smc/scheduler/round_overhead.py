"""How long rounds of the draft-target pair take besides the models' work.

What a latency model says of it was measured when the engine started, maybe beside other work on the host. Too high, it
would keep the engine from drafting, and rounds that could show it would never come. So it counts as 0 until rounds have
shown it, and never as more than what they show."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from smc.executor.messages import Pending
from smc.executor.round_executor import RoundReports
from smc.scheduler.speculation import LatencyModel
from smc.types import ModelRole

Spans = Mapping[str, tuple[int, int]]
"""Begin and end of each piece of a round's work, in nanoseconds: see `Pending.spans`."""
SAMPLES = 32
"""Steps whose median is compared with the latency model."""
NOTABLE = 0.05
"""Share of a step by which it must take less than the latency model says."""
logger = logging.getLogger(__name__)


class RoundOverhead:
    """Corrects the overhead of an engine's latency model."""

    def __init__(self, *, lookahead: bool) -> None:
        """`lookahead`: the form of rounds."""
        self._lookahead = lookahead
        self.latency: LatencyModel | None = None
        """The latency model with its present overhead; None: there is none."""
        self._measured: float | None = None
        """The overhead that was measured, until rounds have shown it; None: they have."""
        self._before: tuple[int, int] | None = None
        """Number of rounds of the step before, all of the pair and without prompts, and when the last of them ended."""
        self._samples: list[tuple[float, float]] = []
        """Seconds of a step, and those of them in which the models had nothing to do."""

    def begin(self, measured: LatencyModel | None) -> None:
        """Use a latency model that has been measured, or none."""
        self._measured, self._samples = None if measured is None else measured.round_overhead, []
        self.latency = None if measured is None else replace(measured, round_overhead=0.0)

    def follow(self, rounds: Sequence[Pending[RoundReports]], *, beside_prompts: bool) -> None:
        """Called after each step with the rounds that it has read. `beside_prompts`: it has scheduled prompts, which
        run between rounds."""
        if self.latency is None or not self._sample(rounds, beside_prompts) or len(self._samples) < SAMPLES:
            return
        seconds, shown = map(statistics.median, zip(*self._samples))
        self._samples, measured, self._measured = [], self._measured, None
        before = self.latency.round_overhead if measured is None else measured
        is_lower = before - shown > NOTABLE * seconds
        if is_lower:
            logger.info(
                "rounds take %.2f ms besides the models' work, not the %.2f ms that were measured before",
                1e3 * shown,
                1e3 * before,
            )
        if is_lower or measured is not None:
            self.latency = replace(self.latency, round_overhead=shown if is_lower else before)

    def _sample(self, rounds: Sequence[Pending[RoundReports]], beside_prompts: bool) -> bool:
        """Take a sample of this step, and return True, if it and the one before had as many rounds of the pair and
        nothing else."""
        before, self._before = self._before, None
        if not rounds or beside_prompts:
            return False
        spans = [one.spans() for one in rounds]
        if not all(role in each for each in spans for role in ModelRole):
            return False
        # Clocks of two hosts may drift apart, so times of both models are not compared.
        last = max(each[ModelRole.TARGET][1] for each in spans)
        self._before = len(rounds), last
        if before is None or before[0] != len(rounds):
            return False
        whole = 1e-9 * (last - before[1])
        idle = whole - busy_seconds(spans, together=self._lookahead or len(rounds) > 1)
        if idle < -NOTABLE * whole:  # work of another step lies between these two
            return False
        self._samples.append((whole, max(0.0, idle)))
        return True


def busy_seconds(rounds: Sequence[Spans], *, together: bool) -> float:
    """Return the seconds for which rounds of the pair keep the models busy. `together`: the models work at the same
    time."""
    work = [sum(_length(spans, role) for spans in rounds) for role in ModelRole]
    return sum(_length(spans, "redraft") for spans in rounds) + (max(work) if together else sum(work))


def _length(spans: Spans, name: str) -> float:
    begin, end = spans.get(name, (0, 0))
    return 1e-9 * (end - begin)
