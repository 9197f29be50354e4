"""Families of metrics: how they are made, and how they are shown to who scrapes them. Knows nothing about which there
are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import prometheus_client as prom
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

Metric = TypeVar("Metric", Counter, Gauge, Histogram)

PREFIX = "smc_"
GROUPS = ("draft", "target")


class Registry(CollectorRegistry):
    """Without the `_created` series that the library adds to every counter and histogram: nobody asks for them."""

    def collect(self) -> Iterator[prom.Metric]:
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class Page(CollectorRegistry):
    """What is scraped: with the name of the model that is served, as its series have it elsewhere."""

    def __init__(self, registry: Any) -> None:
        super().__init__()
        self._registry = registry
        self.model: str | None = None

    def restricted_registry(self, names: Iterable[str]) -> Any:
        """What a scraper asks for by name."""
        page = Page(self._registry.restricted_registry(names))
        page.model = self.model
        return page

    def collect(self) -> Iterator[prom.Metric]:
        for metric in self._registry.collect():
            if self.model is not None and metric.name.startswith(PREFIX):
                metric.samples = [
                    sample._replace(labels={**sample.labels, "model_name": self.model}) for sample in metric.samples
                ]
            yield metric


class Families:
    """Makes metrics in a registry of its own: several services can live in one process."""

    def __init__(self) -> None:
        self.registry = Registry()

    def _counter(self, name: str, text: str, **labels: Iterable[str]) -> Counter:
        return _with_series(Counter(name, text, tuple(labels), registry=self.registry), labels)

    def _gauge(self, name: str, text: str, **labels: Iterable[str]) -> Gauge:
        return _with_series(Gauge(name, text, tuple(labels), registry=self.registry), labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], **labels: Iterable[str]) -> Histogram:
        return _with_series(Histogram(name, text, tuple(labels), buckets=buckets, registry=self.registry), labels)


def _with_series(metric: Metric, labels: dict[str, Iterable[str]]) -> Metric:
    """`metric`, with the series of its label's values made. Labels whose values only make sense together come without
    any."""
    if len(labels) == 1:
        for value in next(iter(labels.values())):
            metric.labels(value)
    return metric
