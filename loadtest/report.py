"""Reports a run: progress and figures on a terminal, and JSON. The JSON uses the names of vLLM's `bench serve`, so that
results can be compared, and `smcserve` for everything that vLLM has no name for."""

from __future__ import annotations

import asyncio
import math
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from loadtest.checks import RunCheck, counts
from loadtest.client import RequestRecord
from loadtest.monitor import ServerSample
from loadtest.runner import CapacityFound, CapacityProbe, LoadRun, LoadRunner
from loadtest.summary import PERCENTILES, LatencySpread, RunSummary
from smc.api.request import Statistics
from smc.terminal import err, out, print_warning

LINE_EVERY = 10.0
"""Seconds between two lines of progress if the output is not a terminal."""
BAR_EVERY = 0.5
VERDICTS = {True: ("pass", "green"), False: ("FAIL", "bold red"), None: ("not measured", "yellow")}


@contextmanager
def watch(runner: LoadRunner, seconds: float | None) -> Iterator[None]:
    """Show progress: a bar on a terminal, otherwise a line every `LINE_EVERY` seconds. `seconds`: expected time of
    sending."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
        auto_refresh=False,
    )
    with bar:
        task = bar.add_task("", total=seconds)
        telling = asyncio.ensure_future(_show_progress(runner, bar, task, seconds))
        try:
            yield
        finally:
            telling.cancel()


async def _show_progress(runner: LoadRunner, bar: Progress, task: TaskID, seconds: float | None) -> None:
    while True:
        await asyncio.sleep(LINE_EVERY if bar.disable else BAR_EVERY)
        now, state = runner.clock(), runner.state
        ended = f"{state.answered} answered, {state.refused} refused or failed, {state.cancelled} cancelled"
        time = f"{now:.0f} s" if seconds is None else f"{now:.0f} s of {seconds:.0f}"
        text = f"{time}: {state.sent} sent, {state.in_flight} in flight, {ended}"
        if bar.disable:
            err.print(text, soft_wrap=True)
        else:
            bar.update(task, description=text, completed=now, refresh=True)


def show_run(run: LoadRun) -> None:
    summary = run.summary
    out.print(_latencies(summary))
    table = Table(show_header=False, box=None)
    for row in figures(run):
        table.add_row(*row)
    out.print(table)
    for text in warnings(run):
        print_warning(text)
    show_checks(run.checks)
    out.print(Text(headline(run), style="bold green" if run.good else "bold red"), soft_wrap=True)


def headline(run: LoadRun) -> str:
    """Return one sentence that says whether the run was good."""
    failed = [check for check in run.checks if check.passed is False]
    if failed:
        return "Failed: " + "; ".join(f"{check.name}: {check.text}" for check in failed) + "."
    if run.settings.capacity is not None:
        unknown = [check.name for check in run.checks if check.passed is None]
        rest = f" Not measured: {', '.join(unknown)}." if unknown else ""
        summary, capacity = run.summary, run.settings.capacity
        times = f"{summary.send_rate / capacity:.2g} times its capacity of {capacity:.3g}"
        return (
            f"The service withstood overload: at {summary.send_rate:.3g} requests/s, {times}, "
            f"{summary.good_of_sent:.2f} requests/s met the objective.{rest}"
        )
    if run.settings.goodput is None:
        return "The run completed; no objective was given (--goodput)."
    return (
        f"The objective was met: {run.settings.goodput.sentence}, by {run.summary.attainment or 0:.1%} of the requests."
    )


def warnings(run: LoadRun) -> list[str]:
    """Return what a reader must know before trusting the figures."""
    summary, texts = run.summary, []
    if summary.late:
        late = summary.lateness
        texts.append(
            f"the generator was late: requests were sent up to {late.percentiles[99]:.0f} ms (99th percentile) after "
            "their planned times, so the load differed from the planned one; run the generator on a machine of its own"
        )
    gaps = [sample for sample in run.samples if sample.error]
    if gaps:
        texts.append(
            f"{len(gaps)} of {len(run.samples)} samples of the server failed; the last error: {gaps[-1].error}"
        )
    if summary.collapses:
        texts.append(
            f"in {summary.collapses} rounds all weights became zero (collapses); the answers continued from prefixes "
            "with weight"
        )
    return texts


def show_checks(checks: list[RunCheck]) -> None:
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=0)
    for header in ("check", "", "result"):
        table.add_column(header)
    for check in checks:
        verdict, style = VERDICTS[check.passed]
        table.add_row(check.name, Text(verdict, style=style), Text(check.text))
    out.print(table)


def show_probe(probe: CapacityProbe) -> None:
    late = " (the generator was late)" if probe.late else ""
    out.print(
        f"{probe.rate:8.3f} requests/s: {'met   ' if probe.met else 'missed'} by {probe.attainment:6.1%} "
        f"of {probe.sent}, "
        f"p99 ttft {probe.p99_ttft_ms:.0f} ms, p99 e2el {probe.p99_e2el_ms:.0f} ms, {counts(probe.codes)}{late}",
        soft_wrap=True,
    )


def show_capacity(found: CapacityFound, objective: str) -> None:
    for text in capacity_warnings(found):
        print_warning(text)
    out.print(Text(capacity_sentence(found, objective), style="bold" if found.good else "bold red"), soft_wrap=True)


def capacity_warnings(found: CapacityFound) -> list[str]:
    if not found.late:
        return []
    rates = ", ".join(f"{rate:.3g}" for rate in sorted(found.late))
    return [
        f"the generator was late at {rates} requests/s, so the load was below these rates; run the generator on a "
        "machine of its own"
    ]


def capacity_sentence(found: CapacityFound, objective: str) -> str:
    if found.failure:
        best = "no rate" if found.low is None else f"{found.low:.3g} requests/s"
        return f"The search ended early: {found.failure}. Highest rate that met the objective ({objective}): {best}."
    if found.low is None:
        lowest = min(probe.rate for probe in found.probes)
        return f"No rate meets the objective ({objective}): the lowest tried is {lowest:.3g} requests/s."
    bracket = f"{found.low:.3g} requests/s meet it" + ("" if found.high is None else f", {found.high:.3g} do not")
    assert found.best is not None
    goodput = f"{found.best.goodput:.3g} good requests/s, {found.best.attainment:.1%} of the requests"
    return f"Capacity: {found.low:.3g} requests/s ({objective}). Bracket: {bracket}. At this rate: {goodput}."


def _latencies(summary: RunSummary) -> Table:
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=0)
    table.add_column("milliseconds")
    for header in ("mean", "std", *(f"p{percentile}" for percentile in PERCENTILES), "count"):
        table.add_column(header, justify="right")
    rows = {
        "time to first token": summary.ttft,
        "time per output token": summary.tpot,
        "between messages (ITL)": summary.itl,
        "end to end": summary.e2el,
        "lateness of the generator": summary.lateness,
    }
    for name, spread in rows.items():
        values = (spread.mean, spread.std, *spread.percentiles.values())
        table.add_row(name, *(f"{value:.1f}" for value in values), str(spread.count))
    return table


def figures(run: LoadRun) -> list[tuple[str, str]]:
    """Return all figures except latencies, as pairs of a name and a text."""
    summary = run.summary
    figures = [
        (
            "requests",
            f"{summary.sent} sent, {summary.completed} answered, {summary.cancelled} cancelled by us, "
            f"{summary.failed} refused or failed",
        ),
        ("codes", counts(summary.codes)),
        ("finish reasons", counts(summary.finish_reasons)),
        (
            "throughput",
            f"{summary.request_throughput:.2f} answers/s, {summary.output_throughput:.1f} output tokens/s "
            f"in {summary.duration:.1f} s",
        ),
    ]
    if summary.goodput is not None:
        figures.append(
            (
                "goodput",
                f"{summary.goodput:.2f} requests/s that met {run.settings.goodput}: {summary.good} of "
                f"{summary.ordinary} requests whose clients wait and read at full speed "
                f"({summary.attainment or 0:.1%})",
            )
        )
    if summary.rounds:
        figures.append(
            (
                "SMC",
                f"{summary.rounds:.1f} rounds and {summary.resamples:.1f} resamples per answer, "
                f"mean ESS {summary.ess_share:.0%} of N",
            )
        )
    return figures + [
        ("in flight", f"at most {summary.peak_concurrent} requests"),
        ("generator", f"{run.outcome.cpu_seconds / max(run.outcome.seconds, 1e-9):.1%} of a core"),
    ]


def run_numbers(run: LoadRun) -> dict[str, Any]:
    """Return the JSON content of a run. Figures and arrays are of the requests that count, in the order of their
    numbers."""
    records = sorted(
        (record for record in run.outcome.records if record.planned.counted), key=lambda record: record.planned.index
    )
    return _vllm_figures(run) | _arrays(records) | {"smcserve": _ours(run, records)}


def capacity_numbers(found: CapacityFound, run: LoadRun | None) -> dict[str, Any]:
    """Return the JSON content of a search, with the run at the rate that was found."""
    numbers = {"smcserve": {}} if run is None else run_numbers(run)
    numbers["smcserve"]["capacity"] = asdict(found)
    return numbers


def _vllm_figures(run: LoadRun) -> dict[str, Any]:
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


def _spread(name: str, spread: LatencySpread) -> dict[str, float]:
    figures = {f"mean_{name}_ms": spread.mean, f"median_{name}_ms": spread.median, f"std_{name}_ms": spread.std}
    return figures | {f"p{percentile}_{name}_ms": spread.percentiles[percentile] for percentile in PERCENTILES}


def _arrays(records: list[RequestRecord]) -> dict[str, list]:
    """Return arrays with an entry for each request; times in seconds. Missing values are 0 or empty, as in vLLM."""
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.tokens for record in records],
        "ttfts": [_rounded(record.ttft or 0.0) for record in records],
        "itls": [[_rounded(gap) for gap in record.itls] for record in records],
        "errors": [f"{record.code}: {record.detail}" if record.failed else "" for record in records],
    }


def _ours(run: LoadRun, records: list[RequestRecord]) -> dict[str, Any]:
    summary, site = run.summary, run.site
    names = ("cancelled", "ordinary", "attainment", "codes", "finish_reasons", "rounds", "resamples", "collapses")
    return {
        "good": run.good,
        "checks": [asdict(check) for check in run.checks],
        "settings": run.settings.words(),
        "machine": {
            "cpu_count": os.cpu_count(),
            "platform": platform.platform(),
            "processor": platform.machine(),
            "python": platform.python_version(),
        },
        "site": {
            "address": site.endpoint.address,
            "metrics": site.metrics,
            "server": asdict(site.server),
            "models": asdict(site.model),
        },
        "good_requests": summary.good,
        **{name: getattr(summary, name) for name in (*names, "ess_share")},
        "lateness_ms": _spread("late", summary.lateness),
        "generator_late": summary.late,
        "generator_cpu_share": run.outcome.cpu_seconds / run.outcome.seconds if run.outcome.seconds else 0.0,
        "requests": [_request(record) for record in records],
        "samples": [_sample(sample) for sample in run.samples],
        "after": _sample(run.after),
    }


def _request(record: RequestRecord) -> dict[str, Any]:
    sampling, statistics = record.planned.sampling, record.statistics or Statistics(particles=0)
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
        **{name: getattr(statistics, name) for name in ("rounds", "resamples", "mean_ess")},
    }


def _sample(sample: ServerSample) -> dict[str, Any]:
    metrics = {name: value for name, value in sample.metrics.items() if math.isfinite(value)}
    return asdict(sample) | {"at": _rounded(sample.at), "metrics": metrics}


def _rounded(seconds: float) -> float:
    """Round to microseconds."""
    return round(seconds, 6)
