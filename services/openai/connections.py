"""The port's HTTP connections: closes silent and slow ones, and answers what is no HTTP. Knows nothing about the calls
that come over them."""

from __future__ import annotations

import asyncio
import uuid

from aiohttp import web

from services.openai.bodies import BadRequest, refusal
from services.openai.dialects import Dialect

SWEEP_SECONDS = 0.5
SERVER = "smcserve"
"""Header `server` of all replies: the library's own would name versions."""


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


class _Connection(web.RequestHandler):
    """A connection that answers what never comes to the application, because it is no HTTP or expects what the library
    does not know, by errors of this API."""

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
        response = refused_reply(error, None)
        response.headers["server"] = SERVER
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPExpectationFailed):
            why = f"{request.method} {request.path}: expect={request.headers['expect']!r}; allowed: 100-continue"
            resp = refused_reply(BadRequest(why, None, resp.status), None)
        return await super().finish_response(request, resp, start_time)


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """Runs an application whose connections are `_Connection`; the library has no option for that."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = _Server
        return server


def refused_reply(error: Exception, dialect: Dialect | None) -> web.Response:
    """Return the reply to a call that ends before its body is read, in the format of its API."""
    headers: dict[str, str] = {}
    if dialect is None:
        refused = refusal(error)
    else:
        request_id = uuid.uuid4().hex
        refused, headers = dialect.refusal(error, request_id), dict.fromkeys(dialect.id_headers, request_id)
    return web.json_response(refused.body, status=refused.http_status, headers=headers | refused.headers)
