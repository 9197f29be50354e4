"""The page of metrics that Prometheus scrapes: how metrics are created, labelled and served. `services.metrics` has the
metrics themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import prometheus_client as prom
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# The library adds a series `_created` to every counter and histogram, which is unused.
prom.disable_created_metrics()
Metric = TypeVar("Metric", Counter, Gauge, Histogram)

PREFIX = "smc_"
OF_PAIR = (
    *("smc_build", "smc_spec_decode", "smc_log_evidence_per_token"),
    *("smc_ess_share_ratio", "smc_committed_lag_tokens", "smc_collapses"),
)
"""How names begin of metrics that say how well a draft fits its target, and of the service's description."""


class Page(CollectorRegistry):
    """The registry that is scraped. It labels every `smc_` series with the name of the served model, those of `OF_PAIR`
    with `pair`, a fingerprint of both models, so that a window over a restart does not mix two pairs, and those of a
    worker group with `worker_group`, its number."""

    def __init__(self, service: Any, groups: Sequence[Any]) -> None:
        """`service`, `groups`: registries of what concerns the whole service, and of what concerns each worker
        group."""
        super().__init__()
        self._service, self._groups = service, groups
        self.model: str | None = None
        self.pair = ""

    def restricted_registry(self, names: Iterable[str]) -> Any:
        """Return a page of the metrics that a scraper asks for by name."""
        names = list(names)
        groups = [group.restricted_registry(names) for group in self._groups]
        page = Page(self._service.restricted_registry(names), groups)
        page.model, page.pair = self.model, self.pair
        return page

    def collect(self) -> Iterator[prom.Metric]:
        yield from (self._labelled(metric, {}) for metric in self._service.collect())
        families: dict[str, prom.Metric] = {}
        for number, group in enumerate(self._groups):
            for metric in group.collect():
                metric = self._labelled(metric, {"worker_group": str(number)})
                families.setdefault(metric.name, metric).samples += metric.samples if number else []
        yield from families.values()

    def _labelled(self, metric: prom.Metric, added: dict[str, str]) -> prom.Metric:
        if self.model is not None and metric.name.startswith(PREFIX):
            added = added | {"model_name": self.model}
            if metric.name.startswith(OF_PAIR):
                added["pair"] = self.pair
        metric.samples = [sample._replace(labels=sample.labels | added) for sample in metric.samples]
        return metric


class Families:
    """Creates metrics in its own registry, so that several services can live in one process, and serves them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._scraped = self.registry
        """What `serve` answers with."""

    def serve(
        self, port: int, host: str = "127.0.0.1", refusal: Callable[[Iterable[str]], str | None] = lambda hosts: None
    ) -> tuple[int, Callable[[], None]]:
        """Answer scrapes at `/metrics`. `refusal`: returns why a request with these `Host` headers is refused. Returns
        the bound port (a free one if `port` is 0) and a function that stops the server. Raises OSError if it cannot
        listen."""
        try:
            server, thread = prom.start_http_server(port, addr=host, registry=self._scraped)
        except OSError as error:
            raise OSError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}; give another metrics port, or 0 for any"
            ) from error

        answer = server.get_app()
        assert answer is not None

        def guarded(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
            given = environ.get("HTTP_HOST")
            if given is None or (why := refusal([given])) is None:
                return answer(environ, start)
            start("403 Forbidden", [("content-type", "text/plain; charset=utf-8")])
            return [f"{why}\n".encode()]

        server.set_app(guarded)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return server.server_port, stop

    def _counter(self, name: str, text: str, **labels: Iterable[str]) -> Counter:
        return _with_series(Counter(name, text, tuple(labels), registry=self.registry), labels)

    def _gauge(self, name: str, text: str, **labels: Iterable[str]) -> Gauge:
        return _with_series(Gauge(name, text, tuple(labels), registry=self.registry), labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], **labels: Iterable[str]) -> Histogram:
        return _with_series(Histogram(name, text, tuple(labels), buckets=buckets, registry=self.registry), labels)


def _with_series(metric: Metric, labels: dict[str, Iterable[str]]) -> Metric:
    """Return `metric`, after creating a series for each value of its label. For several labels none is created, because
    only some combinations of values make sense."""
    if len(labels) == 1:
        for value in next(iter(labels.values())):
            metric.labels(value)
    return metric
