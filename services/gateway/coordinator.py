"""The coordinator as the gateway sees it: submissions go out on one stream, the news of every step comes back on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import grpc

from services.backend import Unavailable
from services.gateway.dispatch import Dispatcher
from services.link.streams import OPTIONS, PROOF_KEY, proof
from services.pb import coordinator_pb2 as pb
from services.pb import coordinator_pb2_grpc as pb_grpc
from services.step import Step
from services.wire.generation import from_sampling
from services.wire.steps import from_response
from smc.api.outputs import Output
from smc.api.request import Request

logger = logging.getLogger(__name__)


class _Outbox:
    """What goes to the coordinator: the dispatcher's port."""

    def __init__(self) -> None:
        self.lost: Unavailable | None = None
        self._queue: asyncio.Queue[pb.AttachRequest | None] = asyncio.Queue()

    def submit(self, request: Request) -> None:
        if self.lost is not None:
            raise self.lost
        submission = pb.Submission(
            request_id=request.request_id,
            prompt=request.prompt,
            **from_sampling(request.params),
            cache_salt=request.cache_salt,
            waited=request.waited,
            negative_prompt=request.negative_prompt or (),
        )
        self._queue.put_nowait(pb.AttachRequest(submit=submission))

    def abort(self, request_id: str) -> None:
        self._queue.put_nowait(pb.AttachRequest(abort=request_id))

    def close(self) -> None:
        self._queue.put_nowait(None)

    async def requests(self) -> AsyncIterator[pb.AttachRequest]:
        while (request := await self._queue.get()) is not None:
            yield request


class CoordinatorClient:
    """A `services.backend.Backend` for one life of the gang. Use it in the asyncio loop that made it."""

    def __init__(self, address: str, secret: str, on_step: Callable[[Step], None], on_lost: Callable[[], None]) -> None:
        """`on_step` is told of every step of the engine, `on_lost` once, when it is gone."""
        self._on_step, self._on_lost, self._outbox = on_step, on_lost, _Outbox()
        self._dispatcher = Dispatcher(self._outbox)
        self.interrupted: list[Request] = []
        """Requests that were in flight when it was lost."""
        self._channel = grpc.aio.insecure_channel(address, OPTIONS)
        stub = pb_grpc.CoordinatorServiceStub(self._channel)
        self._call = stub.Attach(
            self._outbox.requests(), metadata=((PROOF_KEY, proof(secret, address)),), wait_for_ready=True
        )
        self._reader = asyncio.create_task(self._read())

    async def attached(self, timeout: float) -> None:
        """Until the coordinator has taken the stream up. Raises Unavailable if it does not within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._call.initial_metadata()
        except TimeoutError as error:
            raise Unavailable(f"the coordinator did not answer within {timeout:g} s") from error
        if self._outbox.lost is not None:
            raise self._outbox.lost

    @property
    def lost(self) -> bool:
        return self._outbox.lost is not None

    @property
    def num_calls(self) -> int:
        return self._dispatcher.num_calls

    @property
    def requests(self) -> list[Request]:
        """In flight."""
        return self._dispatcher.requests

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        return self._dispatcher.generate(request)

    def fail(self, why: str) -> None:
        """End every call with UNAVAILABLE, and refuse later ones."""
        if self._outbox.lost is None:
            self._outbox.lost = Unavailable(why)
            self.interrupted = self._dispatcher.requests
            self._dispatcher.fail_all(self._outbox.lost)
            self._on_lost()

    async def close(self) -> None:
        self.fail("the service has stopped")
        self._outbox.close()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._call.cancel()
        await self._channel.close()

    async def _read(self) -> None:
        try:
            async for response in self._call:
                step = from_response(response)
                self._dispatcher.deliver(step)
                self._on_step(step)
            self.fail("the coordinator has stopped; the service is starting again")
        except grpc.aio.AioRpcError as error:
            logger.warning("lost the coordinator: %s", error.details())
            self.fail("the coordinator is gone; the service is starting again")
        except asyncio.CancelledError:
            raise
        except Exception:  # a message that cannot be read must not leave callers waiting
            logger.exception("the coordinator's news could not be read")
            self.fail("the coordinator is gone; the service is starting again")
