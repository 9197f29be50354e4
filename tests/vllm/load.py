"""Callers that stream one answer after another from an OpenAI API, and counts of how their calls ended."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import openai

from smc.demo.problems import generate

QUESTIONS = [problem.question for problem in generate(2, 300, "test") if len(problem.question) < 170]
CALLERS = 8
HANG = 60.0
"""Seconds after which a call that has not ended counts as hanging."""


@dataclass
class Load:
    """Callers that make calls until they are stopped."""

    client: Callable[[], openai.OpenAI]
    """Returns the client; called before every call."""
    model: str
    callers: int = CALLERS
    rest: float = 0.0
    """Seconds that a caller waits after each answer."""
    ends: Counter = field(default_factory=Counter)
    """Number of calls by how they ended: `ok`, or the kind of error."""
    begun: Counter = field(default_factory=Counter)
    """Number of calls that had streamed text, by how they ended."""
    longest: float = 0.0
    """Duration of the longest call in seconds."""
    pause: float = 0.0
    """Longest time in seconds between two pieces of an answer, or before the first."""

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._guard = threading.Lock()
        self._threads = [
            threading.Thread(target=self._call_until_stopped, args=(caller,), daemon=True)
            for caller in range(self.callers)
        ]

    @contextmanager
    def running(self) -> Iterator[Load]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(HANG)
            self.ends["hanging"] += sum(thread.is_alive() for thread in self._threads)

    @property
    def lost(self) -> int:
        return sum(self.ends.values()) - self.ends["ok"]

    def _call_until_stopped(self, caller: int) -> None:
        count = 0
        while not self._stop.is_set():
            begin = time.monotonic()
            end, begun, pause = self._call(QUESTIONS[(caller + self.callers * count) % len(QUESTIONS)])
            with self._guard:
                self.ends[end] += 1
                self.begun[end] += begun
                self.longest, self.pause = max(self.longest, time.monotonic() - begin), max(self.pause, pause)
            count += 1
            time.sleep(self.rest if end == "ok" else 0.2)

    def _call(self, question: str) -> tuple[str, bool, float]:
        """Make one call. Returns how it ended, whether it had streamed text, and its longest pause in seconds."""
        begun, pause, last, finish = False, 0.0, time.monotonic(), None
        try:
            for chunk in ask(self.client(), self.model, question, max_tokens=60, temperature=1.0):
                now = time.monotonic()
                pause, last = max(pause, now - last), now
                begun = begun or any(choice.delta.content for choice in chunk.choices)
                finish = chunk.choices[0].finish_reason or finish if chunk.choices else finish
            return ("ok" if finish else "ended without a finish reason"), begun, pause
        except openai.APIStatusError as error:
            return f"HTTP {error.status_code}", begun, pause
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:60]}", begun, pause


def ask(client: openai.OpenAI, model: str, question: str, **settings):
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(
        model=model, messages=messages, stream=True, stream_options={"include_usage": True}, **settings
    )
