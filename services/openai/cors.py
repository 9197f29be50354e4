"""Pages of other origins that may use this port, by the rules that browsers follow (CORS)."""

from __future__ import annotations

from collections.abc import Container

from aiohttp import web

SENT = "authorization, content-type, x-api-key, anthropic-version"
"""Headers that pages of other origins may send, besides those that every page may send, if a preflight request names
none. Those that it names are all allowed: the vendors' clients send many, and other ones with every version."""
EXPOSED = "x-request-id, request-id, retry-after, x-should-retry"
"""Headers of replies that pages of other origins may read."""
CORS_SECONDS = 3600
"""Seconds for which a browser may keep the reply to a preflight request."""
ASKED = "access-control-request-headers"


async def allow_origin(allowed: Container[str], request: web.Request, response: web.StreamResponse) -> None:
    """Let pages of `allowed` origins read the response; `*`: of all origins."""
    origin, is_preflight = request.headers.get("origin"), request.method == "OPTIONS"
    response.headers["vary"] = f"origin, {ASKED}" if is_preflight else "origin"
    if origin is None or not ("*" in allowed or origin in allowed):
        return
    response.headers["access-control-allow-origin"] = origin
    response.headers["access-control-expose-headers"] = EXPOSED
    if is_preflight:
        response.headers["access-control-allow-methods"] = "GET, POST"
        response.headers["access-control-allow-headers"] = request.headers.get(ASKED) or SENT
        response.headers["access-control-max-age"] = str(CORS_SECONDS)
