"""Memory of the processes of a service on this machine. Knows nothing about what they do but for their titles."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil

REFRESH = 10.0
"""Seconds between two searches for new processes; a search reads the whole process table."""
TITLE = "ray::smcserve: "
"""How titles of the service's processes begin."""
RAY = "ray"
"""All processes of Ray itself."""


class ProcessTree:
    """A process and its descendants. Raises ValueError if there is no such process."""

    def __init__(self, pid: int) -> None:
        try:
            self._root = psutil.Process(pid)
        except psutil.NoSuchProcess as error:
            raise ValueError(f"--watch-pid {pid}: there is no such process; give that of `smcserve serve`") from error
        self._names: dict[psutil.Process, str] = {}
        self._searched = float("-inf")

    def resident_bytes(self) -> dict[str, int]:
        """By name: `gateway`, `coordinator`, `draft rank 0`, `target rank 0`, .., and `ray` for the rest together."""
        if time.monotonic() - self._searched > REFRESH:
            self._search()
        resident: dict[str, int] = {}
        for process, name in self._names.items():
            try:
                resident[name] = resident.get(name, 0) + process.memory_info().rss
            except psutil.NoSuchProcess:
                self._searched = float("-inf")
        return resident

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
