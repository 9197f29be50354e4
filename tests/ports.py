"""Unused ports, for programs that cannot choose their own."""

from __future__ import annotations

import socket

DEFAULTS = {8000, 50051}
"""Ports of a service that is given none. The second is among those that Linux hands out."""


def free_ports(count: int) -> list[int]:
    """Return free ports, none of which is a default."""
    sockets = [socket.socket() for _ in range(count + len(DEFAULTS))]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
        return [port for port in ports if port not in DEFAULTS][:count]
    finally:
        for each in sockets:
            each.close()
