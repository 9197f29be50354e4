"""Addresses for pods: a local network bridge with network namespaces. Needs root on Linux."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


def available() -> str:
    """Return the reason why pods cannot run here; empty if they can."""
    if os.geteuid() != 0:
        return "not root"
    tried = subprocess.run(
        ["unshare", "-n", "-i", "-u", "-m", "-p", "-f", "--mount-proc", "ip", "link"], capture_output=True, text=True
    )
    return tried.stderr.strip()


class Network:
    """The network of one scenario, with at most 250 pods."""

    def __init__(self) -> None:
        number = os.getpid() % 60000
        self._bridge, self._subnet = f"smc{number}", f"10.{100 + number // 256 % 100}.{number % 256}"
        self._last = itertools.count(2)

    @property
    def host(self) -> str:
        """This machine's own address, as pods see it."""
        return f"{self._subnet}.1"

    @contextmanager
    def up(self) -> Iterator[Network]:
        _ip("link", "add", self._bridge, "type", "bridge")
        try:
            _ip("addr", "add", f"{self.host}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            yield self
        finally:
            _ip("link", "del", self._bridge)

    def connect(self, pid: int) -> str:
        """Give the network namespace of a process an address, and return it. It disappears with the namespace."""
        last = next(self._last)
        address, outside, inside = (
            f"{self._subnet}.{last}",
            f"{self._bridge}-{last}"[-15:],
            f"{self._bridge}p{last}"[-15:],
        )
        _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
        _ip("link", "set", outside, "master", self._bridge, "up")
        _ip("link", "set", inside, "netns", str(pid))
        within = ["nsenter", "-t", str(pid), "-n", "ip"]
        for command in (["link", "set", inside, "name", "eth0"], ["addr", "add", f"{address}/24", "dev", "eth0"]):
            subprocess.run([*within, *command], check=True)
        for device in ("eth0", "lo"):
            subprocess.run([*within, "link", "set", device, "up"], check=True)
        subprocess.run([*within, "route", "add", "default", "via", self.host], check=True)
        return address


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
