"""Whether every port of a gateway can be had, found by binding it, before anything that takes time is started. Knows
nothing about servers."""

from __future__ import annotations

import socket

from services.gateway.config import GatewayConfig


def check_ports(config: GatewayConfig) -> None:
    """Raises OSError naming the first port that cannot be listened on, and the option that gives it."""
    host = config.host.strip("[]")
    for name, port in (("port", config.port), ("http_port", config.http_port), ("metrics_port", config.metrics_port)):
        if port is None:
            continue
        flag = f"--{name.replace('_', '-')}"
        try:
            for family, kind, protocol, _, address in socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            ):
                _bind(socket.socket(family, kind, protocol), address)
        except OSError as error:
            hint = f"give another {flag}, or 0 for any free one" if port else "give another --host"
            raise OSError(f"cannot listen on {host}:{port} ({flag}): {error.strerror}; {hint}") from error


def _bind(listener: socket.socket, address: tuple) -> None:
    with listener:
        # As servers do: a port whose last connections are closing is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
