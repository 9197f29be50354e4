"""Requests whose worker group was lost: they are resumed with the same seed from where their answers broke off, or
quarantined.

Only answers that are the target's own draws are resumed: whatever else is in the batch, the same seed draws the same
tokens. A request is quarantined for a while if it was the only one when a worker group failed. A request that ran
beside others is not: resumed answers return together and would be quarantined together."""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from services.backend import RequestFailed, Unavailable
from smc.api.outputs import Answer, FinishReason, Output, Particle
from smc.api.request import Request
from smc.api.sampling_params import Method

REMEMBERED = 1000
"""Requests; the oldest are forgotten first."""
FORGOTTEN = 600.0
"""Seconds after which a request is tried again."""


class Quarantine:
    """Identifies a request by its contents, without its id and its seed."""

    def __init__(self) -> None:
        self._failed: OrderedDict[bytes, float] = OrderedDict()

    def group_failed(self, requests: Sequence[Request]) -> None:
        """A worker group has failed with these requests in flight."""
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
    """A request without a seed gets a new seed each time it is submitted."""
    params = replace(request.params, seed=None)
    return hashlib.blake2b(repr((request.prompt, request.negative_prompt, params)).encode(), digest_size=16).digest()


RESUMED = (Method.EXACT, Method.TARGET)
MOST = 3
"""How often one answer is resumed: a request that is lost more often may be what makes the worker group fail."""

logger = logging.getLogger(__name__)

Generate = Callable[[Request], AsyncGenerator[Output, None]]


async def resuming(
    request: Request, ask: Generate, is_back: Callable[[], Awaitable[None]]
) -> AsyncGenerator[Output, None]:
    """Updates of a request until its answer, across losses of the worker group. `is_back` waits until `ask` works
    again, and raises Unavailable if it never does. Raises what `ask` raises; Unavailable for the loss of what cannot be
    resumed."""
    if request.params.method not in RESUMED:
        async with aclosing(ask(request)) as updates:
            async for output in updates:
                yield output
        return
    arrived = time.monotonic() - request.waited
    if request.params.seed is None:
        request = replace(request, params=replace(request.params, seed=secrets.randbits(63)))
    given = _ReplayCursor()
    for left in reversed(range(MOST + 1)):
        try:
            async with aclosing(ask(replace(request, waited=time.monotonic() - arrived))) as updates:
                given.begin()
                async for output in updates:
                    if (more := given.more(output)) is not None:
                        yield more
            return
        except Unavailable as error:
            if isinstance(error, _AnswerDiffers) or not left:
                raise
            logger.warning("request %s is submitted again: %s", request.request_id, error)
        await is_back()


class _AnswerDiffers(Unavailable):
    """What came again is not what was given out."""


class _ReplayCursor:
    """How much of an answer has been given out. What comes again is compared with it, and left out."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._pieces: list[str] = []
        self.begin()

    def begin(self) -> None:
        """The answer comes once more, from its beginning."""
        self._text = "".join(self._pieces)
        self._pieces = [self._text]
        self._come, self._text_come = 0, 0
        """Tokens and characters that have come again."""

    def more(self, output: Output) -> Output | None:
        """The part of this update that has not been delivered; None if there is none. Raises _AnswerDiffers if it
        belongs to another answer."""
        known = self._tokens[self._come : self._come + len(output.tokens)]
        known_text = self._text[self._text_come : self._text_come + len(output.text)]
        if list(output.tokens[: len(known)]) != known or output.text[: len(known_text)] != known_text:
            raise _AnswerDiffers("the service was lost, and the answer did not come out the same again; ask again")
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
        """With the log-probabilities that were given out, and with all else that was, where time was up before it had
        come again."""
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
