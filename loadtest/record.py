"""One request twice: as it was planned (`Planned`), and as it went (`Record`). Times are seconds since the start of the
run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from services.client import Prompt


@dataclass(frozen=True, slots=True)
class Planned:
    """Follows from the seed of the run and the request's number, whatever happens to others."""

    index: int
    at: float
    """When it is to be sent."""
    counted: bool
    """False: it only warms up the service."""
    prompt: Prompt
    sampling: dict[str, Any]
    cancel_after: float | None = None
    """Seconds after which the client gives up."""
    cancel_after_tokens: int | None = None
    abort: bool = False
    """It is cancelled by a call of Abort, not by leaving."""
    pause: float = 0.0
    """Seconds that a slow reader lets pass before it reads the next message."""

    @property
    def ordinary(self) -> bool:
        """Its client waits for the end and reads as fast as it can: only then is a latency the service's own."""
        return self.cancel_after is None and self.cancel_after_tokens is None and not self.pause


@dataclass(slots=True)
class Record:
    planned: Planned
    sent_at: float = 0.0
    message_times: list[float] = field(default_factory=list)
    """Of the messages that brought tokens."""
    message_tokens: list[int] = field(default_factory=list)
    ended_at: float = 0.0
    code: str = ""
    """gRPC status code."""
    detail: str = ""
    cancelled: bool = False
    """By ourselves, as planned."""
    finish_reason: str = ""
    prompt_tokens: int = 0
    """0 unless there is an answer: it is the service that counts them."""
    particles: int = 0
    rounds: int = 0
    resamples: int = 0
    collapses: int = 0
    mean_ess: float = 0.0

    @property
    def answered(self) -> bool:
        return self.code == "OK"

    @property
    def failed(self) -> bool:
        """Neither answered nor cancelled by us."""
        return not self.answered and not self.cancelled

    @property
    def lateness(self) -> float:
        """Of the generator itself."""
        return self.sent_at - self.planned.at

    @property
    def tokens(self) -> int:
        return sum(self.message_tokens)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first message with tokens; None if there was none."""
        return self.message_times[0] - self.sent_at if self.message_times else None

    @property
    def itls(self) -> list[float]:
        """Seconds between messages with tokens; each may bring several."""
        return [later - earlier for earlier, later in zip(self.message_times, self.message_times[1:])]

    @property
    def e2el(self) -> float:
        """Seconds from sending to the end of the stream."""
        return self.ended_at - self.sent_at

    @property
    def tpot(self) -> float:
        """(E2E - TTFT) / (tokens - 1); 0 for an answer of one token, as in vLLM."""
        return (self.e2el - self.ttft) / (self.tokens - 1) if self.ttft is not None and self.tokens > 1 else 0.0
