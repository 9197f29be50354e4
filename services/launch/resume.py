"""Answers that go on after the worker group that decoded them was lost. They consist of the target's own draws, so the
same seed draws the same tokens whatever else is in the batch, in any worker group. The request is submitted again with
the tokens that were delivered, and goes on after them; or it is decoded again from its beginning, if it has none or is
decoded by rejection. What was already delivered is compared and left out."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

from services.backend import Unavailable
from smc.api.request import CONTINUED, Answer, FinishReason, Output, Particle, Request
from smc.api.sampling_params import Method
from smc.scheduler.admission import QueueFull

RESUMED = (Method.EXACT, Method.TARGET)
MOST = 3
"""Maximum number of times that one answer is resumed: a request that is lost more often may itself make worker groups
fail."""
FULL_SECONDS = 0.1
"""Time between two attempts to resubmit a request while the queues are full."""
logger = logging.getLogger(__name__)
Generate = Callable[[Request], AsyncGenerator[Output, None]]


async def resuming(
    request: Request, ask: Generate, is_back: Callable[[], Awaitable[None]]
) -> AsyncGenerator[Output, None]:
    """Yield the updates of a request until its answer, across losses of the worker group. `ask` submits the request;
    `is_back` waits until `ask` works again, and raises Unavailable if it never will. Raises the errors of `ask`;
    Unavailable if the worker group is lost and the request cannot be resumed."""
    if request.params.method not in RESUMED:
        async with aclosing(ask(request)) as updates:
            async for output in updates:
                yield output
        return
    arrived = time.monotonic() - request.waited
    if request.params.seed is None:
        request = replace(request, params=replace(request.params, seed=secrets.randbits(63)))
    given = _ReplayCursor()
    left, accepted = MOST, False
    while True:
        try:
            request = replace(request, waited=time.monotonic() - arrived)
            async with aclosing(ask(given.continued(request))) as updates:
                given.begin()
                async for output in updates:
                    if (more := given.more(output)) is not None:
                        yield more
            return
        except QueueFull:
            if not accepted:
                raise
            await asyncio.sleep(FULL_SECONDS)  # the other worker groups finish what they have first
            continue
        except Unavailable as error:
            if isinstance(error, _AnswerDiffers) or not left:
                raise
            left, accepted = left - 1, True
            logger.warning("request %s is submitted again: %s", request.request_id, error)
        await is_back()


class _AnswerDiffers(Unavailable):
    """The resumed answer differs from the part that was already delivered."""


class _ReplayCursor:
    """Records the delivered part of an answer. When the answer is decoded again, this part is compared and left out."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._pieces: list[str] = []
        self.begin()

    def begin(self) -> None:
        """Expect the answer once more from its beginning."""
        self._text = "".join(self._pieces)
        self._pieces = [self._text]
        self._come, self._text_come = 0, 0
        """Numbers of tokens and of characters that have arrived since `begin`."""

    def continued(self, request: Request) -> Request:
        """Return the request of the rest of the answer. Where the rest depends on more than the tokens before it, this
        is the request of the whole answer."""
        if request.params.decoding not in CONTINUED:
            return request
        return replace(request, confirmed=tuple(self._tokens), confirmed_logprobs=tuple(self._logprobs))

    def more(self, output: Output) -> Output | None:
        """Return the part of this update that has not been delivered; None if there is none. Raises _AnswerDiffers if
        the update contradicts the delivered part."""
        known = self._tokens[self._come : self._come + len(output.tokens)]
        known_text = self._text[self._text_come : self._text_come + len(output.text)]
        if list(output.tokens[: len(known)]) != known or output.text[: len(known_text)] != known_text:
            raise _AnswerDiffers(
                "the service was lost, and decoding again gave a different answer; send the request again"
            )
        self._come += len(output.tokens)
        self._text_come += len(output.text)
        tokens, text = output.tokens[len(known) :], output.text[len(known_text) :]
        logprobs = output.logprobs[len(known) :]
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs)
        self._pieces.append(text)
        if output.answer is None and not tokens and not text:
            return None
        answer = output.answer and self._whole(output.answer)
        return replace(output, tokens=tokens, text=text, answer=answer, logprobs=logprobs)

    def _whole(self, answer: Answer) -> Answer:
        """Add the delivered log-probabilities to the answer. If its time ran out before it reached the end of the
        delivered part, replace its tokens and text with the delivered ones."""
        if answer.logprobs is not None or self._logprobs:
            answer = replace(answer, logprobs=tuple(self._logprobs))
        missing = len(self._tokens) - len(answer.tokens)
        if missing <= 0:
            return answer
        reason = FinishReason.TIME_BUDGET if answer.finish_reason is FinishReason.QUEUE_TIME else answer.finish_reason
        top_logprobs = None if answer.top_logprobs is None else (*answer.top_logprobs, *[()] * missing)
        tokens, text = tuple(self._tokens), "".join(self._pieces)
        particles = None if answer.particles is None else (Particle(tokens, text, reason, 1.0),)
        return replace(
            answer,
            tokens=tokens,
            text=text,
            finish_reason=reason,
            top_logprobs=top_logprobs,
            particles=particles,
        )
