"""Requests that a gang may have failed over: what it failed over twice, or while it decoded nothing else, is not decoded again."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from services.backend import RequestFailed
from smc.engine.request import Request

CONVICTED = 2
"""Failures with others in flight after which a request is refused."""
REMEMBERED = 1000
"""Requests; the oldest are forgotten first."""


class Suspects:
    """Counts failures by what was asked, whoever asked and under which id."""

    def __init__(self) -> None:
        self._failures: OrderedDict[bytes, int] = OrderedDict()

    def gang_failed(self, requests: Sequence[Request]) -> None:
        """A gang has failed over what it was asked, with these requests in flight."""
        for request in requests:
            key = _key(request)
            self._failures[key] = self._failures.pop(key, 0) + (CONVICTED if len(requests) == 1 else 1)
        while len(self._failures) > REMEMBERED:
            self._failures.popitem(last=False)

    def check(self, request: Request) -> None:
        """Raises RequestFailed for a request that is not decoded again."""
        if self._failures and self._failures.get(_key(request), 0) >= CONVICTED:
            raise RequestFailed("the service failed over this very request before, and does not try it again; report it with the log")


def _key(request: Request) -> bytes:
    return hashlib.blake2b(repr((request.prompt, request.params)).encode(), digest_size=16).digest()
