"""How long rounds of the draft-target pair take besides the models' work, as they show it. The latency model has a
measurement of it from the start, when other work on the host may have disturbed it: too high, it would keep the engine
from drafting. So it is lowered to what rounds show."""

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
"""Rounds whose median is compared with the latency model."""
NOTABLE = 0.05
"""Share of a round by which they must take less than the latency model says."""
logger = logging.getLogger(__name__)


class RoundOverhead:
    """Corrects the overhead of a latency model."""

    def __init__(self) -> None:
        self._before: Spans | None = None
        """Work of the last step's round, if there was one of the pair and nothing else."""
        self._samples: list[tuple[float, float]] = []
        """Seconds of a round, and those of them in which no model worked."""

    def corrected(
        self, latency: LatencyModel, rounds: Sequence[Pending[RoundReports]], *, beside_prompts: bool
    ) -> LatencyModel:
        """Return the latency model after a step that has read `rounds`. `beside_prompts`: it has scheduled prompts,
        which run between rounds."""
        before, self._before = self._before, None
        if len(rounds) != 1 or beside_prompts:
            return latency
        spans = rounds[0].spans()
        if not all(role in spans for role in ModelRole):
            return latency
        self._before = spans
        if before is None:
            return latency
        whole = 1e-9 * (spans[ModelRole.TARGET][1] - before[ModelRole.TARGET][1])
        self._samples.append((whole, max(0.0, whole - busy_seconds(spans))))
        if len(self._samples) < SAMPLES:
            return latency
        seconds, overhead = map(statistics.median, zip(*self._samples))
        self._samples.clear()
        if latency.round_overhead - overhead <= NOTABLE * seconds:
            return latency
        logger.info(
            "rounds take %.2f ms besides the models' work, not the %.2f ms that were measured before",
            1e3 * overhead,
            1e3 * latency.round_overhead,
        )
        return replace(latency, round_overhead=overhead)


def busy_seconds(spans: Spans) -> float:
    """Return the seconds of a round of the pair in which at least one model ran its pass, or the draft drafted
    again."""
    begins, ends = spans.get("redraft", (0, 0))
    (begin, end), (other, last) = sorted(spans[role] for role in ModelRole)
    return 1e-9 * (ends - begins + end - begin + max(0, last - max(end, other)))
