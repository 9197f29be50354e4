"""The coordinator as a `services.backend.Backend`: requests go out on one stream, and the updates of every engine step
come back on it and are dispatched to the calls that wait for them.

On this stream the ids of requests are numbers; the ids that users gave stay in the gateway."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import Protocol

import grpc

from services.backend import RequestFailed, Unavailable
from services.coordinator.messages import REQUESTS, SERVICE, STEPS, Abort, EngineStep, Submission
from services.link.streams import OPTIONS, PROOF_KEY, proof
from smc.api.request import Answer, Output, Request

LARGE = 64 << 10
"""An update of at least this many bytes is decoded in a thread: it takes more than five milliseconds of a core."""
logger = logging.getLogger(__name__)


class SubmissionPort(Protocol):
    """Receives submissions and aborts. Neither call waits. `submit` may raise Unavailable; `abort` raises nothing."""

    def submit(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> None: ...


class Dispatcher:
    """A `services.backend.Backend` over a port. Everything happens in one asyncio loop."""

    def __init__(self, port: SubmissionPort) -> None:
        self._port = port
        self._numbers = itertools.count(1)
        self._calls: dict[str, _PendingUpdates] = {}

    @property
    def requests(self) -> list[Request]:
        """Requests of calls that have not ended."""
        return [call.request for call in self._calls.values()]

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """See `Backend.generate`. Updates that a slow caller has not taken are merged, so that they do not pile up."""
        inner, call = str(next(self._numbers)), _PendingUpdates(request)
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

    def deliver(self, step: EngineStep) -> None:
        """Dispatch the updates of an engine step to the calls that wait for them. Updates of calls that have ended are
        dropped."""
        for output in step.outputs:
            if (call := self._calls.get(output.request_id)) is not None:
                call.add(output)
        for refusal in step.refusals:
            if (call := self._calls.get(refusal.request_id)) is not None:
                call.fail(refusal.error)

    def fail_all(self, error: Exception) -> None:
        """End every call with this error."""
        for call in self._calls.values():
            call.fail(error)


class _PendingUpdates:
    """Updates of one request that its caller has not taken yet."""

    def __init__(self, request: Request) -> None:
        """`request`: with the caller's id, not with the number that the stream uses."""
        self.request = request
        self._update: Output | None = None
        self._error: Exception | None = None
        self._some = asyncio.Event()
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._texts: list[str] = []
        self._submitted = time.monotonic()
        self.ended = False
        """The caller has received the end of the request; there is nothing left to abort."""

    def add(self, output: Output) -> None:
        old = self._update
        if old is not None:
            output = replace(
                output,
                tokens=old.tokens + output.tokens,
                text=old.text + output.text,
                logprobs=old.logprobs + output.logprobs,
            )
        self._update = output
        self._some.set()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._some.set()

    async def next(self) -> Output:
        await self._some.wait()
        self._some.clear()
        output, self._update = self._update, None
        # A complete answer is delivered, even if the coordinator has been lost since.
        if output is None or (self._error is not None and output.answer is None):
            self.ended = True
            assert self._error is not None
            raise self._error
        self._tokens += output.tokens
        self._logprobs += output.logprobs
        self._texts.append(output.text)
        if output.answer is not None:
            self.ended = True
            if output.answer.error:
                raise self._failure(output.answer.error, output.answer.caller_error)
        return replace(output, request_id=self.request.request_id, answer=self._complete(output.answer))

    def _failure(self, why: str, caller_error: bool) -> Exception:
        """Return the error of a request that failed; it names the caller's own field."""
        constraint = self.request.params.constraint
        if not caller_error or constraint is None:
            return RequestFailed(why)
        return constraint.failed(why)

    def _complete(self, answer: Answer | None) -> Answer | None:
        """Add to the answer the tokens of earlier updates, and its seconds by this process's clock. Updates carry only
        new tokens, and clocks differ between processes: see `EngineStep.to_send`."""
        if answer is None:
            return None
        seconds = time.monotonic() - self._submitted if math.isnan(answer.seconds) else answer.seconds
        return replace(
            answer,
            request_id=self.request.request_id,
            tokens=tuple(self._tokens),
            text="".join(self._texts),
            logprobs=tuple(self._logprobs) or answer.logprobs,
            seconds=seconds,
        )


class CoordinatorClient(Dispatcher):
    """Dispatches the updates of the coordinator of one incarnation of the worker group, and is the port of its
    submissions. Use it in the asyncio loop that made it."""

    def __init__(
        self, address: str, secret: str, on_step: Callable[[EngineStep], None], on_lost: Callable[[], None]
    ) -> None:
        """`on_step` is called with every engine step, `on_lost` once the coordinator is lost."""
        super().__init__(port=self)
        self._on_step, self._on_lost = on_step, on_lost
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        """Messages to the coordinator; None ends the stream."""
        self.lost: Unavailable | None = None
        """Why the coordinator is lost; None: it is not."""
        self.interrupted: list[Request] = []
        """Requests that were in flight when the coordinator was lost."""
        self._channel = grpc.aio.insecure_channel(address, OPTIONS)
        attach = self._channel.stream_stream(f"/{SERVICE}/Attach")
        self._call = attach(self._messages(), metadata=((PROOF_KEY, proof(secret, address)),), wait_for_ready=True)
        self._reader = asyncio.create_task(self._read())

    async def attached(self, timeout: float) -> None:
        """Wait until the coordinator has accepted the stream. Raises Unavailable if it does not within `timeout`
        seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._call.initial_metadata()
        except TimeoutError as error:
            raise Unavailable(f"the coordinator did not answer within {timeout:g} s") from error
        if self.lost is not None:
            raise self.lost

    def submit(self, request: Request) -> None:
        if self.lost is not None:
            raise self.lost
        self._outbox.put_nowait(REQUESTS.encode(Submission(request)))

    def abort(self, request_id: str) -> None:
        self._outbox.put_nowait(REQUESTS.encode(Abort(request_id)))

    def fail(self, why: str) -> None:
        """End every call with UNAVAILABLE, and refuse later ones."""
        if self.lost is None:
            self.lost = Unavailable(why)
            self.interrupted = self.requests
            self.fail_all(self.lost)
            self._on_lost()

    async def close(self) -> None:
        self.fail("the service has stopped")
        self._outbox.put_nowait(None)
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._call.cancel()
        await self._channel.close()

    async def _messages(self) -> AsyncIterator[bytes]:
        while (message := await self._outbox.get()) is not None:
            yield message

    async def _read(self) -> None:
        try:
            async for response in self._call:
                if len(response) < LARGE:
                    step = STEPS.decode(response)
                else:
                    step = await asyncio.to_thread(STEPS.decode, response)
                self.deliver(step)
                self._on_step(step)
            self.fail("the coordinator has stopped; the service is starting again")
        except grpc.aio.AioRpcError as error:
            logger.warning("lost the coordinator: %s", error.details())
            self.fail("the coordinator is gone; the service is starting again")
        except Exception:  # a message that cannot be read must not leave callers waiting
            logger.exception("an update of the coordinator could not be read")
            self.fail("the coordinator is gone; the service is starting again")
