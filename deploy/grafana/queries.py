"""Builds PromQL expressions for the dashboards. Knows nothing about panels.

All expressions are restricted to the namespaces and jobs selected in the dashboard. `per` names the labels to group by;
`where` adds label matchers.
"""

from __future__ import annotations

CHOSEN = 'namespace=~"$namespace", job=~"$job"'


def pick(metric: str, where: str = "") -> str:
    """Selector of the metric's series."""
    return f"{metric}{{{', '.join(filter(None, (where, CHOSEN)))}}}"


def total(metric: str, per: str = "", where: str = "") -> str:
    """Sum of a gauge."""
    return _sum(pick(metric, where), per)


def rate(metric: str, per: str = "", where: str = "") -> str:
    """Increase of a counter per second."""
    return _sum(f"rate({pick(metric, where)}[$__rate_interval])", per)


def gain(metric: str, window: str, per: str = "") -> str:
    """Increase of a counter within a window."""
    return _sum(f"increase({pick(metric)}[{window}])", per)


def ratio(part: str, whole: str, per: str = "") -> str:
    """part / whole; no result if the whole is zero. `per`: labels of the part that the whole does not have."""
    return f"{part} / {'on () group_left () ' if per else ''}({whole} > 0)"


def ratio_or_zero(part: str, whole: str) -> str:
    """part / whole; 0 if the whole is zero."""
    return f"{ratio(part, whole)} or 0 * {whole}"


def mean(histogram: str, per: str = "") -> str:
    """Mean of a histogram's observations."""
    return ratio(rate(f"{histogram}_sum", per), rate(f"{histogram}_count", per))


def quantile(histogram: str, share: float) -> str:
    """Estimated quantile of a histogram."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', 'le')})"


def quantiles(histogram: str, *shares: float) -> dict[str, str]:
    """Legend -> expression, for several quantiles."""
    return {f"p{100 * share:g}": quantile(histogram, share) for share in shares}


def _sum(series: str, per: str) -> str:
    return f"sum by ({per}) ({series})" if per else f"sum({series})"
