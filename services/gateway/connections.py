"""Connections of an HTTP server: those that ask for nothing are closed, old ones get no further calls, and what the
other side does not read of one that is closed is forgotten after a while. Knows nothing about calls."""

from __future__ import annotations

import asyncio

from aiohttp import web

SWEEP_SECONDS = 0.5


class Connections:
    """Use it in one asyncio loop."""

    def __init__(self, server: web.Server, silence: float, age: float) -> None:
        """`silence`: seconds in which a new connection has to bring its first request whole; `age`: after which a
        connection is old."""
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
        """A request has come over it."""
        self._heard.add(connection)
        self._since.setdefault(connection, self._loop.time())
        if connection.transport is not None:
            self._transports[connection] = connection.transport

    def is_old(self, connection: web.RequestHandler) -> bool:
        """Its client is to make a new one, maybe to a newer replica."""
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
