"""OpenAI's API over HTTP, beside gRPC: routes, tokens, how a body is read, how a call ends. Knows nothing about what
bodies mean."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from services.backend import Unavailable
from services.errors import DeadlineExceeded, SlowReader, TooLarge, Unauthenticated, status_of
from services.gateway.answering import Answering
from services.gateway.calls import Tally
from services.gateway.connections import Connections
from services.gateway.limits import Places, Turns
from services.gateway.replies import Reply, answered, requests_of
from services.metrics.metrics import Metrics
from services.openai import answers
from services.openai.document import parse
from services.openai.errors import BadRequest, refusal
from services.openai.requests import CHAT, COMPLETIONS, Asked, understood
from services.security import bearer_token, caller_with, is_known, server_context
from smc.scheduler.admission import check_waiting

HEALTH, METRICS, MODELS = "/health", "/metrics", "/v1/models"

logger = logging.getLogger(__name__)
_library_logger = logging.getLogger(f"{__name__}.library")
# Anybody can send bytes that are no HTTP; each would be a traceback in the log.
_library_logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))


class HttpEdge:
    """Use it in one asyncio loop: `start`, at the end `close` and `stop`."""

    def __init__(
        self,
        answering: Answering,
        places: Places,
        turns: Turns,
        metrics: Metrics,
    ) -> None:
        self._config, self._answering, self._calls, self._metrics = (
            answering.config,
            answering,
            answering.calls,
            metrics,
        )
        self._places, self._turns = places, turns
        config, pair = answering.config, answering.pair
        self._tokens = config.tokens()
        self._limit = config.message_bytes(pair.context)
        self._names = config.served_model_names or (pair.target.name,)
        self._began = int(time.time())
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._connections: Connections | None = None
        """There when the first request comes, as is the server they are of."""

    async def start(self) -> int:
        """Listen. Returns the bound port. Raises OSError if it cannot be had."""
        config = self._config
        app = web.Application(middlewares=[self._guarded], client_max_size=self._limit)
        app.router.add_get(HEALTH, self._health)
        app.router.add_get(METRICS, self._scrape)
        app.router.add_get(MODELS, self._list_models)
        app.router.add_get(MODELS + "/{name:.+}", self._show_model)
        app.router.add_post(CHAT, self._generate)
        app.router.add_post(COMPLETIONS, self._generate)
        self._runner = web.AppRunner(
            app,
            handle_signals=False,
            access_log=None,
            logger=_library_logger,
            # A caller that leaves ends its call.
            handler_cancellation=True,
            # What is packed may be a thousand times larger than the limit.
            auto_decompress=False,
            keepalive_timeout=config.keepalive_time,
            shutdown_timeout=0.0,
            # For what a caller still sends of a body that is refused, so that it reads why.
            lingering_time=2.0,
        )
        await self._runner.setup()
        context = server_context(*config.tls) if config.tls else None
        host = config.host.strip("[]")
        self._site = web.TCPSite(self._runner, host, config.http_port, ssl_context=context)
        try:
            await self._site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise OSError(
                f"cannot listen on {host}:{config.http_port}: {error.strerror}; give another http_port, or 0 for any"
            ) from error
        assert self._runner.server is not None
        self._connections = Connections(self._runner.server, config.write_timeout, config.max_connection_age)
        port = self._runner.addresses[0][1]
        logger.info("OpenAI's API on %s:%d%s", host, port, " with TLS" if context else "")
        return port

    async def close(self) -> None:
        """Take no connection any more; those that there are go on."""
        if self._site is not None:
            site, self._site = self._site, None
            await site.stop()

    async def stop(self) -> None:
        """End every connection."""
        await self.close()
        if self._connections is not None:
            self._connections.close()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        """Lets in who may come in; what goes wrong is said in OpenAI's shape."""
        assert self._connections is not None
        self._connections.asks(request.protocol)
        try:
            if self._tokens and request.path != HEALTH and not is_known(_token(request), self._tokens):
                self._metrics.request_rejected("UNAUTHENTICATED", "unauthenticated")
                raise Unauthenticated("a valid token is needed; send the header `authorization: Bearer TOKEN`")
            response = await handler(request)
        except web.HTTPException as error:
            response = _refused(
                BadRequest(f"{request.method} {request.path}: {error.reason.lower()}", None, error.status, "not_found")
            )
            response.headers.extend({name: value for name, value in error.headers.items() if name == "Allow"})
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if status_of(error).cause == "internal":
                logger.error("unexpected error", exc_info=error)
            response = _refused(error)
        return response if response.prepared else await self._written(response, request)

    async def _written(self, response: web.StreamResponse, request: web.Request) -> web.StreamResponse:
        """As far as the caller reads it in time."""
        if self._is_last(request):
            response.force_close()
        try:
            async with asyncio.timeout(self._config.write_timeout):
                await response.prepare(request)
                await response.write_eof()
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        return response

    def _is_last(self, request: web.Request) -> bool:
        """Its connection takes no more."""
        assert self._connections is not None
        return self._calls.closed is not None or self._connections.is_old(request.protocol)

    async def _health(self, request: web.Request) -> web.Response:
        if self._calls.closed is not None:
            raise Unavailable(self._calls.closed)
        return web.json_response({"status": "serving"})

    async def _scrape(self, request: web.Request) -> web.Response:
        text = await asyncio.to_thread(self._metrics.exposition)
        return web.Response(body=text, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _list_models(self, request: web.Request) -> web.Response:
        pair = self._answering.pair
        return web.json_response(answers.models(self._names, self._began, pair.context, pair.target.weights))

    async def _show_model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._names:
            raise BadRequest(
                f"model={name!r}; allowed: {', '.join(map(repr, self._names))}", "model", 404, "model_not_found"
            )
        pair = self._answering.pair
        return web.json_response(answers.model(name, self._names[0], self._began, pair.context, pair.target.weights))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        tallies = [self._calls.arrives(f"POST {request.path}", request.headers.items())]
        reply = Reply(request, self._config.write_timeout, lambda: self._is_last(request))
        try:
            with self._places.taken():
                asked = await self._read(request)
                return await self._within(asked, request, tallies, reply)
        except asyncio.CancelledError:
            _each_left(tallies, deadline=False)
            raise
        except ConnectionError:  # it left while something was written
            _each_left(tallies, deadline=False)
            return reply.abandon()
        except DeadlineExceeded as error:
            _each_left(tallies, deadline=True)
            return await reply.refuse(refusal(error))
        except Exception as error:
            status = status_of(error)
            if status.cause == "internal":
                logger.error("unexpected error", exc_info=error)
            for tally in tallies:
                tally.failed(status, error)
            return reply.abandon() if isinstance(error, SlowReader) else await reply.refuse(refusal(error))

    async def _read(self, request: web.Request) -> Asked:
        """The body, understood. Raises BadRequest, TooLarge, SlowSender, QueueFull."""
        if request.content_type != "application/json":
            # What other pages can make a browser send is none of this.
            raise BadRequest(f"content-type={request.content_type!r}; allowed: application/json", None, 415)
        if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
            raise BadRequest(f"content-encoding={encoding!r}; allowed: none", None, 415)
        too_large = TooLarge(f"the body has more than {self._limit} bytes, as many as are allowed")
        if (request.content_length or 0) > self._limit:
            raise too_large
        try:
            async with self._turns.let_in():
                data = await self._turns.arrived(request.read())
                return await self._turns.read(data, lambda data: self._understood(data, request.path == CHAT))
        except web.HTTPRequestEntityTooLarge as error:
            raise too_large from error
        except web.RequestPayloadError as error:
            raise BadRequest(f"the body cannot be read: {error}") from error

    def _understood(self, data: bytes, chat: bool) -> Asked:
        try:
            document = parse(data)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        return understood(document, chat, self._names, self._answering.pair.tokenizer.size, self._config.method)

    async def _within(
        self, asked: Asked, request: web.Request, tallies: list[Tally], reply: Reply
    ) -> web.StreamResponse:
        """Raises DeadlineExceeded where the caller's time is over."""
        request_id = asked.request_id or uuid.uuid4().hex
        reply.headers["x-request-id"] = request_id
        tallies[0].is_of(request_id)
        left = None if asked.timeout is None else max(0.0, asked.timeout - tallies[0].seconds)
        try:
            async with asyncio.timeout(left) as deadline, self._calls.enter((caller_with(_token(request)), request_id)):
                return await self._decode(asked, request_id, tallies, reply)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(
                f"timeout={asked.timeout:g} s is over; nothing of the call is left behind"
            ) from error

    async def _decode(self, asked: Asked, request_id: str, tallies: list[Tally], reply: Reply) -> web.StreamResponse:
        check_waiting(self._answering.pair.engine, self._answering.status().queued)
        try:
            requests = await requests_of(asked, request_id, self._answering)
            tallies.extend(tallies[0].another() for _ in requests[1:])
            heading = answers.Heading(request_id, int(time.time()), self._names[0], asked.chat)
            return await answered(asked, requests, heading, self._answering, tallies, reply)
        except ValueError as error:
            raise asked.named(error) from error


def _token(request: web.Request) -> str:
    return bearer_token(request.headers.get("authorization", ""))


def _refused(error: Exception) -> web.Response:
    said = refusal(error)
    return web.json_response(said.body, status=said.http_status, headers=said.headers)


def _each_left(tallies: list[Tally], deadline: bool) -> None:
    for tally in tallies:
        tally.left(deadline)
