"""OpenAI's API over HTTP: connections, routes, authentication, and one call from its body to the last byte of its
response. Knows nothing about the fields of a body."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from services.backend import Unavailable
from services.errors import DeadlineExceeded, HostNotAllowed, SlowReader, TooLarge, Unauthenticated, status_of
from services.gateway.request_handler import ApiServer, CallRecord, RequestHandler
from services.openai import pages
from services.openai.bodies import BadRequest, BodyTooLarge, Refusal, UnknownFields, check_model, named, parse, refusal
from services.openai.dialects import COMPLETION_DIALECTS, ApiCall, Dialect
from services.openai.messages import Reasoning
from services.openai.messages_api import (
    COUNT_TOKENS,
    MESSAGES,
    VERSION_HEADER,
    MessagesDialect,
    described_model,
    listed_models,
)
from services.openai.pages import DOCS, OPENAPI, Playground
from services.openai.requests import LONGEST, CompletionRequest, Served
from services.openai.responses import ResponseHeader
from services.openai.responses_api import RESPONSES, ResponsesDialect
from services.openai.tokenization import DETOKENIZE, TOKENIZE, detokenize, tokenize
from services.security import bearer_token, caller_with, server_context
from smc.api.limits import DEFAULT_MAX_TOKENS, PromptTooLong
from smc.api.request import Answer, Request
from smc.scheduler.admission import check_waiting

SWEEP_SECONDS = 0.5
SERVER = "smcserve"
"""Header `server` of all replies: the library's own would name versions."""
CODES = {404: "not_found", 405: "method_not_allowed"}
"""Codes of errors that the library's router raises."""
T = TypeVar("T")
CORS_HEADERS = "authorization, content-type, x-api-key, anthropic-version"
"""Headers that pages of other origins may send, besides those that every page may send."""
CORS_SECONDS = 3600
"""Seconds for which a browser may keep the reply to a preflight request."""
logger = logging.getLogger(__name__)


class HttpConnections:
    """Closes connections that bring no request, or that do not close in time, and tells which are old. Use it in one
    asyncio loop."""

    def __init__(self, server: web.Server, silence: float, age: float) -> None:
        """`silence`: seconds within which the headers of a new connection's first request must arrive, and within which
        a closing connection must be closed; `age`: seconds after which a connection is old."""
        self._server, self._silence, self._age = server, silence, age
        self._loop = asyncio.get_running_loop()
        self._since: dict[web.RequestHandler, float] = {}
        self._heard: set[web.RequestHandler] = set()
        self._transports: dict[web.RequestHandler, asyncio.Transport] = {}
        self._closing: dict[web.RequestHandler, float] = {}
        self._next = self._loop.call_later(SWEEP_SECONDS, self._sweep)

    def close(self) -> None:
        self._next.cancel()

    def asks(self, connection: web.RequestHandler) -> None:
        """Record that a request has come over this connection."""
        self._heard.add(connection)
        self._since.setdefault(connection, self._loop.time())
        if connection.transport is not None:
            self._transports[connection] = connection.transport

    def is_old(self, connection: web.RequestHandler) -> bool:
        """Return whether the client should open a new connection, maybe to a newer replica."""
        return self._loop.time() - self._since.get(connection, self._loop.time()) >= self._age

    def _sweep(self) -> None:
        now, there = self._loop.time(), set(self._server.connections)
        self._since = {connection: self._since.get(connection, now) for connection in there}
        self._heard &= there
        for connection in there - self._heard:
            if now - self._since[connection] > self._silence:
                connection.force_close()
        self._transports = {
            connection: transport for connection, transport in self._transports.items() if connection in there
        }
        closing = [connection for connection, transport in self._transports.items() if transport.is_closing()]
        self._closing = {connection: self._closing.get(connection, now) for connection in closing}
        for connection, since in self._closing.items():
            if now - since > self._silence:
                self._transports[connection].abort()
        self._next = self._loop.call_later(SWEEP_SECONDS, self._sweep)


class HttpReply:
    """The response to a caller: an answer, or a stream of events. Nothing is sent before the answer, or the first
    event, exists."""

    def __init__(
        self, request: web.Request, timeout: float, is_last: Callable[[], bool], id_headers: Sequence[str]
    ) -> None:
        """`timeout`: seconds that the caller may let a write wait. `is_last`: returns whether the connection is to end
        with this reply. `id_headers`: headers that hold the call's id."""
        self._request, self._timeout, self._is_last, self._id_headers = request, timeout, is_last, id_headers
        self.request_id = uuid.uuid4().hex
        """Id of the call; a body may bring another one."""
        self.error_event: Callable[[dict[str, Any]], bytes] | None = None
        """Returns the event of a refusal's body, for a stream."""
        self.stream: web.StreamResponse | None = None
        """The response; None until something is sent."""

    @property
    def _begun(self) -> web.StreamResponse:
        assert self.stream is not None
        return self.stream

    async def send(self, data: bytes) -> None:
        """Send events, if `data` has any. Raises SlowReader, and ConnectionError if the caller is gone."""
        if not data:
            return
        async with self._in_time():
            if self.stream is None:
                await self._begin(
                    200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
                )
            await self._begun.write(data)

    async def end(self) -> web.StreamResponse:
        """End the stream, after the last event. Raises what `send` raises."""
        async with self._in_time():
            await self._begun.write_eof()
        return self._begun

    async def whole(
        self, data: bytes, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})
    ) -> web.StreamResponse:
        """Send a JSON document as the whole reply. Raises what `send` raises."""
        async with self._in_time():
            await self._begin(
                status, {"content-type": "application/json; charset=utf-8", "content-length": str(len(data)), **headers}
            )
            await self._begun.write(data)
            await self._begun.write_eof()
        return self._begun

    async def refuse(self, refusal: Refusal) -> web.StreamResponse:
        """Send a refusal instead of the answer, or of the rest of the stream, as far as the caller reads it."""
        try:
            if self.stream is None:
                return await self.whole(json.dumps(refusal.body).encode(), refusal.http_status, refusal.headers)
            assert self.error_event is not None, "nothing is sent before there is an answer"
            await self.send(self.error_event(refusal.body))
            return await self.end()
        except (SlowReader, ConnectionError):
            return self.abandon()

    def abandon(self) -> web.StreamResponse:
        """Send nothing more, and drop everything that the caller has not read."""
        if self._request.transport is not None:
            self._request.transport.abort()
        return self.stream or web.Response()

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        known = dict.fromkeys(self._id_headers, self.request_id)
        stream = web.StreamResponse(status=status, headers={**known, **headers})
        if self._is_last():
            stream.force_close()
        await stream.prepare(self._request)
        self.stream = stream

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError as error:
            raise SlowReader(
                f"the caller did not read for {self._timeout:g} s while an answer was sent; the request was aborted"
            ) from error


async def requests_of(completion: CompletionRequest, request_id: str, handler: RequestHandler) -> list[Request]:
    """Return one request for each answer. Raises QueueFull, and ValueError naming the field, the value and what is
    allowed."""
    requests, seeds = [], completion.seeds()
    negative = await handler.prompts.negative(completion.negative)
    for prompt in completion.prompts:
        tokens = await handler.prompts.tokens(prompt)
        completion = completion.after_reasoning(_reasoning(completion, tokens, handler))
        unlimited, sizes = completion.params(LONGEST, None), (len(tokens), len(negative or ()))
        if completion.chat:
            longest = handler.default_length(unlimited, *sizes)
        else:
            longest = min(DEFAULT_MAX_TOKENS, handler.longest(unlimited, *sizes))
        for number in range(completion.n):
            params = completion.params(longest, next(seeds), first=not number)
            salt, priority = completion.cache_salt, completion.priority
            requests.append(Request(request_id, tokens, params, salt, negative_prompt=negative, priority=priority))
    return requests


def _reasoning(completion: CompletionRequest, prompt: Sequence[int], handler: RequestHandler) -> Reasoning | None:
    """Return the reasoning that answers to a prompt are expected to begin with, if any."""
    return Reasoning.of(handler.pair.tokenizer, prompt) if completion.may_reason else None


async def answered(
    call: ApiCall,
    requests: list[Request],
    heading: ResponseHeader,
    handler: RequestHandler,
    records: list[CallRecord],
    reply: HttpReply,
) -> web.StreamResponse:
    """Decode all requests of a call and reply. At the end, also after an error, the backend's iterators are closed,
    which aborts requests that still run."""
    tokenizer, completion = handler.pair.tokenizer, call.completion
    reasoning = _reasoning(completion, requests[0].prompt, handler)
    writer = call.make_writer(heading, completion, requests, tokenizer, reasoning)
    reply.error_event = writer.error
    ended: dict[int, Answer] = {}
    async with aclosing(handler.updates(requests, records)) as updates:
        async for index, output in updates:
            if completion.stream:
                await reply.send(await _beside(partial(writer.update, index, output), [output.answer]))
            if output.answer is not None:
                ended[index] = output.answer
    answers = [ended[index] for index in range(len(requests))]
    if not completion.stream:
        return await reply.whole(await _beside(partial(writer.whole, answers), answers))
    await reply.send(await _beside(partial(writer.finish, answers)))
    return await reply.end()


async def _beside(write: Callable[[], bytes], answers: Iterable[Answer | None] = ()) -> bytes:
    """Return what `write` returns. If `answers` list likeliest tokens, writing them takes long, so it runs in a thread
    and does not block the loop. Raises NotWritten."""
    is_long = any(answer is not None and (answer.top_logprobs or answer.prompt_logprobs) for answer in answers)
    try:
        return await asyncio.to_thread(write) if is_long else write()
    except Exception as error:
        raise NotWritten("an answer cannot be written") from error


class NotWritten(RuntimeError):
    """An answer cannot be written. This is an internal error, never one of the caller."""


class _Connection(web.RequestHandler):
    """A connection that answers what is no HTTP by errors of this API."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # writes the log; raises if an answer has begun
        error: Exception = RuntimeError(message)
        if status < 500:
            error = BadRequest(f"the request cannot be read as HTTP: {' '.join(str(message).split())}", None, status)
        response = _refused(error, None)
        response.headers["server"] = SERVER
        response.force_close()
        return response


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Runner(web.AppRunner):
    """Runs an application whose connections are `_Connection`; the library has no option for that."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = _Server
        return server


async def _name_server(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["server"] = SERVER


HEALTH, PING, METRICS, MODELS, VERSION, LOAD = "/health", "/ping", "/metrics", "/v1/models", "/version", "/load"

DIALECTS: dict[str, Dialect] = {
    **COMPLETION_DIALECTS,
    RESPONSES: ResponsesDialect(),
    MESSAGES: MessagesDialect(),
    COUNT_TOKENS: MessagesDialect(),
}
"""Dialects of the APIs, by path."""

_library_logger = logging.getLogger(f"{__name__}.library")
# Without this, every request that is not HTTP would put a traceback into the log.
_library_logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))


def add_to(server: ApiServer) -> None:
    """Add these APIs to the gateway: see `services.gateway.request_handler.FrontEnd`."""
    if server.handler.config.http_port is not None:
        server.add_http_server(OpenAiServer(server))


class OpenAiServer:
    """The HTTP server. Use it in one asyncio loop: `start`, at the end `close` and `stop`."""

    def __init__(self, server: ApiServer) -> None:
        self._handler, self._metrics = server.handler, server.metrics
        self._config, self._calls = server.handler.config, server.handler.calls
        self._call_limit, self._receive_limit = server.call_limit, server.receive_limit
        config, pair = server.handler.config, server.handler.pair
        self._token_file, self._hosts = server.token_file, config.hosts()
        self._limit = config.message_bytes(pair.context)
        self._names = config.served_model_names or (pair.target.name,)
        unknown = UnknownFields() if config.unknown_fields == "ignore" else None
        self._served = Served(self._names, pair.tokenizer, config.method, pair.sampling, unknown, config.priorities)
        self._fingerprint = pair.fingerprint()
        self._page = Playground(server.handler, self._names) if config.page else None
        self._probed = {HEALTH, PING}
        """Paths of probes, which may use any host name and need no token."""
        self._public = {*self._probed, *(self._page.files if self._page else ())}
        """Paths that need no token."""
        self._describing = asyncio.Lock()
        self._description: Description | None = None
        """Written when it is first requested."""
        self._began = int(time.time())
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._connections: HttpConnections | None = None
        """The server's connections; set by `start` before the first request is handled."""

    async def start(self) -> int:
        """Listen. Returns the bound port. Raises OSError if it is not free."""
        config = self._config
        app = web.Application(middlewares=[self._guarded], client_max_size=self._limit)
        app.on_response_prepare.append(_name_server)
        if config.allow_origins:
            app.on_response_prepare.append(self._allow_origin)
        for path in (HEALTH, PING):
            app.router.add_get(path, self._health)
        app.router.add_post(PING, self._health)
        app.router.add_get(VERSION, self._version)
        app.router.add_get(LOAD, self._load)
        app.router.add_post(TOKENIZE, self._tokenize)
        app.router.add_post(DETOKENIZE, self._tokenize)
        app.router.add_get(METRICS, self._scrape)
        app.router.add_get(MODELS, self._list_models)
        app.router.add_get(MODELS + "/{name:.+}", self._show_model)
        if self._page is not None:
            self._page.add_to(app.router)
        app.router.add_get(OPENAPI, self._describe)
        app.router.add_get(DOCS, self._describe)
        for path in DIALECTS:
            app.router.add_post(path, self._count if path == COUNT_TOKENS else self._generate)
        self._runner = _Runner(
            app,
            handle_signals=False,
            access_log=None,
            logger=_library_logger,
            # A caller that leaves ends its call.
            handler_cancellation=True,
            # A compressed body may expand to a thousand times the limit.
            auto_decompress=False,
            keepalive_timeout=config.keepalive_time,
            shutdown_timeout=0.0,
            # Seconds for the caller to send the rest of a refused body, so that it reads the refusal.
            lingering_time=2.0,
        )
        await self._runner.setup()
        context = server_context(*config.tls) if config.tls else None
        host = config.host.strip("[]")
        site = web.TCPSite(self._runner, host, config.http_port, ssl_context=context)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise OSError(
                f"cannot listen on {host}:{config.http_port}: {error.strerror}; give another http_port, or 0 for any"
            ) from error
        self._site = site
        assert self._runner.server is not None
        self._connections = HttpConnections(self._runner.server, config.write_timeout, config.max_connection_age)
        port = self._runner.addresses[0][1]
        logger.info("OpenAI's API on %s:%d%s", host, port, " with TLS" if context else "")
        return port

    async def close(self) -> None:
        """Accept no more connections; open ones continue."""
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
        """Check the caller's token, and turn exceptions into errors in the format of the path's API."""
        assert self._connections is not None
        self._connections.asks(request.protocol)
        try:
            if request.path not in self._probed and (why := self._hosts.refusal(request.headers.getall("host", ()))):
                self._metrics.request_rejected("PERMISSION_DENIED", "host")
                raise HostNotAllowed(why)
            if request.method == "OPTIONS" and self._config.allow_origins:
                # A preflight request, which a browser sends before a page's own request, without a token.
                return await self._written(web.Response(status=204), request)
            tokens = None if request.path in self._public else self._token_file
            if tokens is not None and not tokens.knows(_token(request)):
                self._metrics.request_rejected("UNAUTHENTICATED", "unauthenticated")
                raise Unauthenticated(
                    "a valid token is needed; send the header `authorization: Bearer TOKEN`, or `x-api-key: TOKEN`"
                )
            response = await handler(request)
        except web.HTTPException as error:
            response = _refused(
                BadRequest(
                    f"{request.method} {request.path}: {error.reason.lower()}",
                    None,
                    error.status,
                    CODES.get(error.status),
                ),
                _dialect_of(request),
            )
            response.headers.extend({name: value for name, value in error.headers.items() if name == "Allow"})
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if status_of(error).cause == "internal":
                logger.error("unexpected error", exc_info=error)
            response = _refused(error, _dialect_of(request))
        return response if response.prepared else await self._written(response, request)

    async def _written(self, response: web.StreamResponse, request: web.Request) -> web.StreamResponse:
        """Send a response, as far as the caller reads it in time."""
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
        """Return whether the request's connection takes no further requests."""
        assert self._connections is not None
        return self._calls.closed is not None or self._connections.is_old(request.protocol)

    async def _health(self, request: web.Request) -> web.Response:
        if self._calls.closed is None:
            return web.json_response({"status": "serving"})
        refused, starting = refusal(Unavailable(self._calls.closed)), self._calls.starting
        state = {"status": "not serving"} if starting is None else {"status": "starting", **asdict(starting)}
        return web.json_response(state | refused.body, status=refused.http_status, headers=refused.headers)

    async def _allow_origin(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let pages of allowed origins read the response."""
        origin, allowed = request.headers.get("origin"), self._config.allow_origins
        response.headers["vary"] = "origin"
        if origin is None or not ("*" in allowed or origin in allowed):
            return
        response.headers["access-control-allow-origin"] = origin
        response.headers["access-control-expose-headers"] = "x-request-id"
        if request.method == "OPTIONS":
            response.headers["access-control-allow-methods"] = "GET, POST"
            response.headers["access-control-allow-headers"] = CORS_HEADERS
            response.headers["access-control-max-age"] = str(CORS_SECONDS)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": importlib.metadata.version("smcserve")})

    async def _load(self, request: web.Request) -> web.Response:
        status = self._handler.status()
        waiting, running = status.queued, status.running
        return web.json_response({"server_load": running + waiting, "running": running, "waiting": waiting})

    async def _tokenize(self, request: web.Request) -> web.Response:
        """Serve `/tokenize` and `/detokenize`."""
        with self._call_limit.taken():
            document = await self._read(request, parsed)
            if request.path == DETOKENIZE:
                return web.json_response(detokenize(document, self._names, self._handler))
            try:
                return web.json_response(await tokenize(document, self._names, self._handler))
            except PromptTooLong as error:
                raise named(error, frozenset(), "prompt") from error

    async def _count(self, request: web.Request) -> web.Response:
        """Count the tokens of a prompt."""
        with self._call_limit.taken():
            call = await self._read(request, lambda data: DIALECTS[COUNT_TOKENS].read(parsed(data), self._served))
            try:
                tokens = await self._handler.prompts.tokens(call.completion.prompts[0])
            except ValueError as error:
                raise call.named(error) from error
            return web.json_response({"input_tokens": len(tokens)})

    async def _scrape(self, request: web.Request) -> web.Response:
        text = await asyncio.to_thread(self._metrics.exposition)
        return web.Response(body=text, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _describe(self, request: web.Request) -> web.Response:
        """Serve the description of this port: `OPENAPI` for programs, `DOCS` for people."""
        async with self._describing:
            if self._description is None:
                routes = _routes(request.app)
                self._description = await asyncio.to_thread(Description.of, routes)
        if request.path == OPENAPI:
            return web.Response(body=self._description.document, content_type="application/json", charset="utf-8")
        return web.Response(text=self._description.page, content_type="text/html", headers=pages.DOCS_HEADERS)

    async def _list_models(self, request: web.Request) -> web.Response:
        if VERSION_HEADER in request.headers:
            context = self._handler.pair.context
            return web.json_response(listed_models(self._names, self._began, context, request.query))
        return web.json_response({"object": "list", "data": [self._model(name) for name in self._names]})

    async def _show_model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        check_model(name, self._names)
        if VERSION_HEADER in request.headers:
            return web.json_response(described_model(name, self._began, self._handler.pair.context))
        return web.json_response(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        """Return the description of the model under one of its names."""
        return {
            "id": name,
            "object": "model",
            "created": self._began,
            "owned_by": "smcserve",
            "root": self._names[0],
            "max_model_len": self._handler.pair.context,
            "weights": self._handler.pair.target.weights,
        }

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        dialect = DIALECTS[request.path]
        records = [self._calls.arrives(request.path, request.headers.items(), request.method)]
        reply = HttpReply(request, self._config.write_timeout, lambda: self._is_last(request), dialect.id_headers)
        records[0].is_of(reply.request_id)
        try:
            with self._call_limit.taken():
                call = await self._read(request, lambda data: dialect.read(parsed(data), self._served))
                return await self._within(call, request, records, reply)
        except asyncio.CancelledError:
            _each_left(records, deadline=False)
            raise
        except ConnectionError:  # the caller left during a write
            _each_left(records, deadline=False)
            return reply.abandon()
        except DeadlineExceeded as error:
            _each_left(records, deadline=True)
            return await reply.refuse(dialect.refusal(error, reply.request_id))
        except Exception as error:
            status = status_of(error)
            if status.cause == "internal":
                logger.error("unexpected error", exc_info=error)
            if isinstance(error, SlowReader):  # it is sent no error
                for record in records:
                    record.failed(status, error)
                return reply.abandon()
            refused = dialect.refusal(error, reply.request_id)
            for record in records:
                record.failed(status, error, refused.http_status if reply.stream is None else reply.stream.status)
            return await reply.refuse(refused)

    async def _read(self, request: web.Request, understand: Callable[[bytes], T]) -> T:
        """Return what `understand` makes of the body. Raises BadRequest, TooLarge, SlowSender, QueueFull, and what
        `understand` raises."""
        if request.content_type != "application/json":
            # Any web page can make a browser send other types without a preflight request.
            raise BadRequest(f"content-type={request.content_type!r}; allowed: application/json", None, 415)
        if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
            raise BadRequest(f"content-encoding={encoding!r}; allowed: none", None, 415)
        if self._config.max_message_bytes is None:
            prompt = DIALECTS[request.path].prompt if request.path in DIALECTS else "prompt"
            too_large: TooLarge = BodyTooLarge(self._limit, self._handler.pair.context, prompt)
        else:
            too_large = TooLarge(f"the body has more than {self._limit} bytes, which is the maximum")
        if (request.content_length or 0) > self._limit:
            raise too_large
        try:
            async with self._receive_limit.let_in():
                data = await self._receive_limit.arrived(request.read())
                return await self._receive_limit.read(data, understand)
        except web.HTTPRequestEntityTooLarge as error:
            raise too_large from error
        except web.RequestPayloadError as error:
            raise BadRequest(f"the body cannot be read: {error}") from error

    async def _within(
        self, call: ApiCall, request: web.Request, records: list[CallRecord], reply: HttpReply
    ) -> web.StreamResponse:
        """Serve a call within its own `timeout`. Raises DeadlineExceeded when it is over."""
        completion = call.completion
        reply.request_id = request_id = completion.request_id or reply.request_id
        records[0].is_of(request_id)
        left = None if completion.timeout is None else max(0.0, completion.timeout - records[0].seconds)
        try:
            async with asyncio.timeout(left) as deadline, self._calls.enter((caller_with(_token(request)), request_id)):
                return await self._decode(call, request_id, records, reply)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(f"timeout={completion.timeout:g} s is over; the call was aborted") from error

    async def _decode(
        self, call: ApiCall, request_id: str, records: list[CallRecord], reply: HttpReply
    ) -> web.StreamResponse:
        completion = call.completion
        check_waiting(self._handler.pair.engine, self._handler.status().queued)
        try:
            requests = await requests_of(completion, request_id, self._handler)
            records.extend(records[0].another() for _ in requests[1:])
            heading = ResponseHeader(request_id, int(time.time()), self._names[0], completion.chat, self._fingerprint)
            return await answered(call, requests, heading, self._handler, records, reply)
        except ValueError as error:
            raise call.named(error) from error


@dataclass(frozen=True)
class Description:
    """Description of everything that this port serves."""

    document: bytes
    """For programs: JSON."""
    page: str
    """For people: HTML."""

    @staticmethod
    def of(routes: Mapping[str, tuple[str, ...]]) -> Description:
        """Write the description. `routes`: methods by path. Takes a fifth of a second of a core."""
        described = pages.document(routes, importlib.metadata.version("smcserve"))
        return Description(json.dumps(described).encode(), pages.page(described))


def _routes(app: web.Application) -> dict[str, tuple[str, ...]]:
    """Return the methods by path, without the files of the web page."""
    routes: dict[str, tuple[str, ...]] = {}
    for route in app.router.routes():
        path = getattr(route.resource, "canonical", None)
        if path is not None and route.method != "HEAD" and not path.startswith("/page/"):
            routes[path] = (*routes.get(path, ()), route.method)
    return routes


def parsed(data: bytes) -> Any:
    """Return the JSON of a body. Raises BadRequest."""
    try:
        return parse(data)
    except ValueError as error:
        raise BadRequest(str(error)) from error


def _token(request: web.Request) -> str:
    """Return the bearer token, from the header that OpenAI's or Anthropic's clients send it in."""
    return bearer_token(request.headers.get("authorization", "")) or request.headers.get("x-api-key", "")


def _dialect_of(request: web.Request) -> Dialect | None:
    """Return the dialect of a path that belongs to one API."""
    is_of_messages = request.path.startswith(MODELS) and VERSION_HEADER in request.headers
    return DIALECTS.get(MESSAGES if is_of_messages else request.path)


def _refused(error: Exception, dialect: Dialect | None) -> web.Response:
    """Return the reply to a call that ends before its body is read, in the format of its API."""
    headers: dict[str, str] = {}
    if dialect is None:
        refused = refusal(error)
    else:
        request_id = uuid.uuid4().hex
        refused, headers = dialect.refusal(error, request_id), dict.fromkeys(dialect.id_headers, request_id)
    return web.json_response(refused.body, status=refused.http_status, headers=headers | refused.headers)


def _each_left(records: list[CallRecord], deadline: bool) -> None:
    for record in records:
        record.left(deadline)
