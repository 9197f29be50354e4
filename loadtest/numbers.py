"""A run as JSON: under the names of vLLM's `bench serve`, so that results compare; what vLLM has no name for is under
`smcserve`."""

from __future__ import annotations

import math
import os
import platform
import time
from dataclasses import asdict
from typing import Any

from loadtest.capacity import Capacity
from loadtest.measures import PERCENTILES, Spread, Summary
from loadtest.monitor import Sample
from loadtest.record import Record
from loadtest.runs import Run, Site


def of_run(run: Run) -> dict[str, Any]:
    """Figures and arrays are of the requests that count, in the order in which they were sent."""
    records = sorted(
        (record for record in run.outcome.records if record.planned.counted), key=lambda record: record.planned.index
    )
    return _figures(run) | _arrays(records) | {"smcserve": _ours(run, records)}


def of_capacity(found: Capacity, run: Run | None) -> dict[str, Any]:
    """The run at the rate that was found, and the search."""
    numbers = {"smcserve": {}} if run is None else of_run(run)
    numbers["smcserve"]["capacity"] = asdict(found)
    return numbers


def machine() -> dict[str, Any]:
    """Where the generator ran."""
    return {
        "cpu_count": os.cpu_count(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "python": platform.python_version(),
    }


def described(site: Site) -> dict[str, Any]:
    """What was loaded."""
    return {
        "address": site.endpoint.address,
        "metrics": site.metrics,
        "server": asdict(site.server),
        "models": asdict(site.model),
    }


def _figures(run: Run) -> dict[str, Any]:
    summary, settings = run.summary, run.settings
    figures = {
        "date": time.strftime("%Y%m%d-%H%M%S", time.localtime(run.started)),
        "backend": "smcserve-grpc",
        "model_id": run.site.model.target.name,
        "num_prompts": summary.sent,
        "request_rate": settings.rate,
        "burstiness": settings.burstiness
        if settings.arrivals == "gamma"
        else 1.0
        if settings.arrivals == "poisson"
        else None,
        "max_concurrency": None,
        "duration": summary.duration,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.request_throughput,
        "request_goodput": summary.goodput,
        "output_throughput": summary.output_throughput,
        "total_token_throughput": summary.total_token_throughput,
        "max_concurrent_requests": summary.peak_concurrent,
    }
    for name in ("ttft", "tpot", "itl", "e2el"):
        figures |= _spread(name, getattr(summary, name))
    return figures


def _spread(name: str, spread: Spread) -> dict[str, float]:
    figures = {f"mean_{name}_ms": spread.mean, f"median_{name}_ms": spread.median, f"std_{name}_ms": spread.std}
    return figures | {f"p{percentile}_{name}_ms": spread.percentiles[percentile] for percentile in PERCENTILES}


def _arrays(records: list[Record]) -> dict[str, list]:
    """One entry a request, seconds; 0 and empty where there is nothing, as in vLLM."""
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.tokens for record in records],
        "ttfts": [_rounded(record.ttft or 0.0) for record in records],
        "itls": [[_rounded(gap) for gap in record.itls] for record in records],
        "errors": [f"{record.code}: {record.detail}" if record.failed else "" for record in records],
    }


def _ours(run: Run, records: list[Record]) -> dict[str, Any]:
    summary = run.summary
    return {
        "good": run.good,
        "checks": [asdict(check) for check in run.checks],
        "settings": run.settings.words(),
        "machine": machine(),
        "site": described(run.site),
        **_counts(summary),
        "lateness_ms": _spread("late", summary.lateness),
        "generator_late": summary.late,
        "generator_cpu_share": run.outcome.cpu_seconds / run.outcome.seconds if run.outcome.seconds else 0.0,
        "requests": [_request(record) for record in records],
        "samples": [_sample(sample) for sample in run.samples],
        "after": _sample(run.after),
    }


def _counts(summary: Summary) -> dict[str, Any]:
    names = (
        "cancelled",
        "ordinary",
        "good",
        "attainment",
        "codes",
        "finish_reasons",
        "rounds",
        "resamples",
        "collapses",
        "ess_share",
    )
    return {"good_requests" if name == "good" else name: getattr(summary, name) for name in names}


def _request(record: Record) -> dict[str, Any]:
    sampling = record.planned.sampling
    return {
        "index": record.planned.index,
        "planned_at": _rounded(record.planned.at),
        "sent_at": _rounded(record.sent_at),
        "ended_at": _rounded(record.ended_at),
        "code": record.code,
        "finish_reason": record.finish_reason or None,
        "cancelled_by_us": record.cancelled,
        "slow_reader": bool(record.planned.pause),
        **{name: sampling.get(name) for name in ("method", "particles", "seed", "max_tokens")},
        "message_tokens": record.message_tokens,
        "rounds": record.rounds,
        "resamples": record.resamples,
        "mean_ess": record.mean_ess,
    }


def _sample(sample: Sample) -> dict[str, Any]:
    metrics = {name: value for name, value in sample.metrics.items() if math.isfinite(value)}
    return asdict(sample) | {"at": _rounded(sample.at), "metrics": metrics}


def _rounded(seconds: float) -> float:
    """To the microsecond."""
    return round(seconds, 6)
