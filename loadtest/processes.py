"""What the processes of a service on this machine hold. Knows nothing about what they do but for their titles."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

import psutil

REFRESH = 10.0
"""Seconds between two searches for new processes; a search reads the whole process table."""
TITLE = "ray::smcserve: "
"""How titles of the service's processes begin."""
RAY = "ray"
"""All processes of Ray itself."""


@dataclass(frozen=True)
class Held:
    """By one process, or by several together."""

    resident: int = 0
    """Bytes."""
    threads: int = 0
    files: int = 0
    """Open ones, connections among them."""

    def __add__(self, other: Held) -> Held:
        return Held(self.resident + other.resident, self.threads + other.threads, self.files + other.files)


class ProcessTree:
    """A process and its descendants. Raises ValueError if there is no such process."""

    def __init__(self, pid: int) -> None:
        try:
            self._root = psutil.Process(pid)
        except psutil.NoSuchProcess as error:
            raise ValueError(f"--watch-pid {pid}: there is no such process; give that of `smcserve serve`") from error
        self._names: dict[psutil.Process, str] = {}
        self._searched = float("-inf")

    def held(self) -> dict[str, Held]:
        """By name: `gateway`, `coordinator`, `draft rank 0`, `target rank 0`, .., and `ray` for the rest together."""
        if time.monotonic() - self._searched > REFRESH:
            self._search()
        held: dict[str, Held] = {}
        for process, name in self._names.items():
            try:
                seen = Held(process.memory_info().rss, process.num_threads(), process.num_fds())
            except psutil.NoSuchProcess:
                self._searched = float("-inf")
                continue
            held[name] = held.get(name, Held()) + seen
        return held

    def pids(self) -> dict[str, set[int]]:
        """Of all but those of Ray, by the same names."""
        self._search()
        return {
            name: {p.pid for p, other in self._names.items() if other == name}
            for name in set(self._names.values()) - {RAY}
        }

    def _search(self) -> None:
        self._searched = time.monotonic()
        try:
            family = self._root.children(recursive=True)
        except psutil.NoSuchProcess:
            return  # the root has ended: nothing is left to be measured
        self._names = {self._root: "gateway"}
        for process in family:
            with suppress(psutil.NoSuchProcess):  # processes of Ray come and go
                title = " ".join(process.cmdline()[:1])
                self._names[process] = title.removeprefix(TITLE).partition(".")[0] if title.startswith(TITLE) else RAY
