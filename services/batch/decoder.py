"""Answers of requests on a service that may be lost and come back. Knows nothing about lines, files or processes."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from services.backend import Backend, Unavailable
from smc.api.outputs import Answer
from smc.api.request import Request

ATTEMPTS = 3
"""How often a request is sent to a service that is lost while it decodes it."""

logger = logging.getLogger(__name__)


class ServiceLost(RuntimeError):
    """The service is gone and does not come back."""


class Serving:
    """Whether the service decodes now; for those who wait until it does."""

    def __init__(self, patience: float) -> None:
        """`patience`: seconds after which a service that has not come back is given up."""
        self._patience = patience
        self._now = asyncio.Event()

    def set_health(self, draft: bool, target: bool) -> None:
        """What a `Supervisor` tells as `on_health`. Lines wait for both: each may need the draft."""
        if draft and target:
            self._now.set()
        else:
            self._now.clear()

    async def wait(self) -> None:
        """Raises ServiceLost."""
        try:
            async with asyncio.timeout(self._patience):
                while not self._now.is_set():  # it may be lost again before this task's turn comes
                    await self._now.wait()
        except TimeoutError as error:
            raise ServiceLost(f"the service did not come back within {self._patience:g} s") from error


class Decoder:
    """Sends a request again when the service is lost over it: nothing of its answer has been given out by then."""

    def __init__(self, backend: Backend, serving: Serving) -> None:
        self._backend, self._serving = backend, serving
        self._last_attempts = asyncio.Lock()

    async def decode(self, request: Request) -> Answer:
        """Raises ValueError, RequestFailed, Unavailable after the last attempt, ServiceLost."""
        for attempt in range(1, ATTEMPTS):
            try:
                return await self._once(request)
            except Unavailable as error:
                logger.warning("line %s, attempt %d of %d: %s", request.request_id, attempt, ATTEMPTS, error)
        # One at a time: if one of those in flight is what the service dies of, the others must not fail with it.
        async with self._last_attempts:
            try:
                return await self._once(request)
            except Unavailable as error:
                raise Unavailable(
                    f"the service was lost {ATTEMPTS} times while it decoded this line; at last: {error}"
                ) from error

    async def _once(self, request: Request) -> Answer:
        await self._serving.wait()
        async with aclosing(self._backend.generate(request)) as news:
            async for output in news:
                if output.answer is not None:
                    return output.answer
        raise AssertionError("the news of a request ended without an answer")
