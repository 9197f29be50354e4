"""The PromQL that dashboards are made of. Knows nothing about panels.

All of it is restricted to the namespaces and jobs chosen in the dashboard; `per` names the labels that stay apart.
"""

from __future__ import annotations

CHOSEN = 'namespace=~"$namespace", job=~"$job"'


def pick(metric: str, where: str = "") -> str:
    """The series themselves."""
    return f"{metric}{{{', '.join(filter(None, (where, CHOSEN)))}}}"


def total(metric: str, per: str = "", where: str = "") -> str:
    return _sum(pick(metric, where), per)


def rate(metric: str, per: str = "", where: str = "") -> str:
    """Of a counter, a second."""
    return _sum(f"rate({pick(metric, where)}[$__rate_interval])", per)


def gain(metric: str, window: str, per: str = "") -> str:
    """How much a counter grew."""
    return _sum(f"increase({pick(metric)}[{window}])", per)


def ratio(part: str, whole: str, per: str = "") -> str:
    """Empty where there is no whole. `per`: labels that the part has and the whole has not."""
    return f"{part} / {'on () group_left () ' if per else ''}({whole} > 0)"


def ratio_or_zero(part: str, whole: str) -> str:
    return f"{ratio(part, whole)} or 0 * {whole}"


def mean(histogram: str, per: str = "") -> str:
    return ratio(rate(f"{histogram}_sum", per), rate(f"{histogram}_count", per))


def quantile(histogram: str, share: float) -> str:
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', 'le')})"


def quantiles(histogram: str, *shares: float) -> dict[str, str]:
    """Legend -> expression."""
    return {f"p{100 * share:g}": quantile(histogram, share) for share in shares}


def _sum(series: str, per: str) -> str:
    return f"sum by ({per}) ({series})" if per else f"sum({series})"
