"""Pages of other origins that may use this port, by the rules that browsers follow (CORS)."""

from __future__ import annotations

from collections.abc import Container

from aiohttp import web

CORS_HEADERS = "authorization, content-type, x-api-key, anthropic-version"
"""Headers that pages of other origins may send, besides those that every page may send."""
CORS_SECONDS = 3600
"""Seconds for which a browser may keep the reply to a preflight request."""


async def allow_origin(allowed: Container[str], request: web.Request, response: web.StreamResponse) -> None:
    """Let pages of `allowed` origins read the response; `*`: of all origins."""
    origin = request.headers.get("origin")
    response.headers["vary"] = "origin"
    if origin is None or not ("*" in allowed or origin in allowed):
        return
    response.headers["access-control-allow-origin"] = origin
    response.headers["access-control-expose-headers"] = "x-request-id"
    if request.method == "OPTIONS":
        response.headers["access-control-allow-methods"] = "GET, POST"
        response.headers["access-control-allow-headers"] = CORS_HEADERS
        response.headers["access-control-max-age"] = str(CORS_SECONDS)
