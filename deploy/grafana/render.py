"""Renders the dashboards as PNG files with data of a running Prometheus: `python deploy/grafana/render.py --prometheus
URL --out docs/dashboards/`.

Reads the dashboards' JSON files: positions, titles, units, legends, thresholds and queries. Knows nothing about the
metrics."""

from __future__ import annotations

import argparse
import json
import math
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle, Wedge
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator
from PIL import Image
from units import format_value

FOLDER = Path(__file__).parent / "dashboards"
WIDTH, UNIT, DPI = 16.0, 0.36, 100
"""Width of the picture and height of one grid unit, in inches, and resolution."""
COLORS = ("#3274d9", "#e0752d", "#56a64b", "#8f3bb8", "#d44a3a", "#5794a3", "#b5892b", "#6e6e6e")
NAMED = {"green": "#56a64b", "yellow": "#d9a514", "orange": "#e0752d", "red": "#d44a3a"}
INK, FAINT, PAGE = "#24292e", "#8b949e", "#f0f2f5"


@dataclass(frozen=True)
class Series:
    labels: dict[str, str]
    times: np.ndarray
    """Times in seconds since the epoch."""
    values: np.ndarray
    legend: str

    @property
    def last(self) -> float:
        known = self.values[np.isfinite(self.values)]
        return known[-1] if len(known) else math.nan


class Prometheus:
    """Range queries to a Prometheus server. `end` is in seconds since the epoch."""

    def __init__(self, url: str, minutes: float, scrape_interval: float, end: float) -> None:
        self._url, self.end = url.rstrip("/"), end
        self.begin = self.end - 60 * minutes
        self._step = max(scrape_interval, (self.end - self.begin) / 240)
        # Grafana's definition of $__rate_interval.
        self._rate_interval = max(4 * scrape_interval, self._step + scrape_interval)

    def filled(self, expr: str) -> str:
        """Replace Grafana's variables: the rate interval, all namespaces and all jobs."""
        for name, value in (("$__rate_interval", f"{self._rate_interval:.0f}s"), ("$namespace", ".*"), ("$job", ".*")):
            expr = expr.replace(name, value)
        return expr

    def query(self, target: dict) -> list[Series]:
        parameters = {"query": self.filled(target["expr"]), "start": self.begin, "end": self.end, "step": self._step}
        with urllib.request.urlopen(f"{self._url}/api/v1/query_range?{urllib.parse.urlencode(parameters)}") as reply:
            found = json.load(reply)["data"]["result"]
        return [self._series(one, target.get("legendFormat", "")) for one in found]

    def _series(self, one: dict, legend: str) -> Series:
        times, values = np.array(one["values"], dtype=float).T
        for name, value in one["metric"].items():
            legend = legend.replace("{{" + name + "}}", value)
        return Series(one["metric"], times, values, legend)


class Frame:
    """Area of one panel on the page, with axes inside it. Margins are in inches."""

    def __init__(self, page: Figure, panel: dict) -> None:
        self._page, self._size, grid = page, page.get_size_inches(), panel["gridPos"]
        self._left, self._top = WIDTH * grid["x"] / 24, UNIT * grid["y"]
        self._width, self._height = WIDTH * grid["w"] / 24, UNIT * grid["h"]

    def box(self) -> None:
        gap = 0.05
        left, bottom, width, height = self._share(gap, gap, gap, gap)
        self._page.add_artist(Rectangle((left, bottom), width, height, fc="white", ec="#d8dde3", lw=0.8, zorder=-1))

    def write(self, text: str, x: float, y: float, **style) -> None:
        """Write text at (x, y) inches from the top left corner of the panel."""
        width, height = self._size
        self._page.text(
            (self._left + x) / width, 1 - (self._top + y) / height, text, **({"color": INK, "va": "center"} | style)
        )

    def corner(self, left: float, bottom: float) -> tuple[float, float]:
        """Page coordinates of a point given in inches from the bottom left corner of the panel."""
        return self._share(left, 0, 0, bottom)[:2]

    def axes(self, left: float, top: float, right: float, bottom: float) -> Axes:
        return self._page.add_axes(self._share(left, top, right, bottom))

    def _share(self, left: float, top: float, right: float, bottom: float) -> tuple[float, float, float, float]:
        width, height = self._size
        lowest = self._top + self._height - bottom
        across, down = self._width - left - right, self._height - top - bottom
        return (self._left + left) / width, 1 - lowest / height, across / width, down / height


def page(dashboard: dict, source: Prometheus) -> tuple[Figure, list[str]]:
    """Draw a dashboard. Returns the figure and the titles of the panels without data."""
    head = 2
    panels = [
        panel | {"gridPos": panel["gridPos"] | {"y": panel["gridPos"]["y"] + head}} for panel in dashboard["panels"]
    ]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = plt.figure(figsize=(WIDTH, UNIT * height + 0.1), dpi=DPI, facecolor=PAGE)
    top = Frame(figure, {"gridPos": {"x": 0, "y": 0, "w": 24, "h": head}})
    top.write(dashboard["title"], 0.12, 0.26, fontsize=15, fontweight="bold")
    top.write(dashboard["description"], 0.12, 0.56, fontsize=10, color=FAINT)
    empty = []
    for panel in panels:
        frame = Frame(figure, panel)
        if panel["type"] == "row":
            frame.write(panel["title"], 0.12, 0.2, fontsize=11, fontweight="bold")
            continue
        frame.box()
        frame.write(panel["title"], 0.15, 0.22, fontsize=9.5, fontweight="bold")
        series = [one for target in panel["targets"] for one in source.query(target)]
        if any(np.isfinite(one.values).any() for one in series):
            DRAWN[panel["type"]](frame, panel, series, source)
        else:
            frame.write("No data", 0.15, 0.6, fontsize=12, color=FAINT)
            empty.append(panel["title"])
    return figure, empty


def _graph(frame: Frame, panel: dict, series: Sequence[Series], source: Prometheus) -> None:
    unit, custom = panel["fieldConfig"]["defaults"]["unit"], panel["fieldConfig"]["defaults"]["custom"]
    axes = frame.axes(0.75, 0.45, 0.2, 0.68)
    if custom.get("stacking", {}).get("mode") == "normal":
        every = np.unique(np.concatenate([one.times for one in series]))
        heights = [np.interp(every, one.times, np.nan_to_num(one.values)) for one in series]
        axes.stackplot(_dates(every), heights, colors=COLORS, alpha=0.75, labels=[one.legend for one in series])
    else:
        for one, color in zip(series, COLORS * 9):
            axes.plot(_dates(one.times), one.values, color=color, lw=1.3, label=one.legend)
    top = axes.get_ylim()[1]
    if custom.get("thresholdsStyle", {}).get("mode") == "dashed":
        for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"][1:]:
            axes.axhline(step["value"], color=NAMED[step["color"]], ls="--", lw=1)
    # As in Grafana, limits far above the data are not shown.
    axes.set_ylim(0, top if top > 0 and any(np.nanmax(np.nan_to_num(one.values)) > 0 for one in series) else 1)
    round_numbers = (
        MultipleLocator(2 ** round(math.log2(top / 4))) if unit == "bytes" else MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])
    )
    axes.yaxis.set_major_locator(round_numbers)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_value(round(value, 9), unit)))
    _time_axis(axes, source)
    axes.grid(axis="y", color="#e6e9ed", lw=0.7)
    style = {
        "fontsize": 6.8,
        "frameon": False,
        "handlelength": 1.2,
        "handletextpad": 0.5,
        "columnspacing": 1.0,
        "borderpad": 0,
    }
    corner = {"bbox_to_anchor": frame.corner(0.15, 0.1), "bbox_transform": axes.figure.transFigure}
    axes.legend(loc="lower left", ncols=min(len(series), 4), **corner, **style)


def _heatmap(frame: Frame, panel: dict, series: Sequence[Series], source: Prometheus) -> None:
    """Draw a heatmap. Prometheus buckets are cumulative, so the counts of each bucket are differences."""
    unit = panel["options"]["yAxis"]["unit"]
    series = sorted(series, key=lambda one: float(one.labels["le"]))
    every = np.unique(np.concatenate([one.times for one in series]))
    sums = np.array([np.interp(every, one.times, np.nan_to_num(one.values)) for one in series])
    counts = np.diff(sums, axis=0, prepend=0).clip(min=0)
    used = np.flatnonzero(counts.sum(axis=1) > 0)
    low, high = max(used[0] - 1, 0), min(used[-1] + 2, len(series))
    axes = frame.axes(0.75, 0.45, 0.2, 0.42)
    shown = np.ma.masked_less_equal(counts[low:high], 0)
    edges = np.append(every, every[-1] + (every[-1] - every[-2]))
    axes.pcolormesh(_dates(edges), np.arange(high - low + 1), shown, cmap="Blues", vmin=-0.15 * shown.max())
    labels = [
        format_value(float(one.labels["le"]), unit) if one.labels["le"] != "+Inf" else "more"
        for one in series[low:high]
    ]
    skip = math.ceil(len(labels) / 9)
    axes.set_yticks(np.arange(1, high - low + 1)[::skip], labels[::skip])
    _time_axis(axes, source)


def _number(frame: Frame, panel: dict, series: Sequence[Series], source: Prometheus) -> None:
    unit, options = panel["fieldConfig"]["defaults"]["unit"], panel["options"]
    if options["textMode"] == "name":
        frame.write("\n".join(one.legend for one in series), 0.15, 0.75, fontsize=11.5)
        return
    share = frame._width / len(series)
    for i, one in enumerate(series):
        color = _color(panel, one.last)
        if one.legend:
            frame.write(one.legend, 0.15 + i * share, 0.5, fontsize=8.5, color=FAINT)
        frame.write(format_value(one.last, unit), 0.15 + i * share, 0.76, fontsize=17, color=color, fontweight="bold")
        axes = frame.axes(0.06 + i * share, 0.98, 0.06 + (len(series) - 1 - i) * share, 0.07)
        axes.fill_between(_dates(one.times), np.nan_to_num(one.values), color=color, alpha=0.15, lw=0)
        axes.plot(_dates(one.times), one.values, color=color, lw=1)
        axes.set_xlim(*_dates(np.array([source.begin, source.end])))
        axes.set_ylim(bottom=min(0, np.nanmin(one.values)), top=max(1.1 * np.nanmax(one.values), 1e-9))
        axes.axis("off")


def _dial(frame: Frame, panel: dict, series: Sequence[Series], source: Prometheus) -> None:
    unit, steps = panel["fieldConfig"]["defaults"]["unit"], panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    share = (frame._width - 0.2) / len(series)
    for i, one in enumerate(series):
        axes = frame.axes(0.1 + i * share, 0.45, 0.1 + (len(series) - 1 - i) * share, 0.15)
        axes.set(xlim=(-1.15, 1.15), ylim=(-0.55, 1.15), aspect="equal")
        axes.axis("off")
        start, sweep = 210, 240
        ends = [*(step["value"] for step in steps[1:]), 1.0]
        for step, begin, end in zip(steps, [0.0, *ends], ends):
            axes.add_patch(
                Wedge((0, 0), 1.1, start - sweep * end, start - sweep * begin, width=0.05, fc=NAMED[step["color"]])
            )
        axes.add_patch(Wedge((0, 0), 1.02, start - sweep, start, width=0.28, fc="#e6e9ed"))
        color = _color(panel, one.last)
        axes.add_patch(Wedge((0, 0), 1.02, start - sweep * min(max(one.last, 0), 1), start, width=0.28, fc=color))
        axes.text(
            0, 0.02, format_value(one.last, unit), ha="center", va="center", fontsize=17, fontweight="bold", color=color
        )
        axes.text(0, -0.42, one.legend, ha="center", va="center", fontsize=9.5, color=INK)


DRAWN = {"timeseries": _graph, "heatmap": _heatmap, "stat": _number, "gauge": _dial}


def _color(panel: dict, value: float) -> tuple[float, float, float]:
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    return to_rgb(NAMED[[step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1]])


def _dates(times: np.ndarray) -> np.ndarray:
    return date2num(np.array(times * 1e3, dtype="datetime64[ms]"))


def _time_axis(axes: Axes, source: Prometheus) -> None:
    axes.set_xlim(*_dates(np.array([source.begin, source.end])))
    locator = AutoDateLocator(minticks=4, maxticks=7)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, show_offset=False))
    axes.tick_params(labelsize=7.5, colors="#57606a", length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _save(figure: Figure, path: Path) -> None:
    """Save with a palette of 256 colors, which halves the file size without visible loss."""
    figure.canvas.draw()
    picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    picture.quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", required=True, metavar="URL", help="URL such as http://localhost:9090")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the pictures")
    parser.add_argument("--minutes", type=float, default=15, help="time range in minutes (default: %(default)s)")
    parser.add_argument(
        "--scrape-interval",
        type=float,
        default=15,
        metavar="SECONDS",
        help="scrape interval of Prometheus (default: %(default)s)",
    )
    parser.add_argument(
        "--end",
        type=float,
        default=time.time(),
        metavar="SECONDS",
        help="end of the time range, since the epoch (default: now)",
    )
    options = parser.parse_args()
    source = Prometheus(options.prometheus, options.minutes, options.scrape_interval, options.end)
    missing = 0
    for path in sorted(FOLDER.glob("*.json")):
        figure, empty = page(json.loads(path.read_text()), source)
        _save(figure, options.out / f"{path.stem}.png")
        missing += len(empty)
        print(f"{options.out / path.stem}.png", *(f"no data: {title}" for title in empty), sep="\n  ")
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
