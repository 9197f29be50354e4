"""Draws a run as one PNG: latencies, requests, throughput, the server's metrics and memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.checks import memory_series
from loadtest.client import RequestRecord
from loadtest.runner import CapacityFound, LoadRun
from loadtest.summary import in_flight

BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
)
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
"""Colours that people with colour vision deficiency can tell apart (Okabe and Ito)."""
COLUMNS, WIDTH, HEIGHT = 2, 6.4, 3.0
"""Number of panels side by side, and width and height of a panel in inches."""
BINS = 60
TALL = 4
"""A limit is not drawn if it is this many times higher than all measurements, which would look small beside it."""
MIB = 1 << 20


def draw(path: Path, run: LoadRun | None, found: CapacityFound | None = None) -> None:
    """Draw one PNG of a run, with a panel for each subject. After a search, the first panel shows the rates that were
    tried."""
    panels: dict[str, Callable[[Axes], None]] = {}
    if found is not None:
        panels["Rates that were tried"] = partial(_probes, found=found)
    if run is not None:
        panels |= panels_of(run)
    with matplotlib.rc_context({"font.size": 9}):
        rows = -(-len(panels) // COLUMNS)
        figure = Figure(figsize=(COLUMNS * WIDTH, rows * HEIGHT), layout="constrained")
        for index, (title, panel) in enumerate(panels.items()):
            axes = figure.add_subplot(rows, COLUMNS, 1 + index)
            axes.set_title(title, loc="left", fontsize=9)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            panel(axes)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False, fontsize=7)
        figure.savefig(path, dpi=80)


def panels_of(run: LoadRun) -> dict[str, Callable[[Axes], None]]:
    """Return panels by their titles, without those for which nothing was measured."""
    panels = {
        "Latency: share of the answered requests that were at least as fast": _cdf,
        "Time to first token, request by request": _ttft_over_time,
        "Requests in flight by the client; running and waiting by the server": _in_flight,
        "Throughput": _throughput,
        "How requests ended": _ends,
    }
    if any(sample.metrics for sample in run.samples):
        panels |= {"Refused and cancelled, as the server counted them": _refused, "KV pages in use": _pages}
    if memory_series(run.samples):
        panels["Memory of the service's processes"] = _memory
    return {title: partial(panel, run=run) for title, panel in panels.items()}


def _cdf(axes: Axes, run: LoadRun) -> None:
    records = [record for record in _timed(run) if record.planned.ordinary]
    limits = dict(run.settings.goodput.limits) if run.settings.goodput else {}
    for name, label, colour, values in (
        ("ttft", "first token", BLUE, [record.ttft for record in records]),
        ("e2el", "end to end", VERMILION, [record.e2el for record in records]),
        ("tpot", "per output token", GREEN, [record.tpot for record in records if record.tokens > 1]),
    ):
        if values:
            axes.ecdf(1e3 * np.array(values), color=colour, label=label)
        if name in limits:
            axes.axvline(
                limits[name], color=colour, linestyle=":", linewidth=1.2, label=f"objective: {limits[name]:g} ms"
            )
    axes.set(xscale="log", xlabel="milliseconds", ylabel="share of answered requests")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")


def _ttft_over_time(axes: Axes, run: LoadRun) -> None:
    records = _timed(run)
    times_ms = [1e3 * record.ttft for record in records if record.ttft is not None]
    axes.scatter([r.sent_at for r in records], times_ms, s=9, color=BLUE, alpha=0.6, linewidths=0, label="answered")
    limit = dict(run.settings.goodput.limits).get("ttft") if run.settings.goodput else None
    if limit is not None and records and limit < TALL * max(times_ms):
        axes.axhline(limit, color=VERMILION, linestyle=":", linewidth=1.2, label=f"objective: {limit:g} ms")
    _over_time(axes, "milliseconds")


def _in_flight(axes: Axes, run: LoadRun) -> None:
    steps = in_flight(run.outcome.records)
    axes.step(
        [at for at, _ in steps],
        [count for _, count in steps],
        where="post",
        color=BLACK,
        linewidth=0.9,
        label="in flight (client)",
    )
    seen = [sample for sample in run.samples if sample.running is not None]
    times = [sample.at for sample in seen]
    running, queued = (
        np.array([getattr(sample, name) for sample in seen], dtype=float) for name in ("running", "queued")
    )
    axes.plot(times, running, color=BLUE, label="running (server)")
    axes.plot(times, queued, color=VERMILION, linestyle="--", label="waiting (server)")
    _over_time(axes, "requests")


def _throughput(axes: Axes, run: LoadRun) -> None:
    records, edges = run.outcome.records, _edges(run)
    width = edges[1] - edges[0]
    times = [at for record in records for at in record.message_times]
    tokens = [count for record in records for count in record.message_tokens]
    axes.stairs(
        np.histogram(times, edges, weights=tokens)[0] / width,
        edges,
        color=GREEN,
        linewidth=1.4,
        label="tokens/s (left)",
    )
    axes.set(xlabel="seconds since the start", ylabel="output tokens/s")
    right = axes.twinx()
    right.spines[["top"]].set_visible(False)
    for label, colour, style, moments in (
        ("sent/s (right)", BLACK, ":", [record.sent_at for record in records]),
        ("answered/s (right)", BLUE, "-", [record.ended_at for record in records if record.answered]),
    ):
        counts = np.histogram(moments, edges)[0] / width
        right.stairs(counts, edges, color=colour, linestyle=style, linewidth=1.1)
        axes.plot([], [], color=colour, linestyle=style, label=label)
    right.set_ylabel("requests/s")
    right.set_ylim(bottom=0)
    axes.set_ylim(bottom=0)


def _ends(axes: Axes, run: LoadRun) -> None:
    edges = _edges(run)
    ended: dict[str, list[float]] = {}
    for record in sorted(run.outcome.records, key=lambda record: (record.code != "OK", record.code)):
        ended.setdefault("CANCELLED by us" if record.cancelled else record.code, []).append(record.ended_at)
    colours = [BLUE if code == "OK" else None for code in ended]
    rest = iter(COLOURS[1:] * len(ended))
    if ended:
        width = edges[1] - edges[0]
        weights = [np.full(len(times), 1 / width) for times in ended.values()]
        axes.hist(
            list(ended.values()),
            edges.tolist(),
            weights=weights,
            stacked=True,
            label=[f"{code} ({len(times)})" for code, times in ended.items()],
            color=[colour or next(rest) for colour in colours],
        )
    axes.set(xlabel="seconds since the start", ylabel="requests/s")


def _pages(axes: Axes, run: LoadRun) -> None:
    seen = [sample for sample in run.samples if sample.metrics]
    for group, colour, style in (("draft", VERMILION, "-"), ("target", BLUE, "--")):
        used, cached = (
            np.array([sample.metrics.get(f'smc_kv_pages_{what}{{group="{group}"}}', np.nan) for sample in seen])
            for what in ("used", "cached")
        )
        times = [sample.at for sample in seen]
        axes.plot(times, used - cached, color=colour, linestyle=style, label=group)
        axes.plot(
            times,
            used,
            color=colour,
            linestyle=style,
            linewidth=0.6,
            alpha=0.6,
            label=f"{group}, with the prefix cache",
        )
    _over_time(axes, "pages")


def _refused(axes: Axes, run: LoadRun) -> None:
    seen = [sample for sample in run.samples if sample.metrics]
    for name, label, colour in (
        ("smc_requests_rejected_total", "refused", VERMILION),
        ("smc_requests_cancelled_total", "cancelled", BLUE),
    ):
        counts = [sample.total(name) or 0.0 for sample in seen]
        axes.plot([sample.at for sample in seen], np.array(counts) - counts[0], color=colour, label=label)
    _over_time(axes, "requests since the start")


def _memory(axes: Axes, run: LoadRun) -> None:
    for (name, (times, values)), colour in zip(memory_series(run.samples).items(), COLOURS * 20):
        axes.plot(times, np.array(values) / MIB, color=colour, label=name)
    _over_time(axes, "MiB resident")


def _probes(axes: Axes, found: CapacityFound) -> None:
    probes = sorted(found.probes, key=lambda probe: probe.rate)
    axes.plot([probe.rate for probe in probes], [probe.attainment for probe in probes], color="0.6", linewidth=1)
    for met, colour, marker, label in ((True, BLUE, "o", "met"), (False, VERMILION, "X", "missed")):
        chosen = [probe for probe in probes if probe.met is met]
        axes.plot(
            [p.rate for p in chosen], [p.attainment for p in chosen], marker, color=colour, markersize=8, label=label
        )
    axes.set(xlabel="requests/s", ylabel="share that met the objective", xlim=(0, None), ylim=(-0.03, 1.05))
    axes.yaxis.set_major_formatter(lambda part, _: f"{part:.0%}")


def _timed(run: LoadRun) -> list[RequestRecord]:
    return [
        record for record in run.outcome.records if record.planned.counted and record.answered and record.message_times
    ]


def _over_time(axes: Axes, what: str) -> None:
    axes.set(xlabel="seconds since the start", ylabel=what, ylim=(0, None))


def _edges(run: LoadRun) -> np.ndarray:
    """Return the edges of at most BINS equal parts of the run, each a second or longer."""
    seconds = max(run.outcome.seconds, 1.0)
    return np.linspace(0.0, seconds, min(BINS, int(seconds)) + 1)
