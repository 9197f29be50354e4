"""Panels and dashboards in one style, built with Grafana's Foundation SDK. Knows nothing about the metrics."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.builders import common, dashboard, gauge, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heatmap_model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from queries import gain

SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
GRID, TILE, GRAPH = 24, 4, 8
"""Width of the grid, height of a number panel and height of a graph, in Grafana's grid units."""

Panel = stat.Panel | gauge.Panel | timeseries.Panel | heatmap.Panel
Limits = Mapping[str, float]
"""Color -> lowest value with that color. Values below the first limit are red if green is one of the colors, else
green."""


def number(title: str, about: str, unit: str, expr: str, limits: Limits | None = None, legend: str = "") -> stat.Panel:
    """Current value of each series, with a sparkline."""
    panel = _common(stat.Panel(), title, about, {legend: expr}).unit(unit).height(TILE).thresholds(_thresholds(limits))
    panel.graph_mode(common_model.BigValueGraphMode.AREA).color_mode(common_model.BigValueColorMode.VALUE)
    return panel.reduce_options(_last())


def name(title: str, about: str, expr: str, legend: str) -> stat.Panel:
    """Labels of a series as text."""
    panel = number(title, about, "none", expr, legend=legend).text_mode(common_model.BigValueTextMode.NAME)
    return panel.graph_mode(common_model.BigValueGraphMode.NONE).color_mode(common_model.BigValueColorMode.NONE)


def dial(title: str, about: str, expr: str, limits: Limits, legend: str = "") -> gauge.Panel:
    """Gauge of a share from 0 to 1."""
    panel = _common(gauge.Panel(), title, about, {legend: expr}).unit("percentunit").min(0).max(1).height(GRAPH)
    return panel.thresholds(_thresholds(limits)).reduce_options(_last())


def graph(
    title: str, about: str, unit: str, series: Mapping[str, str], *, stacked: bool = False, limits: Limits | None = None
) -> timeseries.Panel:
    """Time series. `series`: legend -> expression. `limits` are drawn as dashed lines."""
    panel = (
        _common(timeseries.Panel(), title, about, series)
        .unit(unit)
        .min(0)
        .height(GRAPH)
        .fill_opacity(40 if stacked else 8)
    )
    panel.legend(
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(common_model.LegendDisplayMode.LIST)
        .placement(common_model.LegendPlacement.BOTTOM)
    )
    panel.tooltip(
        common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.MULTI).sort(common_model.SortOrder.DESCENDING)
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL))
    if limits:
        panel.thresholds(_thresholds(limits))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(common_model.GraphThresholdsStyleMode.DASHED))
    return panel


def buckets(title: str, about: str, unit: str, metric: str) -> heatmap.Panel:
    """Heatmap of a histogram: observations in each bucket over time."""
    query = _query("{{le}}", gain(f"{metric}_bucket", "$__rate_interval", "le"), 0).format(PromQueryFormat.HEATMAP)
    panel = _common(heatmap.Panel(), title, about, {}).height(GRAPH).with_target(query)
    panel.calculate(False).y_axis(heatmap.YAxisConfig().unit(unit)).cell_gap(1)
    panel.color(heatmap.HeatmapColorOptions().mode(heatmap_model.HeatmapColorMode.SCHEME).scheme("Blues").steps(64))
    return panel.rows_frame(heatmap.RowsHeatmapOptions().layout(common_model.HeatmapCellLayout.AUTO))


def board(uid: str, title: str, about: str, rows: Mapping[str, Sequence[Panel]]) -> model.Dashboard:
    """A dashboard with rows of panels of equal width, and links to the dashboards with the same tag."""
    built = dashboard.Dashboard(f"smcserve / {title}").uid(uid).description(about).tags(["smcserve"]).editable()
    built.time("now-1h", "now").refresh("30s").timezone("browser").tooltip(model.DashboardCursorSync.CROSSHAIR)
    built.link(
        dashboard.DashboardLink("smcserve")
        .type(model.DashboardLinkType.DASHBOARDS)
        .tags(["smcserve"])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )
    built.with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    built.with_variable(_label("namespace", "smc_serving")).with_variable(
        _label("job", 'smc_serving{namespace=~"$namespace"}')
    )
    ids = itertools.count(1)
    for row, panels in rows.items():
        built.with_row(dashboard.Row(row).id(next(ids)))
        for panel in panels:
            built.with_panel(panel.id(next(ids)).span(GRID // len(panels)))
    return built.build()


def _common(panel: Panel, title: str, about: str, series: Mapping[str, str]) -> Panel:
    panel.title(title).description(about).datasource(SOURCE)
    for i, (legend, expr) in enumerate(series.items()):
        panel.with_target(_query(legend, expr, i))
    return panel


def _query(legend: str, expr: str, index: int) -> prometheus.Dataquery:
    query = prometheus.Dataquery().expr(expr).legend_format(legend).range()
    return query.ref_id("ABCDEFGH"[index]).datasource(SOURCE)


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"])


def _thresholds(limits: Limits | None) -> dashboard.ThresholdsConfig:
    limits = limits or {}
    steps = [model.Threshold(None, "red" if "green" in limits else "green")]
    steps += [model.Threshold(value, color) for color, value in limits.items()]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)


def _label(label: str, series: str) -> dashboard.QueryVariable:
    """Variable for the values of a label. "All" also matches series without the label."""
    variable = dashboard.QueryVariable(label).label(label).datasource(SOURCE).query(f"label_values({series}, {label})")
    variable.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(model.VariableSort.ALPHABETICAL_ASC)
    variable.multi(True).include_all(True).all_value(".*")
    return variable.current(model.VariableOption(selected=True, text="All", value="$__all"))
