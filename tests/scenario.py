"""Common part of the scenarios, checks that are too heavy for the tests: they report what they observe, and what
failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


class Scenario:
    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._begin = time.monotonic()
        self.failed: list[str] = []

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._begin:6.1f} s  {text}", flush=True)

    def must(self, what: str, holds: bool) -> None:
        self.say(f"{'ok  ' if holds else 'NOT '} {what}")
        if not holds:
            self.failed.append(what)

    def until(self, what: str, condition: Callable[[], bool], timeout: float) -> float:
        """Wait for a condition; return the seconds it took. Raises SystemExit if it took longer than `timeout`
        seconds."""
        begin = time.monotonic()
        while not condition():
            if time.monotonic() - begin > timeout:
                raise SystemExit(f"NOT {what}, within {timeout:g} s; see the logs in {self._directory}")
            time.sleep(0.1)
        took = time.monotonic() - begin
        self.say(f"ok   {what} (after {took:.1f} s)")
        return took

    def verdict(self) -> int:
        """Print the result; return the exit code."""
        self.say(
            "everything was as it should be" if not self.failed else f"NOT as it should be: {'; '.join(self.failed)}"
        )
        return bool(self.failed)
