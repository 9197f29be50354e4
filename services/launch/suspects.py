"""Requests that a gang may have failed over: what it failed over while it decoded nothing else is not decoded again for
a while.

What had company convicts nobody: answers that are resumed come back together, and would be convicted together.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from services.backend import RequestFailed
from smc.api.request import Request

REMEMBERED = 1000
"""Requests; the oldest are forgotten first."""
FORGOTTEN = 600.0
"""Seconds after which a request is tried again."""


class Suspects:
    """Knows requests by what was asked, whoever asked, under which id and with which seed."""

    def __init__(self) -> None:
        self._failed: OrderedDict[bytes, float] = OrderedDict()

    def gang_failed(self, requests: Sequence[Request]) -> None:
        """A gang has failed over what it was asked, with these requests in flight."""
        if len(requests) != 1:
            return
        key = _key(requests[0])
        self._failed.pop(key, None)
        self._failed[key] = time.monotonic()
        if len(self._failed) > REMEMBERED:
            self._failed.popitem(last=False)

    def check(self, request: Request) -> None:
        """Raises RequestFailed for a request that is not decoded again."""
        failed = self._failed.get(_key(request)) if self._failed else None
        if failed is not None and time.monotonic() - failed < FORGOTTEN:
            raise RequestFailed(
                "the service failed over this very request a short while ago, and does not try it again yet; report it"
            )


def _key(request: Request) -> bytes:
    """A request without a seed is given one of its own each time that it is asked."""
    params = replace(request.params, seed=None)
    return hashlib.blake2b(repr((request.prompt, request.negative_prompt, params)).encode(), digest_size=16).digest()
