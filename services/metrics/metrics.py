"""Every metric of the service: its name, its help, its labels, and the one method that moves it. Knows nothing about
who calls.

Labels come from fixed sets, and every series exists from the start, so that a rate of zero is a zero and not a hole.
"""

from __future__ import annotations

from collections.abc import Callable

import prometheus_client as prom
from prometheus_client import ProcessCollector

from services.metrics.engine import EngineMetrics
from services.metrics.families import GROUPS, Page
from services.metrics.requests import RequestMetrics
from smc.api.sampling_params import VERIFICATIONS


class Metrics(RequestMetrics, EngineMetrics):
    """Those of requests and of the engine, and beside them whether the service is there. Methods may be called from any
    thread."""

    def __init__(self) -> None:
        super().__init__()
        self._page = Page(self.registry)
        ProcessCollector(registry=self.registry)
        self._make_request_metrics()
        self._make_engine_metrics()
        self._make_exact_metrics()
        self._make_round_metrics()
        self._make_service_metrics()

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return prom.generate_latest(self._page)

    def serve(self, port: int, host: str = "127.0.0.1") -> tuple[int, Callable[[], None]]:
        """Answer scrapes at `/metrics`. Returns the port (0: a free one is taken) and a function that stops it."""
        try:
            server, thread = prom.start_http_server(port, addr=host, registry=self._page)
        except OSError as error:
            raise OSError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}; give another metrics port, or 0 for any"
            ) from error

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return server.server_port, stop

    def set_health(self, draft: bool, target: bool, serving: bool) -> None:
        for group, healthy in zip(GROUPS, (draft, target), strict=True):
            self._group_healthy.labels(group).set(healthy)
        self._serving.set(serving)

    def gateway_paused(self, seconds: float) -> None:
        """Its loop answered nobody for so long."""
        self._paused.inc(seconds)

    def set_epoch(self, epoch: int) -> None:
        self._epoch.set(epoch)

    def workers_restarted(self) -> None:
        """All workers were started again after a loss."""
        self._restarts.inc()

    def draft_restarted(self) -> None:
        """The draft was started again beside the target."""
        self._draft_restarts.inc()

    def set_build_info(
        self, version: str, model: str, form: str, link: str, max_slots: int, block: int, weights: dict[str, str]
    ) -> None:
        """What runs here; once, at the start. Nothing holds a slot yet. `model`: the name under which it is served;
        `weights`: each group's fingerprint."""
        self._page.model = model
        for verification in VERIFICATIONS:
            for position in range(block):
                self._accepted_at.labels(verification, position)
        # What answers are the target's: its weights are the ones that a rollout is about.
        fingerprints = {"weights": weights["target"], "draft_weights": weights["draft"]}
        self._build.info({"version": version, "form": form, "link": link, **fingerprints})
        self._slots_capacity.set(max_slots)
        self._slots_free.set(max_slots)

    def _make_service_metrics(self) -> None:
        self._serving = self._gauge("smc_serving", "1 while requests are let in.")
        self._group_healthy = self._gauge(
            "smc_group_healthy", "1 while every rank of the group is ready.", group=GROUPS
        )
        self._paused = self._counter(
            "smc_gateway_paused_seconds_total",
            "Time in which the gateway answered nobody, of pauses longer than 0.25 s.",
        )
        self._epoch = self._gauge("smc_epoch", "Starts of the workers, or of the draft alone, so far.")
        self._restarts = self._counter(
            "smc_worker_restarts_total", "Times that all workers were started again after a loss."
        )
        self._draft_restarts = self._counter(
            "smc_draft_restarts_total", "Times that the draft alone was started again after a loss."
        )
        self._build = prom.Info("smc_build", "What runs here.", registry=self.registry)
