"""What a request returns: outputs while it runs, and the answer at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

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
    """What happened to the rows of one request: its particles, or the tree of exact decoding."""

    particles: int
    rounds: int = 0
    resamples: int = 0
    collapses: int = 0
    """Rounds after which every weight was zero: decoding went on from the longest prefix that had weight, or by a
    potential from before the round, and Z-hat is 0. Often so where the draft does not propose what a truncation leaves."""
    particles_left: int = 0
    """Particles at the end: fewer than `particles` where memory was short and the request allowed it, or where a
    smaller tree was faster (`exact`)."""
    preemptions: int = 0
    """How often the request was preempted and resumed."""
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
    """Of exact decoding ahead: rounds after which the draft began anew from the target's token."""
    alone_rounds: int = 0
    """Of exact decoding: rounds in which nothing was drafted and the target decoded alone. They do not count in
    `accepted_per_round`, `hits` and `misses`."""
    mean_rows: float = 0.0
    """Of exact decoding: rows of its tree, averaged over the rounds that drafted."""
    draft_exponent: float = 0.0
    """Of exact decoding: the exponent of coupled drafting (`smc.algorithm.coupling`) at the end. Above 1 the target is
    more certain than the draft. 0: nothing was drafted so."""


@dataclass(frozen=True)
class Times:
    """Where an answer's time went, seconds."""

    queue: float = 0.0
    """From the request's arrival until its admission; all of its time if it was never admitted."""
    prefill: float = 0.0
    """From the admission to the first token."""
    decode: float = 0.0
    """From the first token to the end, including the time that preemptions took."""


class PromptToken(NamedTuple):
    """How likely a token of a prompt is after those before it, by the target: at temperature 1, without any setting of
    the request."""

    logprob: float
    rank: int
    """How many tokens are at least as likely, itself included."""
    likeliest: Alternatives
    """As many as requested, likeliest first."""


@dataclass(frozen=True)
class Particle:
    """One of the answers that a request's own was drawn from."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    weight: float
    """Weight, normalised: the weights of a request's particles sum to 1."""


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
    """Log-probability of every token under the target's distribution, if requested."""
    top_logprobs: tuple[Alternatives, ...] | None = None
    """For every token, if requested: the likeliest tokens at its position under the target's distribution, likeliest
    first, with their log-probabilities. A truncated distribution may have fewer than were requested; an answer that was
    cancelled or failed has none."""
    error: str | None = None
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    times: Times = field(default=Times(), compare=False)
    particles: tuple[Particle, ...] | None = None
    """The population that the answer was drawn from by weight, if requested. Independent particles may be equal. Empty
    where nothing was decoded."""
    prompt_logprobs: tuple[PromptToken, ...] | None = None
    """For every token of the prompt but the first, if requested; None where the request was cancelled, failed or ran
    out of time before there was an answer."""


@dataclass(frozen=True)
class Output:
    """An update of one request: new tokens and text, which can no longer change, and at the end the answer."""

    request_id: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    answer: Answer | None = None
    logprobs: tuple[float, ...] = ()
    """One for each of these tokens, if requested. Those of all outputs together are the answer's."""
