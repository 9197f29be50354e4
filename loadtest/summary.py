"""Figures of a run, computed from the records of its requests: latencies, throughput, goodput, and how requests ended.
Uses no clock and no service, and prints nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.client import RequestRecord
from loadtest.slo import LatencyObjective
from smc.api.sampling_params import Method

PERCENTILES = (50, 90, 95, 99)
LATE = 0.05
"""Maximum lateness in seconds. A generator whose 99th percentile of lateness is above this did not keep to its plan."""


@dataclass(frozen=True)
class LatencySpread:
    """Mean and percentiles of one kind of latency, in milliseconds; zeros if nothing was measured, as in vLLM."""

    count: int
    mean: float
    median: float
    std: float
    percentiles: dict[int, float]

    @classmethod
    def of(cls, seconds: Iterable[float]) -> LatencySpread:
        values = 1e3 * np.array(list(seconds), dtype=np.float64)
        if not len(values):
            return cls(0, 0.0, 0.0, 0.0, dict.fromkeys(PERCENTILES, 0.0))
        quantiles = np.percentile(values, PERCENTILES)
        return cls(
            len(values),
            float(values.mean()),
            float(np.median(values)),
            float(values.std()),
            dict(zip(PERCENTILES, quantiles.tolist())),
        )


@dataclass(frozen=True)
class RunSummary:
    """Figures of the requests after the warm-up."""

    sent: int
    completed: int
    cancelled: int
    """Requests that this client cancelled, as planned; a request that was answered before counts as completed."""
    failed: int
    ordinary: int
    """Requests whose clients wait and read at full speed. Latencies, goodput and `good` count only these."""
    good: int | None
    """Ordinary requests that met the objective; None without an objective."""
    first_send: float
    """Time in seconds since the start of the run; `last_send` and `last_end` likewise."""
    last_send: float
    last_end: float
    input_tokens: int
    output_tokens: int
    """Tokens of complete answers only."""
    ttft: LatencySpread
    tpot: LatencySpread
    itl: LatencySpread
    e2el: LatencySpread
    lateness: LatencySpread
    codes: dict[str, int]
    finish_reasons: dict[str, int]
    rounds: float
    """Rounds of a request; like `resamples`, a mean over answers by SMC."""
    resamples: float
    collapses: int
    ess_share: float
    """Mean effective sample size, as a share of N."""
    peak_concurrent: int

    @property
    def sending(self) -> float:
        """Seconds in which requests were sent, without the time that the last of them takes."""
        return self.last_send - self.first_send

    @property
    def duration(self) -> float:
        """Seconds from the first send to the last end, as in vLLM."""
        return self.last_end - self.first_send

    @property
    def send_rate(self) -> float:
        """Requests sent, per second of sending."""
        return _rate(self.sent, self.sending)

    @property
    def good_of_sent(self) -> float | None:
        """Requests that met the objective, per second of sending, whenever they ended."""
        return None if self.good is None else _rate(self.good, self.sending)

    @property
    def request_throughput(self) -> float:
        return _rate(self.completed, self.duration)

    @property
    def output_throughput(self) -> float:
        return _rate(self.output_tokens, self.duration)

    @property
    def total_token_throughput(self) -> float:
        return _rate(self.input_tokens + self.output_tokens, self.duration)

    @property
    def goodput(self) -> float | None:
        """Requests a second of the whole duration that met the objective, as in vLLM."""
        return None if self.good is None else _rate(self.good, self.duration)

    @property
    def attainment(self) -> float | None:
        """Share of the ordinary requests that met the objective; refused and failed ones did not."""
        return None if self.good is None or not self.ordinary else self.good / self.ordinary

    @property
    def late(self) -> bool:
        return self.lateness.percentiles[99] > 1e3 * LATE


def summarise(records: Sequence[RequestRecord], objective: LatencyObjective | None) -> RunSummary:
    counted = [record for record in records if record.planned.counted]
    answered = [record for record in counted if record.answered]
    ordinary = [record for record in counted if record.planned.ordinary]
    timed = [record for record in ordinary if record.answered and record.message_times]
    by_smc = [
        record.statistics
        for record in answered
        if record.statistics is not None and record.planned.sampling["method"] == Method.SMC
    ]
    return RunSummary(
        sent=len(counted),
        completed=len(answered),
        cancelled=sum(record.cancelled for record in counted),
        failed=sum(record.failed for record in counted),
        ordinary=len(ordinary),
        good=None if objective is None else sum(is_good(record, objective) for record in timed),
        first_send=min((record.sent_at for record in counted), default=0.0),
        last_send=max((record.sent_at for record in counted), default=0.0),
        last_end=max((record.ended_at for record in counted), default=0.0),
        input_tokens=sum(record.prompt_tokens for record in answered),
        output_tokens=sum(record.tokens for record in answered),
        ttft=LatencySpread.of(record.ttft for record in timed if record.ttft is not None),
        tpot=LatencySpread.of(record.tpot for record in timed if record.tokens > 1),
        itl=LatencySpread.of(gap for record in timed for gap in record.itls),
        e2el=LatencySpread.of(record.e2el for record in timed),
        lateness=LatencySpread.of(record.lateness for record in counted),
        codes=dict(Counter(record.code for record in counted).most_common()),
        finish_reasons=dict(Counter(record.finish_reason for record in answered).most_common()),
        rounds=_mean(each.rounds for each in by_smc),
        resamples=_mean(each.resamples for each in by_smc),
        collapses=sum(each.collapses for each in by_smc),
        ess_share=_mean(each.mean_ess / each.particles for each in by_smc),
        peak_concurrent=max((count for _, count in in_flight(records)), default=0),
    )


def is_good(record: RequestRecord, objective: LatencyObjective) -> bool:
    """Whether an answered request meets the objective."""
    assert record.ttft is not None, "an answer with tokens has a first one"
    return objective.met({"ttft": record.ttft, "tpot": record.tpot, "e2el": record.e2el})


def in_flight(records: Iterable[RequestRecord]) -> list[tuple[float, int]]:
    """Return every time at which the number of requests in flight changed, with the new number."""
    changes = sorted([(record.sent_at, 1) for record in records] + [(record.ended_at, -1) for record in records])
    counts = np.cumsum([change for _, change in changes]).tolist()
    return [(at, count) for (at, _), count in zip(changes, counts)]


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0
