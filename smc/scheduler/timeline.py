"""Timeline of rounds: when each model worked and when the coordinator waited, and a Chrome trace of all of it.

All times are nanoseconds of the coordinator's monotonic clock.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from smc.types import ModelRole, is_mask_span

MAX_EVENTS = 400_000
"""A trace stops growing here: an hour of one request's rounds."""
LANES = {"coordinator": 0, "draft": 1, "target": 2}


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of one engine step in which a model worked."""

    whole: float
    draft: float
    target: float
    link: float
    """The coordinator waited and neither model worked: messages were in flight."""
    coordinator: float
    """The coordinator did not wait."""
    draft_stall: float
    target_stall: float


@dataclass(frozen=True)
class Span:
    lane: str
    name: str
    begin: int
    end: int


class Timeline:
    """Collects spans of the step that is under way; keeps all of them only if a trace is wanted."""

    def __init__(self, trace: bool = False) -> None:
        self._step: list[Span] = []
        self._waits: list[tuple[int, int]] = []
        self._trace: list[Span] | None = [] if trace else None

    def worked(self, role: ModelRole, name: str, begin: int, end: int) -> None:
        if is_mask_span(name):
            # Beside the model.
            return
        self._step.append(Span(role, name, begin, end))

    def waited(self, begin: int, end: int) -> None:
        self._waits.append((begin, end))

    def forget(self) -> None:
        """Drop the spans since the last step: they belong to no round."""
        self._step, self._waits = [], []

    def end_step(self, begin: int, end: int) -> RoundTimes | None:
        """The step's times by part; None if no model worked."""
        spans, waits = self._step, self._waits
        self._step, self._waits = [], []
        if not spans:
            return None
        self._keep(spans, waits, begin, end)
        busy = {role: sum(s.end - s.begin for s in spans if s.lane == role) for role in ModelRole}
        waited = sum(stop - start for start, stop in waits)
        idle = waited - sum(overlap(wait, [(s.begin, s.end) for s in spans]) for wait in waits)
        parts = (end - begin, busy[ModelRole.DRAFT], busy[ModelRole.TARGET], idle, end - begin - waited)
        stalls = (max(0, end - begin - busy[role]) for role in ModelRole)
        return RoundTimes(*(1e-9 * part for part in (*parts, *stalls)))

    def _keep(self, spans: list[Span], waits: list[tuple[int, int]], begin: int, end: int) -> None:
        if self._trace is None or len(self._trace) >= MAX_EVENTS:
            return
        self._trace += spans
        edges = [begin, *(edge for wait in waits for edge in wait), end]
        self._trace += [Span("coordinator", "work", a, b) for a, b in zip(edges[::2], edges[1::2]) if b > a]

    def write(self, path: Path) -> None:
        """The spans as a Chrome trace (chrome://tracing, Perfetto). Needs `trace=True`."""
        assert self._trace is not None
        events = [
            {"ph": "M", "pid": 0, "tid": lane, "name": "thread_name", "args": {"name": name}}
            for name, lane in LANES.items()
        ]
        for span in self._trace:
            times = {"ts": span.begin / 1e3, "dur": (span.end - span.begin) / 1e3}
            events.append({"ph": "X", "pid": 0, "tid": LANES[span.lane], "name": span.name, **times})
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def overlap(interval: tuple[int, int], others: list[tuple[int, int]]) -> int:
    """How much of `interval` is covered by the union of `others`."""
    covered, position = 0, interval[0]
    for begin, end in sorted(others):
        begin, end = max(begin, position), min(end, interval[1])
        if end > begin:
            covered, position = covered + end - begin, end
    return covered
