"""Runs an engine in a thread of its own: takes submissions and aborts from anywhere, delivers what each step brought.

Knows nothing about gRPC, Ray or asyncio.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from smc.engine.engine import Engine
from smc.engine.request import Output, Request
from smc.engine.stats import EngineStats


@dataclass(frozen=True)
class Step:
    """What one turn of the loop brought."""

    outputs: list[Output] = field(default_factory=list)
    refusals: dict[str, Exception] = field(default_factory=dict)
    """Why a submission was not taken (ValueError, QueueFull), by request id."""
    stats: EngineStats | None = None


class EngineLoop:
    """One engine, one thread. `deliver` is called in that thread after every turn that brought something."""

    def __init__(self, engine: Engine, deliver: Callable[[Step], None]) -> None:
        self._engine, self._deliver = engine, deliver
        self._inbox: queue.SimpleQueue[Request | str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failure: Exception | None = None
        """What ended the loop, if anything but `stop` did."""
        self.ended = threading.Event()

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Hand in a request; a refusal comes with the next step."""
        self._inbox.put(request)

    def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored. Its last Output says `cancelled`."""
        self._inbox.put(request_id)

    def stop(self, timeout: float = 10.0) -> None:
        """End the loop after the current step. What still runs is dropped."""
        self._inbox.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:  # whatever it is, requests must not wait for ever
            self.failure = error
        finally:
            self.ended.set()

    def _turn(self) -> bool:
        """Take what has come in, then advance the engine once. An idle engine waits for something to come. False: stop."""
        engine, refusals, submitted = self._engine, {}, False
        wait = engine.idle
        while wait or not self._inbox.empty():
            item, wait = self._inbox.get(), False
            if item is None:
                return False
            if isinstance(item, str):
                engine.abort(item)
                continue
            try:
                engine.submit(item)
                submitted = True
            except (ValueError, RuntimeError) as error:
                refusals[item.request_id] = error
        outputs = engine.step()
        if engine.idle:
            engine.check_books()
        if outputs or refusals or submitted or not engine.idle:
            self._deliver(Step(outputs, refusals, engine.take_stats()))
        return True
