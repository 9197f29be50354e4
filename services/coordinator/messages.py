"""Messages on the stream between the gateway and the coordinator. One stream carries all requests, so a step of the
engine costs one message however many run. Encoded by `services.link.codec`.

Nothing is sent twice: an update carries only what is new."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from services.backend import DraftUnavailable, RequestFailed, Unavailable
from services.link.codec import Codec
from smc.api.request import Output, Request
from smc.scheduler.admission import QueueFull
from smc.scheduler.stats import EngineStats, RoundTimes

SERVICE = "smc.internal.Coordinator"


@dataclass(frozen=True)
class Abort:
    """Ends a request; unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True)
class Submission:
    request: Request


class RefusalKind(StrEnum):
    """Why a submission was refused, or a request cannot continue."""

    INVALID = "invalid"
    QUEUE_FULL = "queue_full"
    FAILED = "failed"
    """An internal error that concerns this request alone."""
    NO_DRAFT = "no_draft"
    """There is no draft."""
    UNAVAILABLE = "unavailable"
    """The draft was lost while the request ran."""


_ERRORS: dict[RefusalKind, type[Exception]] = {
    RefusalKind.INVALID: ValueError,
    RefusalKind.QUEUE_FULL: QueueFull,
    RefusalKind.FAILED: RequestFailed,
    RefusalKind.NO_DRAFT: DraftUnavailable,
    RefusalKind.UNAVAILABLE: Unavailable,
}


@dataclass(frozen=True)
class RefusedRequest:
    request_id: str
    kind: RefusalKind
    message: str

    @staticmethod
    def of(request_id: str, error: Exception) -> RefusedRequest:
        """`error`: ValueError, QueueFull, RequestFailed, DraftUnavailable or Unavailable."""
        kind = next(kind for kind, known in _ERRORS.items() if isinstance(error, known))
        return RefusedRequest(request_id, kind, str(error))

    @property
    def error(self) -> Exception:
        return _ERRORS[self.kind](self.message)


@dataclass(frozen=True)
class EngineStep:
    """The result of one step of the engine's loop."""

    outputs: Sequence[Output] = ()
    refusals: Sequence[RefusedRequest] = ()
    stats: EngineStats = field(default_factory=EngineStats)
    times: RoundTimes | None = None
    """Where the time of the step's rounds went; None if that is not known or no model worked."""
    lost_draft: int = 0
    """Incarnation of the draft that was lost last; 0 if none was."""

    def to_send(self) -> EngineStep:
        """Return the step as it is sent: an answer holds the tokens, log-probabilities and text of its last update
        only, and its seconds are NaN, because clocks differ between processes. `services.coordinator.client` completes
        it."""
        return replace(self, outputs=tuple(map(_last_update, self.outputs)))


def _last_update(output: Output) -> Output:
    answer = output.answer
    if answer is None:
        return output
    logprobs = output.logprobs or None
    last = replace(answer, tokens=output.tokens, text=output.text, logprobs=logprobs, seconds=math.nan)
    return replace(output, answer=last)


REQUESTS = Codec[Submission | Abort](Submission | Abort)
STEPS = Codec[EngineStep](EngineStep)
