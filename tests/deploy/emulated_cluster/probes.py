"""Probes as a kubelet runs them: gRPC, HTTP, TCP and commands, with their periods and thresholds."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.emulated_cluster.container import Container


def passes(probe: dict, container: Container, address: str) -> bool:
    """Return whether a single attempt succeeds."""
    timeout = probe.get("timeoutSeconds", 1)
    if "exec" in probe:
        return container.execute(probe["exec"]["command"], timeout) == 0
    if "grpc" in probe:
        return _serving(f"{address}:{probe['grpc']['port']}", probe["grpc"].get("service", ""), timeout)
    if "httpGet" in probe:
        port = _port(container.spec, probe["httpGet"]["port"])
        try:
            with urllib.request.urlopen(
                f"http://{address}:{port}{probe['httpGet']['path']}", timeout=timeout
            ) as response:
                return 200 <= response.status < 400
        except (urllib.error.URLError, OSError):
            return False
    try:
        socket.create_connection((address, _port(container.spec, probe["tcpSocket"]["port"])), timeout).close()
        return True
    except OSError:
        return False


def _serving(address: str, service: str, timeout: float) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            found = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout
            )
        except grpc.RpcError:
            return False
    return found.status == health_pb2.HealthCheckResponse.SERVING


def _port(spec: dict, port: int | str) -> int:
    return (
        port if isinstance(port, int) else next(each["containerPort"] for each in spec["ports"] if each["name"] == port)
    )


@dataclass
class Watch:
    """The state of one probe. `holds` changes after the number of equal results that the manifest requires."""

    probe: dict | None
    holds: bool = False
    failed: bool = False
    """The probe has failed as often in a row as its threshold."""
    _alike: int = 0
    _last: bool | None = None
    _next: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._next += (self.probe or {}).get("initialDelaySeconds", 0)
        self.holds = self.probe is None

    def look(self, container: Container, address: str) -> None:
        if self.probe is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self.probe.get("periodSeconds", 10)
        result = passes(self.probe, container, address)
        self._alike = self._alike + 1 if result == self._last else 1
        self._last = result
        if result:
            self.holds, self.failed = self.holds or self._alike >= self.probe.get("successThreshold", 1), False
        elif self._alike >= self.probe.get("failureThreshold", 3):
            self.holds, self.failed = False, True
