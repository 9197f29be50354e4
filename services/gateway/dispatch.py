"""From a stream of steps back to single requests: each caller waits for its own news only.

Request ids inside are numbers of our own: what users call their requests is their business.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Protocol

from services.backend import RequestFailed
from services.step import Step
from smc.api.outputs import Answer, Output
from smc.api.request import Request


class Port(Protocol):
    """Where submissions and aborts go. Neither waits; only `submit` may raise, Unavailable."""

    def submit(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> None: ...


class Dispatcher:
    """A `services.backend.Backend` over a port. Everything happens in one asyncio loop."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._numbers = itertools.count(1)
        self._calls: dict[str, _Call] = {}

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def requests(self) -> list[Request]:
        """Of calls that have not ended."""
        return [call.request for call in self._calls.values()]

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """See `Backend.generate`. News that the caller is too slow for is put together, so it never piles up."""
        inner, call = str(next(self._numbers)), _Call(request)
        self._calls[inner] = call
        try:
            call.ended = True
            self._port.submit(replace(request, request_id=inner))
            call.ended = False
            while not call.ended:
                yield await call.next()
        finally:
            del self._calls[inner]
            if not call.ended:
                self._port.abort(inner)

    def deliver(self, step: Step) -> None:
        """Hand a step's news to those who wait for it. Calls that have ended are not missed."""
        for output in step.outputs:
            if (call := self._calls.get(output.request_id)) is not None:
                call.add(output)
        for request_id, error in step.refusals.items():
            if (call := self._calls.get(request_id)) is not None:
                call.fail(error)

    def fail_all(self, error: Exception) -> None:
        """End every call with this error."""
        for call in self._calls.values():
            call.fail(error)


class _Call:
    """News of one request that its caller has not taken yet."""

    def __init__(self, request: Request) -> None:
        """`request`: as the caller knows it."""
        self.request = request
        self._news: Output | None = None
        self._error: Exception | None = None
        self._some = asyncio.Event()
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._submitted = time.monotonic()
        self.ended = False
        """The caller has been told how it ended; nothing is left to abort."""

    def add(self, output: Output) -> None:
        old = self._news
        if old is not None:
            output = replace(output, tokens=old.tokens + output.tokens, text=old.text + output.text)
        self._news = output
        self._some.set()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._some.set()

    async def next(self) -> Output:
        await self._some.wait()
        self._some.clear()
        output, self._news = self._news, None
        # What is complete is the caller's, whatever has become since of those who made it.
        if output is None or (self._error is not None and output.answer is None):
            self.ended = True
            assert self._error is not None
            raise self._error
        self._tokens += output.tokens
        self._texts.append(output.text)
        if output.answer is not None:
            self.ended = True
            if output.answer.error:
                raise RequestFailed(output.answer.error)
        return replace(output, request_id=self.request.request_id, answer=self._complete(output.answer))

    def _complete(self, answer: Answer | None) -> Answer | None:
        """News from another process says nothing twice, and its clock is not ours: see
        `services.wire.generation.from_update`."""
        if answer is None:
            return None
        seconds = time.monotonic() - self._submitted if math.isnan(answer.seconds) else answer.seconds
        return replace(
            answer,
            request_id=self.request.request_id,
            tokens=tuple(self._tokens),
            text="".join(self._texts),
            seconds=seconds,
        )
