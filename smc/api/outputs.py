"""What comes back of a request: news of it while it runs (Output), and its end (Answer)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

Alternatives = tuple[tuple[int, float], ...]
"""Tokens and their log-probabilities."""


class FinishReason(StrEnum):
    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    TIME_BUDGET = "time_budget"
    """The request's own time was used up: the answer is the weighted draw among what existed then."""
    QUEUE_TIME = "queue_time"
    """Its own time was used up before it had begun: there is no answer."""
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class Statistics:
    """What the rows of one request went through: its particles, or of exact decoding those of the tree."""

    particles: int
    rounds: int = 0
    resamples: int = 0
    collapses: int = 0
    """Rounds after which every weight was zero and all were set equal. Above 0 the answer is not to be trusted."""
    particles_left: int = 0
    """Particles at the end: fewer than `particles` where memory was short and the request allowed it, or costs had it
    so (`exact`)."""
    preemptions: int = 0
    """How often the request gave up its memory to others and was taken up again."""
    mean_ess: float = 0.0
    """Effective sample size before resampling, averaged over rounds; between 1 and N."""
    min_ess: float = 0.0
    log_z: float = 0.0
    """log Z-hat, of the estimate of the target's total mass on answers: its exponential has expectation 1 at alpha =
    1."""
    draft_tokens: int = 0
    """Tokens drawn by the draft, over all particles and branches."""
    target_tokens: int = 0
    """Positions run through the target after the prompt, over all particles."""
    committed_lag: float = 0.0
    """Tokens between the committed prefix and the longest particle, averaged over rounds."""
    accepted_per_round: float = 0.0
    """Of exact decoding: answer tokens that a round confirmed, on average. The first token comes with the prompt, in no
    round."""
    hits: int = 0
    """Of exact decoding ahead: rounds after which what had been drafted went on as the target did."""
    misses: int = 0
    """The other rounds: the draft began anew from the target's token."""
    alone_rounds: int = 0
    """Of exact decoding: rounds in which nothing was drafted, and the target decoded alone. They count in none of the
    three before."""
    mean_rows: float = 0.0
    """Of exact decoding: rows of its tree, averaged over the other rounds."""


@dataclass(frozen=True)
class Times:
    """Where an answer's time went, seconds."""

    queue: float = 0.0
    """From its arrival until it was taken up: all of it, if it never was."""
    prefill: float = 0.0
    """From there until its first token was there."""
    decode: float = 0.0
    """From there to its end; where it was preempted, with all that this took."""


@dataclass(frozen=True)
class Particle:
    """One of the answers that a request's own was drawn from."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    weight: float
    """Normalised: those of a request sum to 1."""


@dataclass(frozen=True)
class Answer:
    """The end of a request."""

    request_id: str
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    matched: int | str | None
    """The token id or string that ended the answer, where one did."""
    seed: int
    prompt_tokens: int
    statistics: Statistics
    seconds: float
    """From submission to this answer."""
    logprobs: tuple[float, ...] | None = None
    """Of every token under the target law, if asked for; NaN for one that was streamed and not weighed before time was
    up."""
    top_logprobs: tuple[Alternatives, ...] | None = None
    """Of every token, if asked for: the likeliest ones at its position under the target law, likeliest first, and their
    log-probabilities. There are fewer than were asked for where the law leaves fewer, and none of an answer that was
    cancelled or failed."""
    error: str | None = None
    cached_tokens: int = 0
    """Prompt tokens that had been computed for another request."""
    times: Times = field(default=Times(), compare=False)
    particles: tuple[Particle, ...] | None = None
    """If asked for; the answer was drawn among them by weight. Two may be the same, of independent particles; where
    nothing was decoded there are none."""


@dataclass(frozen=True)
class Output:
    """News of one request: tokens and text that can no longer change, and at the end the answer."""

    request_id: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    answer: Answer | None = None
