"""Answers that go on where they were when the gang is lost: asked for again with the same seed, and given out from where they broke off.

Only of methods whose answer is the target's own draws: whatever else is decoded beside it, the same seed draws the same tokens.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

from services.backend import Unavailable
from smc.engine.request import Method, Output, Request

RESUMED = (Method.EXACT, Method.TARGET)
MOST = 3
"""How often one answer is resumed: what is lost so often may be what the gang dies of."""

logger = logging.getLogger(__name__)

Ask = Callable[[Request], AsyncGenerator[Output, None]]


async def resuming(request: Request, ask: Ask, is_back: Callable[[], Awaitable[None]]) -> AsyncGenerator[Output, None]:
    """News of a request until its answer, over losses of the gang. `is_back` waits until `ask` works again, and raises Unavailable if it
    never does. Raises what `ask` raises; Unavailable for the loss of what cannot be resumed."""
    if request.params.method not in RESUMED:
        async with aclosing(ask(request)) as news:
            async for output in news:
                yield output
        return
    arrived = time.monotonic() - request.waited
    if request.params.seed is None:
        request = replace(request, params=replace(request.params, seed=secrets.randbits(63)))
    given = _Given()
    for left in reversed(range(MOST + 1)):
        try:
            async with aclosing(ask(replace(request, waited=time.monotonic() - arrived))) as news:
                given.begin()
                async for output in news:
                    if (more := given.more(output)) is not None:
                        yield more
            return
        except Unavailable as error:
            if isinstance(error, _Differs) or not left:
                raise
            logger.warning("request %s is asked for again: %s", request.request_id, error)
        await is_back()


class _Differs(Unavailable):
    """What came again is not what was given out."""


class _Given:
    """How much of an answer has been given out. What comes again is compared with it, and left out."""

    def __init__(self) -> None:
        self._tokens: tuple[int, ...] = ()
        self._text = ""
        self.begin()

    def begin(self) -> None:
        """The answer comes once more, from its beginning."""
        self._again: tuple[int, ...] = ()
        self._text_again = ""

    def more(self, output: Output) -> Output | None:
        """What of these news has not been given out; None for nothing. Raises _Differs if they are those of another answer."""
        self._again += output.tokens
        self._text_again += output.text
        same = min(len(self._again), len(self._tokens)), min(len(self._text_again), len(self._text))
        if self._again[: same[0]] != self._tokens[: same[0]] or self._text_again[: same[1]] != self._text[: same[1]]:
            raise _Differs("the service was lost, and the answer did not come out the same again; ask again")
        tokens, text = self._again[len(self._tokens) :], self._text_again[len(self._text) :]
        self._tokens += tokens
        self._text += text
        if output.answer is None and not tokens and not text:
            return None
        return replace(output, tokens=tokens, text=text)
