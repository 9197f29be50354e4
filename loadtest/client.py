"""A request as planned and its record, and the client that sends it: address of the service, credentials and
connections. Knows nothing about when requests are sent. Times are seconds since the start of the run."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from services.client import Client, ModelInfo, Prompt, ServerInfo, ServiceError
from services.client.client import channel_credentials, set_prompt
from services.pb import generation_pb2 as pb
from services.pb import generation_pb2_grpc as pb_grpc
from services.protobuf.generation import FINISH_REASONS, data_of, name_of, sampling_message
from smc.api.request import Statistics

ABORT_TIMEOUT = 10.0
WAIT_EVERY = 0.5
"""Seconds between two health checks of a service that is starting."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request of the plan. It depends only on the seed of the run and the request's number."""

    index: int
    at: float
    """Time at which it is to be sent."""
    counted: bool
    """Whether the request counts; False: it only warms up the service."""
    prompt: Prompt
    sampling: dict[str, Any]
    cancel_after: float | None = None
    """Seconds after which the client cancels."""
    cancel_after_tokens: int | None = None
    abort: bool = False
    """Whether to cancel by a call of Abort instead of closing the stream."""
    pause: float = 0.0
    """Seconds that a slow reader waits before it reads the next message."""

    @property
    def ordinary(self) -> bool:
        """Whether its client waits for the end and reads as fast as it can. Only then are latencies those of the
        service."""
        return self.cancel_after is None and self.cancel_after_tokens is None and not self.pause


@dataclass(slots=True)
class RequestRecord:
    planned: PlannedRequest
    sent_at: float = 0.0
    message_times: list[float] = field(default_factory=list)
    """Times of the messages that brought tokens."""
    message_tokens: list[int] = field(default_factory=list)
    ended_at: float = 0.0
    code: str = ""
    """gRPC status code."""
    detail: str = ""
    cancelled: bool = False
    """Whether this client cancelled the request, as planned."""
    finish_reason: str = ""
    prompt_tokens: int = 0
    """Number of prompt tokens, which the service counts; 0 without an answer."""
    statistics: Statistics | None = None
    """None: there is no answer, or one of plain decoding."""

    @property
    def answered(self) -> bool:
        return self.code == "OK"

    @property
    def failed(self) -> bool:
        """Whether the request was neither answered nor cancelled by this client."""
        return not self.answered and not self.cancelled

    @property
    def lateness(self) -> float:
        """Seconds by which the generator sent the request too late."""
        return self.sent_at - self.planned.at

    @property
    def tokens(self) -> int:
        return sum(self.message_tokens)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first message with tokens; None if there was none."""
        return self.message_times[0] - self.sent_at if self.message_times else None

    @property
    def itls(self) -> list[float]:
        """Seconds between successive messages with tokens; a message may bring several tokens."""
        return [later - earlier for earlier, later in zip(self.message_times, self.message_times[1:])]

    @property
    def e2el(self) -> float:
        """Seconds from sending to the end of the stream."""
        return self.ended_at - self.sent_at

    @property
    def tpot(self) -> float:
        """(E2E - TTFT) / (tokens - 1); 0 for an answer of one token, as in vLLM."""
        return (self.e2el - self.ttft) / (self.tokens - 1) if self.ttft is not None and self.tokens > 1 else 0.0


class ServiceUnreachable(RuntimeError):
    """No service answers at the address."""


@dataclass(frozen=True)
class ServiceEndpoint:
    address: str
    token: str | None = None
    tls: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None

    def client(self) -> Client:
        """Create a client. Raises ValueError for options that do not go together."""
        return Client(
            self.address,
            token=self.token,
            tls=self.tls,
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
        )

    def wait(self, seconds: float) -> None:
        """Wait until the service is SERVING, or returns an error that waiting does not change. Raises
        ServiceUnreachable after `seconds`."""
        end = time.monotonic() + seconds
        while True:
            with self.client() as client:  # a new one each time, because gRPC retries an address less and less often
                try:
                    state = client.health()
                except ServiceError as error:
                    if error.code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                        return
                    state = str(error)
            if state == "SERVING":
                return
            if time.monotonic() > end:
                raise ServiceUnreachable(f"no service at {self.address} within {seconds:g} s: {state}")
            time.sleep(WAIT_EVERY)

    def describe(self) -> tuple[ServerInfo, ModelInfo]:
        """Ask the service about itself and its models. Raises ServiceUnreachable if it does not serve, and ValueError
        if it refuses the credentials."""
        with self.client() as client:
            try:
                server, models = client.server_info(), client.model_info()
            except ServiceError as error:
                if error.code is grpc.StatusCode.UNAUTHENTICATED:
                    raise ValueError(
                        f"{self.address} refused the credentials: {error.message}; give --token-file"
                    ) from error
                raise ServiceUnreachable(f"no service at {self.address}: {error}") from error
        if not server.serving:
            raise ServiceUnreachable(
                f"the service at {self.address} is not serving: it is starting or shutting down; try again later"
            )
        return server, models

    def channel(self) -> grpc.aio.Channel:
        """Create a channel with a connection of its own; by default, channels to one address share a connection."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        credentials = channel_credentials(self.tls, self.tls_ca, self.tls_cert, self.tls_key)
        if credentials is None:
            return grpc.aio.insecure_channel(self.address, options)
        return grpc.aio.secure_channel(self.address, credentials, options)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)


class ClientConnections:
    """Open connections to the service. Use it in one asyncio loop, with `async with`."""

    def __init__(self, endpoint: ServiceEndpoint, count: int) -> None:
        self._metadata = endpoint.metadata
        self._channels = [endpoint.channel() for _ in range(count)]
        self._run = uuid.uuid4().hex[:8]
        self._aborts: set[asyncio.Task] = set()
        self._stubs = [pb_grpc.GenerationServiceStub(channel) for channel in self._channels]

    async def __aenter__(self) -> ClientConnections:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()

    async def connect(self, timeout: float) -> None:
        """Connect in advance, so that no request pays for a handshake. Raises ServiceUnreachable."""
        try:
            async with asyncio.timeout(timeout):
                for channel in self._channels:
                    await channel.channel_ready()
        except TimeoutError as error:
            raise ServiceUnreachable(
                f"the service did not accept {len(self._channels)} connections within {timeout:g} s"
            ) from error

    async def server_info(self, timeout: float) -> pb.GetServerInfoResponse:
        """Call GetServerInfo. Raises grpc.RpcError."""
        return await self._stubs[0].GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout, metadata=self._metadata)

    async def ask(self, planned: PlannedRequest, deadline: float, clock: Callable[[], float]) -> RequestRecord:
        """Send one request and read its stream to the end. Returns the record, also of requests that failed or were
        cancelled. `clock`: seconds since the start of the run."""
        message = _message(planned, f"loadtest-{self._run}-{planned.index}")
        record = RequestRecord(planned, sent_at=clock())
        stub = self._stubs[planned.index % len(self._stubs)]
        call = stub.Generate(message, timeout=deadline, metadata=self._metadata)
        cancel = partial(self._abort, stub, message.request_id) if planned.abort else call.cancel
        timer = None
        if planned.cancel_after is not None:
            timer = asyncio.get_running_loop().call_later(planned.cancel_after, cancel)
        try:
            await _follow(call, record, clock, cancel)
        except grpc.RpcError as error:
            record.code, record.detail = error.code().name, error.details() or ""
            record.cancelled = planned.abort and error.code() is grpc.StatusCode.CANCELLED
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not call.cancelled() or (task is not None and task.cancelling()):  # this task itself is cancelled
                call.cancel()
                raise
            record.code, record.cancelled = "CANCELLED", True
        finally:
            if timer is not None:
                timer.cancel()
        record.ended_at = clock()
        return record

    def _abort(self, stub: pb_grpc.GenerationServiceStub, request_id: str) -> None:
        """Call Abort without waiting; the stream reports the result."""
        task = asyncio.ensure_future(
            stub.Abort(pb.AbortRequest(request_id=request_id), timeout=ABORT_TIMEOUT, metadata=self._metadata)
        )
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


async def _follow(call: Any, record: RequestRecord, clock: Callable[[], float], cancel: Callable[[], object]) -> None:
    planned = record.planned
    async for response in call:
        now = clock()
        if response.token_ids:
            record.message_times.append(now)
            record.message_tokens.append(len(response.token_ids))
        if response.HasField("finish"):
            _finish(record, response.finish)
        elif planned.cancel_after_tokens is not None and record.tokens >= planned.cancel_after_tokens:
            cancel()
        elif planned.pause:
            await asyncio.sleep(planned.pause)
    if not record.answered:
        record.code, record.detail = "INTERNAL", "the stream ended before the answer did"


def _finish(record: RequestRecord, finish: pb.Finish) -> None:
    record.code = "OK"
    record.finish_reason = name_of(FINISH_REASONS, finish.reason, "finish.reason")
    record.prompt_tokens = finish.usage.prompt_tokens
    if finish.HasField("statistics"):
        record.statistics = data_of(Statistics, finish.statistics)


def _message(planned: PlannedRequest, request_id: str) -> pb.GenerateRequest:
    message = pb.GenerateRequest(request_id=request_id, sampling=sampling_message(planned.sampling))
    set_prompt(message, planned.prompt)
    return message
