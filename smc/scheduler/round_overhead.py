"""How long rounds of the draft-target pair take besides the models' work.

What a latency model says of it was measured when the engine started, maybe beside other work on the host. Too high, it
would keep the engine from drafting, and rounds that could show it would never come. So it counts as 0 until rounds have
shown it, and from then on as no more than what was measured or they show; and again as 0 after a long time without
rounds of both models."""

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
"""Share of a step by which later steps must take less than was shown before."""
PATIENCE = 8 * SAMPLES
"""Steps with rounds of the pair, most of them beside other work, after which what was measured counts."""
RETRY = 2_000
"""Steps with rounds of one model alone after which the overhead counts as 0 again."""
logger = logging.getLogger(__name__)


class RoundOverhead:
    """Corrects the overhead of an engine's latency model."""

    def __init__(self, *, lookahead: bool) -> None:
        """`lookahead`: the form of rounds."""
        self._lookahead = lookahead
        self.latency: LatencyModel | None = None
        """The latency model with its present overhead; None: there is none."""
        self._least, self._counts = 0.0, False
        """The least overhead that was measured or shown, and whether it counts."""
        self._before: tuple[int, int] | None = None
        """Number of rounds of the step before, all of the pair and without prompts, and when the last of them ended."""
        self._samples: list[tuple[float, float]] = []
        """Seconds of a step, and those of them in which the models had nothing to do. Times of steps are those of the
        host, so that single ones may be below 0."""
        self._of_pair, self._alone = 0, 0
        """Steps with rounds of the pair since `_set`, and steps without any since the last one."""

    def begin(self, measured: LatencyModel | None) -> None:
        """Use a latency model that has been measured, or none."""
        self.latency, self._least = measured, 0.0 if measured is None else measured.round_overhead
        self._set(False)

    def _set(self, counts: bool) -> None:
        """Let the overhead count, or count as 0."""
        self._counts, self._samples, self._of_pair, self._alone = counts, [], 0, 0
        if self.latency is not None:
            self.latency = replace(self.latency, round_overhead=self._least if counts else 0.0)

    def follow(self, rounds: Sequence[Pending[RoundReports]], *, beside_prompts: bool) -> None:
        """Called after each step with the rounds that it has read. `beside_prompts`: it has scheduled prompts, which
        run between rounds."""
        if self.latency is None or not rounds:
            self._before = None
            return
        spans = [one.spans() for one in rounds]
        are_of_pair = [all(role in each for role in ModelRole) for each in spans]
        if any(are_of_pair):
            self._of_pair, self._alone = self._of_pair + 1, 0
        else:
            self._alone += 1
        if self._alone >= RETRY:
            self._set(False)
        self._sample(spans if all(are_of_pair) and not beside_prompts else [])
        if len(self._samples) == SAMPLES:
            self._compare()
        elif not self._counts and self._of_pair >= PATIENCE:
            self._set(True)

    def _sample(self, spans: Sequence[Spans]) -> None:
        """Take a sample of a step that has read these rounds of the pair and nothing else, if the one before had as
        many."""
        before, self._before = self._before, None
        if not spans:
            return
        # Clocks of two hosts may drift apart, so times of both models are not compared.
        last = max(each[ModelRole.TARGET][1] for each in spans)
        self._before = len(spans), last
        if before is None or before[0] != len(spans):
            return
        whole = 1e-9 * (last - before[1])
        idle = whole - busy_seconds(spans, together=self._lookahead)
        if idle > -whole / 2:  # otherwise work of another step lies between these two
            self._samples.append((whole, idle))

    def _compare(self) -> None:
        """Compare the samples with what is known."""
        seconds, shown = map(statistics.median, zip(*self._samples))
        shown, self._samples = max(0.0, shown), []
        if self._least - shown > NOTABLE * seconds:
            logger.info(
                "rounds take %.2f ms besides the models' work, not the %.2f ms that were measured before",
                1e3 * shown,
                1e3 * self._least,
            )
        elif self._counts:
            return
        self._least = min(self._least, shown)
        self._set(True)


def busy_seconds(rounds: Sequence[Spans], *, together: bool) -> float:
    """Return the seconds for which the rounds of a step, all of the pair, keep the models busy. `together`: both models
    work on a round at the same time. Several rounds are those of micro-batches: one is drafted while another is
    scored."""
    draft, target, again = (
        sum(_length(spans, name) for spans in rounds) for name in (ModelRole.DRAFT, ModelRole.TARGET, "redraft")
    )
    if len(rounds) > 1:
        return max(again + draft, target)
    return again + (max(draft, target) if together else draft + target)


def _length(spans: Spans, name: str) -> float:
    begin, end = spans.get(name, (0, 0))
    return 1e-9 * (end - begin)
