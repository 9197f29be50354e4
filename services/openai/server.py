"""The HTTP server: routes, authentication, and one call from its body to its answer. Knows nothing about the fields of
a body."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from services.backend import Unavailable
from services.errors import DeadlineExceeded, HostNotAllowed, SlowReader, TooLarge, Unauthenticated, status_of
from services.gateway.calls import CallRecord
from services.gateway.request_handler import ApiServer, converted
from services.openai import pages
from services.openai.anthropic import (
    COUNT_TOKENS,
    MESSAGES,
    VERSION_HEADER,
    MessagesDialect,
    described_model,
    listed_models,
)
from services.openai.bodies import BadRequest, BodyTooLarge, FieldNames, UnknownFields, check_model, parse, refusal
from services.openai.completions import COMPLETION_DIALECTS
from services.openai.connections import SERVER, HttpConnections, Runner, refused_reply
from services.openai.cors import allow_origin
from services.openai.dialects import AnsweredCall, AnswerHeading, ApiCall, Dialect
from services.openai.pages import DOCS, OPENAPI, Playground
from services.openai.reply import HttpReply
from services.openai.requests import CompletionRequest, Served
from services.openai.responses import RESPONSES, ResponsesDialect
from services.openai.tokenization import DETOKENIZE, TOKENIZE, detokenize, tokenize
from services.security import bearer_token, caller_with, server_context
from smc.api.limits import DEFAULT_MAX_TOKENS, PromptTooLong
from smc.api.request import Answer, Request
from smc.api.sampling_params import SamplingParams
from smc.scheduler.admission import check_waiting

CODES = {404: "not_found", 405: "method_not_allowed"}
"""Codes of errors that the library's router raises."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


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
        self._served = Served(
            self._names, pair.tokenizer, config.default_method, pair.sampling, unknown, config.priorities
        )
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
            app.on_response_prepare.append(partial(allow_origin, config.allow_origins))
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
        self._runner = Runner(
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
            response = refused_reply(
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
            response = refused_reply(error, _dialect_of(request))
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

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": importlib.metadata.version("smcserve")})

    async def _load(self, request: web.Request) -> web.Response:
        status = self._handler.status()
        waiting, running = status.queued, status.running
        groups = [group.document() for group in status.groups]
        load = {"server_load": running + waiting, "running": running, "waiting": waiting, "worker_groups": groups}
        return web.json_response(load)

    async def _tokenize(self, request: web.Request) -> web.Response:
        """Serve `/tokenize` and `/detokenize`."""
        with self._call_limit.taken():
            document = await self._read(request, parsed)
            if request.path == DETOKENIZE:
                return web.json_response(detokenize(document, self._names, self._handler))
            try:
                return web.json_response(await tokenize(document, self._names, self._handler))
            except PromptTooLong as error:
                raise FieldNames(frozenset(), "prompt").named(error) from error

    async def _count(self, request: web.Request) -> web.Response:
        """Count the tokens of a prompt."""
        with self._call_limit.taken():
            call = await self._read(request, lambda data: DIALECTS[COUNT_TOKENS].read(parsed(data), self._served))
            try:
                tokens = await self._handler.prompts.tokens(call.completion.prompts[0])
            except ValueError as error:
                raise call.completion.names.named(error) from error
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
                record.failed(status, error, refused.http_status if reply.response is None else reply.response.status)
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
        reply.request_id = request_id = completion.body.request_id or reply.request_id
        records[0].is_of(request_id)
        left = None if completion.body.timeout is None else max(0.0, completion.body.timeout - records[0].seconds)
        try:
            async with asyncio.timeout(left) as deadline, self._calls.enter((caller_with(_token(request)), request_id)):
                return await self._answer(call, request_id, records, reply)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(f"timeout={completion.body.timeout:g} s is over; the call was aborted") from error

    async def _answer(
        self, call: ApiCall, request_id: str, records: list[CallRecord], reply: HttpReply
    ) -> web.StreamResponse:
        """Build the requests of a call, add them to `records`, and send their answers. Raises QueueFull, and ValueError
        that names the fields as the caller's API does."""
        completion = call.completion
        check_waiting(self._handler.pair.engine, self._handler.status().queued)
        try:
            requests = await self._requests_of(completion, request_id)
            records.extend(records[0].another() for _ in requests[1:])
            heading = AnswerHeading(request_id, int(time.time()), self._names[0], completion.chat, self._fingerprint)
            return await self._decode(call, requests, heading, records, reply)
        except ValueError as error:
            raise call.completion.names.named(error) from error

    async def _requests_of(self, completion: CompletionRequest, request_id: str) -> list[Request]:
        """Return one request for each answer. Raises QueueFull, and ValueError naming the field, the value and what is
        allowed."""
        handler = self._handler

        def default_length(params: SamplingParams, prompt: int, negative: int) -> int:
            if completion.chat:
                return handler.default_length(params, prompt, negative)
            return min(DEFAULT_MAX_TOKENS, handler.longest(params, prompt, negative))

        requests: list[Request] = []
        tokenizer, seeds = handler.pair.tokenizer, completion.seeds()
        negative = await handler.prompts.negative(completion.negative)
        for each in completion.prompts:
            prompt = await handler.prompts.tokens(each)
            requests += completion.requests(request_id, prompt, negative, seeds, tokenizer, default_length)
        return requests

    async def _decode(
        self,
        call: ApiCall,
        requests: list[Request],
        heading: AnswerHeading,
        records: list[CallRecord],
        reply: HttpReply,
    ) -> web.StreamResponse:
        """Decode all requests of a call and reply. At the end, also after an error, the backend's iterators are closed,
        which aborts requests that still run."""
        tokenizer, completion = self._handler.pair.tokenizer, call.completion
        reasoning = completion.reasoning(tokenizer, requests[0].prompt)
        writer = call.make_writer(AnsweredCall(heading, completion, requests, tokenizer, reasoning))
        reply.error_event = writer.error
        ended: dict[int, Answer] = {}
        async with aclosing(self._handler.updates(requests, records)) as updates:
            async for index, output in updates:
                if completion.body.stream:
                    await reply.send(await _written_by(partial(writer.update, index, output), output.reported))
                if output.answer is not None:
                    ended[index] = output.answer
        answers = [ended[index] for index in range(len(requests))]
        if not completion.body.stream:
            # Every answer may repeat the log-probabilities of its prompt.
            reported = completion.n * sum(answer.reported for answer in answers)
            return await reply.whole(await _written_by(partial(writer.whole, answers), reported))
        await reply.send(await _written_by(partial(writer.finish, answers), 0))
        return await reply.end()


async def _written_by(write: Callable[[], bytes], reported: int) -> bytes:
    """Return what `write` returns. `reported`: see `Answer.reported`. Raises NotWritten."""
    try:
        return await converted(write, reported)
    except Exception as error:
        raise NotWritten("an answer cannot be written") from error


class NotWritten(RuntimeError):
    """An answer cannot be written. This is an internal error, never one of the caller."""


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


def _each_left(records: list[CallRecord], deadline: bool) -> None:
    for record in records:
        record.left(deadline)
