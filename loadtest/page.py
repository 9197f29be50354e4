"""The report as one HTML file that needs nothing but itself: headline figures first, then pictures, then everything
else."""

from __future__ import annotations

import time
from collections.abc import Iterable
from html import escape

from loadtest import numbers, plots, show
from loadtest.capacity import Capacity
from loadtest.judge import counts
from loadtest.measures import PERCENTILES, Summary
from loadtest.runs import Run

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2430; background: #fff; max-width: 1120px; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.about { color: #5a6675; margin-top: .2rem; }
.verdict { border-left: 6px solid; padding: .7rem 1rem; font-size: 1.1rem; margin: 1.2rem 0; }
.good { border-color: #0072b2; background: #eef6fb; } .bad { border-color: #d55e00; background: #fdf1e8; }
.warning { border-left: 6px solid #e69f00; background: #fdf7e8; padding: .5rem 1rem; margin: .6rem 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .8rem; }
.card { border: 1px solid #d9dfe6; border-radius: 6px; padding: .7rem .9rem; }
.card b { display: block; font-size: 1.45rem; line-height: 1.25; } .card span { color: #5a6675; font-size: .85rem; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 1.2rem; }
figure { margin: 0; border: 1px solid #e5e9ee; border-radius: 6px; padding: .7rem; }
figcaption { font-weight: 600; font-size: .92rem; margin-bottom: .3rem; }
svg { width: 100%; height: auto; } svg text { font-family: system-ui, sans-serif !important; }
table { border-collapse: collapse; font-size: .92rem; } td, th { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top;
border-bottom: 1px solid #e5e9ee; } .numbers td + td, .numbers th + th { text-align: right; padding-right: 1.2rem; }
.pass { color: #0072b2; font-weight: 600; } .fail { color: #b34700; font-weight: 700; } .unknown { color: #5a6675; }
details { margin-top: .8rem; } summary { cursor: pointer; font-weight: 600; }
@media print { .pictures { grid-template-columns: 1fr 1fr; } }
"""
CLASSES = {True: "pass", False: "fail", None: "unknown"}
"""In the style, of a check that passed, failed, or could not be made."""


def of_run(run: Run) -> str:
    return _page(
        f"Load test of {run.site.model.target.name}", [_about(run), _verdict(show.headline(run), run.good), *_body(run)]
    )


def of_capacity(found: Capacity, run: Run | None, objective: str, share: float) -> str:
    sentence = show.capacity_sentence(found, objective)
    parts = [
        _verdict(sentence, found.good),
        *_warnings(show.capacity_warnings(found)),
        _pictures(plots.of_capacity(found, share)),
    ]
    rows = [
        (
            f"{p.rate:.3f}",
            "met" if p.met else "missed",
            f"{p.attainment:.1%}",
            f"{p.goodput:.2f}",
            f"{p.p99_ttft_ms:.0f}",
            f"{p.p99_e2el_ms:.0f}",
            p.sent,
            counts(p.codes),
            "late" if p.late else "on time",
        )
        for p in found.probes
    ]
    headers = (
        "requests/s",
        "objective",
        "share",
        "goodput",
        "p99 TTFT ms",
        "p99 E2E ms",
        "requests",
        "codes",
        "generator",
    )
    parts += ["<h2>Every rate that was tried</h2>", _table(rows, headers, "numbers")]
    if run is not None:
        parts += [f"<h1>The run at {found.low:.3g} requests/s</h1>", _about(run), *_body(run)]
    return _page("Capacity of the service", parts)


def _body(run: Run) -> list[str]:
    checks = [
        (
            check.name,
            f'<span class="{CLASSES[check.passed]}">{show.VERDICTS[check.passed][0]}</span>',
            escape(check.text),
        )
        for check in run.checks
    ]
    return [
        *_warnings(show.warnings(run)),
        _cards(run),
        "<h2>What was checked</h2>",
        _table(checks, ("check", "", "what was seen"), raw=True),
        "<h2>Over time</h2>",
        _pictures(plots.of_run(run)),
        "<h2>Latencies, milliseconds</h2>",
        _latencies(run.summary),
        "<p>Of answered requests whose clients read at full speed. Time per output token: (end to end - first token) / (tokens - 1). "
        "Between messages: a message brings all tokens that became final together.</p>",
        "<h2>Figures</h2>",
        _table(show.figures(run)),
        *_details("Settings", run.settings.words().items()),
        *_details("Machine of the load generator", numbers.machine().items()),
        *_details("Server", numbers.described(run.site)["server"].items()),
        *_details("Models", numbers.described(run.site)["models"].items()),
        *_details("Server's metrics after the run", run.after.metrics.items()),
    ]


def _about(run: Run) -> str:
    settings, when = run.settings, time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started))
    rate = "" if settings.rate is None else f", {settings.rate:.3g} requests/s"
    return f'<p class="about">{when}; {escape(run.site.endpoint.address)}; {settings.arrivals} arrivals{rate}; {run.outcome.seconds:.0f} s</p>'  # noqa: E501


def _cards(run: Run) -> str:
    summary = run.summary
    cards = [
        (f"{summary.sent:,}", "requests sent"),
        (f"{summary.completed:,}", "answered"),
        (f"{summary.failed:,}", "refused or failed"),
        (f"{summary.ttft.median:.0f} / {summary.ttft.percentiles[99]:.0f} ms", "time to first token, median / p99"),
        (f"{summary.e2el.median:.0f} / {summary.e2el.percentiles[99]:.0f} ms", "whole answer, median / p99"),
        (f"{summary.output_throughput:,.0f}", "output tokens a second"),
    ]
    if summary.goodput is not None:
        cards[:0] = [
            (f"{summary.goodput:.2f}", "good requests a second"),
            (f"{summary.attainment or 0:.1%}", "of requests met the objective"),
        ]
    return (
        '<div class="cards">'
        + "".join(f'<div class="card"><b>{value}</b><span>{name}</span></div>' for value, name in cards)
        + "</div>"
    )


def _latencies(summary: Summary) -> str:
    names = {
        "time to first token": summary.ttft,
        "time per output token": summary.tpot,
        "between messages": summary.itl,
    }
    rows = [
        (name, *(f"{value:.1f}" for value in (spread.mean, spread.std, *spread.percentiles.values())), spread.count)
        for name, spread in (names | {"end to end": summary.e2el, "generator late by": summary.lateness}).items()
    ]
    return _table(rows, ("", "mean", "std", *(f"p{percentile}" for percentile in PERCENTILES), "count"), "numbers")


def _verdict(sentence: str, good: bool) -> str:
    return f'<div class="verdict {"good" if good else "bad"}">{escape(sentence)}</div>'


def _warnings(texts: list[str]) -> list[str]:
    return [f'<div class="warning">{escape(text)}</div>' for text in texts]


def _pictures(pictures: list[tuple[str, str]]) -> str:
    figures = (f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" for title, svg in pictures)
    return f'<div class="pictures">{"".join(figures)}</div>'


def _details(title: str, items: Iterable[tuple[str, object]]) -> list[str]:
    rows = [(name, _plain(value)) for name, value in items]
    return [f"<details><summary>{title}</summary>{_table(rows)}</details>"] if rows else []


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items())
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() else f"{value:,.3f}"
    return "" if value is None else str(value)


def _table(rows: Iterable[tuple], headers: tuple[str, ...] = (), style: str = "", raw: bool = False) -> str:
    """`raw`: cells are HTML already."""
    head = "".join(f"<th>{header}</th>" for header in headers)
    body = "".join(
        "<tr>" + "".join(f"<td>{cell if raw else escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<table class="{style}">{f"<tr>{head}</tr>" if head else ""}{body}</table>'


def _page(title: str, parts: list[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style></head>'
        f"<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )
