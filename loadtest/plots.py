"""The pictures of a report, as SVG to be put into a page. Knows nothing about the page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TypeVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.capacity import Capacity
from loadtest.judge import memory_series
from loadtest.measures import in_flight
from loadtest.record import Record
from loadtest.runs import Run

What = TypeVar("What")

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
"""Told apart by people who see colours differently (Okabe and Ito)."""
SIZE = (7.2, 3.1)
BINS = 60
TALL = 4
"""A limit that is this many times higher than everything measured would only make it small."""
MIB = 1 << 20


def of_run(run: Run) -> list[tuple[str, str]]:
    """Titles and pictures."""
    pictures: dict[str, Callable[[Axes, Run], None]] = {
        "Latency: share of the answered requests that were at least as fast": _cdf,
        "Time to first token, request by request": _ttft_over_time,
        "Requests in flight, as the client saw them; running and waiting, as the server did": _in_flight,
        "Throughput": _throughput,
        "How requests ended": _ends,
    }
    if any(sample.metrics for sample in run.samples):
        pictures["Refused and cancelled, as the server counted them"] = _refused
        pictures["Memory for keys and values: pages in use"] = _pages
    if memory_series(run.samples):
        pictures["Memory of the service's processes"] = _memory
    return [(title, _svg(draw, run)) for title, draw in pictures.items()]


def of_capacity(found: Capacity, share: float) -> list[tuple[str, str]]:
    return [("Rates that were tried", _svg(lambda axes, probes: _probes(axes, probes, share), found))]


def _cdf(axes: Axes, run: Run) -> None:
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


def _ttft_over_time(axes: Axes, run: Run) -> None:
    records = _timed(run)
    times_ms = [1e3 * record.ttft for record in records if record.ttft is not None]
    axes.scatter([r.sent_at for r in records], times_ms, s=9, color=BLUE, alpha=0.6, linewidths=0, label="answered")
    limit = dict(run.settings.goodput.limits).get("ttft") if run.settings.goodput else None
    if limit is not None and records and limit < TALL * max(times_ms):
        axes.axhline(limit, color=VERMILION, linestyle=":", linewidth=1.2, label=f"objective: {limit:g} ms")
    axes.set(xlabel="seconds since the start", ylabel="milliseconds")
    axes.set_ylim(bottom=0)


def _in_flight(axes: Axes, run: Run) -> None:
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
    axes.set(xlabel="seconds since the start", ylabel="requests")
    axes.set_ylim(bottom=0)


def _throughput(axes: Axes, run: Run) -> None:
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


def _ends(axes: Axes, run: Run) -> None:
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


def _pages(axes: Axes, run: Run) -> None:
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
    axes.set(xlabel="seconds since the start", ylabel="pages")
    axes.set_ylim(bottom=0)


def _refused(axes: Axes, run: Run) -> None:
    seen = [sample for sample in run.samples if sample.metrics]
    for name, label, colour in (
        ("smc_requests_rejected_total", "refused", VERMILION),
        ("smc_requests_cancelled_total", "cancelled", BLUE),
    ):
        counts = [sample.total(name) or 0.0 for sample in seen]
        axes.plot([sample.at for sample in seen], np.array(counts) - counts[0], color=colour, label=label)
    axes.set(xlabel="seconds since the start", ylabel="requests since the start")
    axes.set_ylim(bottom=0)


def _memory(axes: Axes, run: Run) -> None:
    for (name, (times, values)), colour in zip(memory_series(run.samples).items(), COLOURS * 20):
        axes.plot(times, np.array(values) / MIB, color=colour, label=name)
    axes.set(xlabel="seconds since the start", ylabel="MiB resident")
    axes.set_ylim(bottom=0)


def _probes(axes: Axes, found: Capacity, share: float) -> None:
    probes = sorted(found.probes, key=lambda probe: probe.rate)
    axes.plot([probe.rate for probe in probes], [probe.attainment for probe in probes], color="0.6", linewidth=1)
    for met, colour, marker, label in ((True, BLUE, "o", "met"), (False, VERMILION, "X", "missed")):
        chosen = [probe for probe in probes if probe.met is met]
        axes.plot(
            [p.rate for p in chosen], [p.attainment for p in chosen], marker, color=colour, markersize=8, label=label
        )
    axes.axhline(share, color="0.35", linestyle=":", label=f"{share:.0%} must meet it")
    axes.set(xlabel="requests/s", ylabel="share that met the objective", xlim=(0, None), ylim=(-0.03, 1.05))
    axes.yaxis.set_major_formatter(lambda part, _: f"{part:.0%}")


def _timed(run: Run) -> list[Record]:
    return [
        record for record in run.outcome.records if record.planned.counted and record.answered and record.message_times
    ]


def _edges(run: Run) -> np.ndarray:
    """Of at most BINS equal parts of the run, each a second or longer."""
    seconds = max(run.outcome.seconds, 1.0)
    return np.linspace(0.0, seconds, min(BINS, int(seconds)) + 1)


def _svg(draw: Callable[[Axes, What], None], what: What) -> str:
    """Text stays text, in the page's own fonts; without prologue and metadata, whose addresses a page has no use
    for."""
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": draw.__name__, "font.family": "sans-serif", "font.size": 9}
    ):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes, what)
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside upper left", ncols=4, frameon=False, fontsize=8)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return re.sub(
        r'<svg [^>]*viewBox="([^"]*)"[^>]*>',
        r'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="\1" role="img">',
        svg,
        count=1,
    )
