"""How far a run is: a bar where somebody watches, else a line every few seconds. Knows nothing about what is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from services.batch.resume import Survey

LINE_SECONDS = 5.0


@dataclass
class Tally:
    """Counts of a run as it goes."""

    before: Survey
    """What earlier runs had done."""
    written: int = 0
    failed: int = 0
    tokens: int = 0
    """Of this run's answers, like the two above."""
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    """From `start` to the last line."""

    def start(self) -> None:
        """Now, rather than when this was made: speed is that of decoding, not of starting."""
        self.began = time.monotonic()

    def count(self, record: dict[str, Any]) -> None:
        self.written += 1
        if record["error"] is not None:
            self.failed += 1
        else:
            self.tokens += record["response"]["body"]["usage"]["completion_tokens"]
        self.seconds = time.monotonic() - self.began

    @property
    def done(self) -> int:
        return self.before.done + self.written

    @property
    def all_failed(self) -> int:
        """Of this run and those before."""
        return self.before.failed + self.failed

    @property
    def speed(self) -> str:
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return f"{self.tokens:,} tokens, {rate:,.0f} tok/s"

    def summary(self) -> str:
        parts = [f"{self.done:,} of {self.before.total:,} lines done"]
        if self.before.done:
            parts.append(f"{self.before.done:,} by earlier runs")
        parts.append(f"{self.all_failed:,} failed")
        if self.written:
            parts.append(f"{self.speed} in {self.seconds:.1f} s")
        return ", ".join(parts)


class Display:
    """Shows a tally on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: Any = None
        self._shown = time.monotonic()

    @contextmanager
    def showing(self, tally: Tally) -> Iterator[None]:
        if not self._console.is_terminal:
            self._shown = time.monotonic()
            yield
            return
        columns = (
            TextColumn("lines"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console, transient=True) as self._bar:
            self._task = self._bar.add_task("", total=tally.before.total, completed=tally.done)
            yield

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def update(self, tally: Tally) -> None:
        """A line has been written."""
        if self._bar is not None:
            self._bar.update(self._task, completed=tally.done, description=_words(tally))
        elif time.monotonic() - self._shown >= LINE_SECONDS:
            self._shown = time.monotonic()
            self.say(f"{tally.done:,} of {tally.before.total:,} lines, {_words(tally)}, about {_left(tally)} left")


def _words(tally: Tally) -> str:
    return f"{tally.all_failed:,} failed, {tally.speed}"


def _left(tally: Tally) -> str:
    minutes, seconds = divmod(round(tally.seconds / tally.written * (tally.before.total - tally.done)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
