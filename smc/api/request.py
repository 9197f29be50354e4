"""Requests and their results: outputs while a request runs, the answer at its end, and warnings about a draft that does
not know the text of an answer. The rules for these warnings work on numbers alone, so that the probe of a pair and the
answer to one request give the same warning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from smc.api.limits import MAX_TOP_LOGPROBS
from smc.api.sampling_params import SamplingParams
from smc.types import EXACT, SMC, Decoding, Numerics

MAX_PRIORITY = 1_000_000
"""Maximum absolute value of a priority."""
MOST_SCORED = 1 << 20
"""Maximum number of log-probabilities of prompts in all answers of a call together: of their tokens, and of the
likeliest tokens listed for each."""
Alternatives = tuple[tuple[int, float], ...]
"""Token ids, each with its log-probability."""
LEAST_ACCEPTED = 0.25
"""Drafted tokens confirmed in a round of exact decoding, on average; with fewer, the draft does not know the text."""
LEAST_EVIDENCE = -0.3
"""log Z-hat per token; below this, a population is too small: a block of five tokens keeps e^-1.5, 22%, of the target's
probability."""
LEAST_ROUNDS, LEAST_TOKENS = 4, 8
"""Minimum rounds of exact decoding that drafted something, and minimum answer tokens of SMC, for a warning to be
meaningful."""
CONTINUED = frozenset({Decoding.WALK, Decoding.TARGET})
"""Ways of decoding in which an answer can go on after `Request.confirmed`."""
LEAST_GAIN = 1.05
"""Speed, as a multiple of plain decoding's, from which drafting pays."""


@dataclass(frozen=True)
class Request:
    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""
    """Prompts share cached keys and values only with prompts of the same salt."""
    waited: float = 0.0
    """Seconds between the request's arrival and its submission to the engine."""
    negative_prompt: tuple[int, ...] | None = None
    """Prompt that a guided request is steered away from; None: the token that begins texts."""
    priority: int = 0
    """Requests with a lower number are admitted first; requests with the same number in order of submission."""
    confirmed: tuple[int, ...] = ()
    """Tokens of the answer that another engine has delivered. The answer goes on after them as it would have gone on
    there; outputs begin with them. Only for answers whose tokens depend on the seed and on the tokens before them alone
    (`CONTINUED`)."""
    confirmed_logprobs: tuple[float, ...] = ()
    """The log-probabilities that were delivered with these tokens, if requested."""

    @property
    def negative_size(self) -> int:
        """Tokens of the negative prompt; 0 if the request is not guided."""
        return 0 if not self.params.guided else 1 if self.negative_prompt is None else len(self.negative_prompt)


def check_priority(priority: int, least: int = 0, most: int = MAX_PRIORITY) -> None:
    """Raise ValueError if the priority is not one that callers of the service may give: `least` to `most`."""
    if not least <= priority <= most:
        raise ValueError(
            f"priority={priority}; allowed: {least} to {most}, the lowest is first "
            "(min-priority and max-priority of the service)"
        )


def check_guidance(params: SamplingParams, has_negative: bool) -> None:
    """Refuse a negative prompt that has no effect. Raises ValueError."""
    if has_negative and not params.guided:
        raise ValueError(
            "negative_prompt has no effect with guidance_scale=1; give a guidance_scale above 1, or leave it out"
        )


def check_scored(requests: Sequence[Request], times: int = 1) -> None:
    """Check how many log-probabilities of prompts the answers of a call list. `times`: how often each is listed. Raises
    ValueError if there are more than allowed."""
    listed = ((len(one.prompt), one.params.prompt_logprobs) for one in requests)
    size = times * sum(tokens * (1 + likeliest) for tokens, likeliest in listed if likeliest is not None)
    if size > MOST_SCORED:
        raise ValueError(
            f"prompt_logprobs asks for {size} log-probabilities; allowed: at most {MOST_SCORED} in all answers"
        )


class FinishReason(StrEnum):
    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    TIME_BUDGET = "time_budget"
    """The request's time budget was used up: the answer is chosen among the particles as they were then."""
    QUEUE_TIME = "queue_time"
    """The request's time budget was used up before the request was admitted: there is no answer."""
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class Statistics:
    """Counters of one request's rows: its particles, or the tree of exact decoding."""

    particles: int
    rounds: int = 0
    resamples: int = 0
    collapses: int = 0
    """Rounds after which every weight was zero. Decoding went on from the longest prefix that had weight, or from
    before the round if a potential caused it, and Z-hat is 0. Frequent where the draft does not propose the tokens that
    the target's truncation keeps."""
    particles_left: int = 0
    """Particles at the end. Fewer than `particles` if memory was short and the request allowed it, or if a smaller tree
    was faster (`exact`)."""
    preemptions: int = 0
    """How often the request was preempted and resumed."""
    mean_ess: float = 0.0
    """Effective sample size before resampling, averaged over rounds; between 1 and N."""
    min_ess: float = 0.0
    log_z: float = 0.0
    """log Z-hat. Z-hat estimates the target's total mass on answers; at alpha = 1 its expectation is 1."""
    draft_tokens: int = 0
    """Tokens drawn by the draft, over all particles and branches."""
    target_tokens: int = 0
    """Positions run through the target after the prompt, over all particles."""
    committed_lag: float = 0.0
    """Tokens between the committed prefix and the longest particle, averaged over rounds."""
    accepted_per_round: float = 0.0
    """Exact decoding: answer tokens that a round confirmed, on average. The first token is drawn after the prompt and
    counts in no round."""
    hits: int = 0
    """Exact decoding in look-ahead: rounds after which the tokens drafted ahead continued what the target drew."""
    misses: int = 0
    """Exact decoding in look-ahead: rounds after which the draft started again from the target's token."""
    alone_rounds: int = 0
    """Exact decoding: rounds in which nothing was drafted and the target decoded alone. They do not count in
    `accepted_per_round`, `hits` and `misses`."""
    mean_rows: float = 0.0
    """Exact decoding: rows of the tree, averaged over the rounds that drafted."""
    draft_exponent: float = 0.0
    """Exact decoding: the exponent of coupled drafting (`smc.algorithm.coupling`) at the end. Above 1 the target is
    more certain than the draft. 0: no coupled drafting took place."""
    numerics: str = Numerics.FASTEST.value
    """What the answer's bits depend on: `invariant` if all models that decide it ran so (`EngineConfig.numerics`)."""


@dataclass(frozen=True)
class Times:
    """How an answer's time was spent, in seconds."""

    queue: float = 0.0
    """From the request's arrival to its admission; all of its time if it was never admitted."""
    prefill: float = 0.0
    """From the admission until every model of the method has run the prompt. An answer of one token does not wait for
    the model that does not draw it."""
    decode: float = 0.0
    """From then to the end, preemptions included."""


class PromptToken(NamedTuple):
    """How likely the target finds a token of a prompt after the tokens before it: at temperature 1, without any setting
    of the request."""

    logprob: float
    rank: int
    """Number of tokens that are at least as likely, this one included."""
    likeliest: Alternatives
    """The requested number of alternatives, likeliest first."""


@dataclass(frozen=True)
class Particle:
    """One of the answers among which the request's answer was drawn."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    weight: float
    """Weight, normalised: the weights of a request's particles sum to 1."""


@dataclass(frozen=True)
class Answer:
    """The final result of a request."""

    request_id: str
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    matched: int | str | None
    """The token id or string that ended the answer, if one did."""
    seed: int
    prompt_tokens: int
    statistics: Statistics
    seconds: float
    """Seconds from the request's arrival to this answer."""
    logprobs: tuple[float, ...] | None = None
    """Log-probability of every token under the target's distribution, if requested."""
    top_logprobs: tuple[Alternatives, ...] | None = None
    """For every token, if requested: the likeliest tokens at its position under the target's distribution, likeliest
    first, with their log-probabilities. A truncated distribution may have fewer than were requested; an answer that was
    cancelled or failed has none."""
    error: str | None = None
    caller_error: bool = False
    """Whether `error` is a fault of the request, not of the engine."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    times: Times = field(default=Times(), compare=False)
    particles: tuple[Particle, ...] | None = None
    """The population from which the answer was drawn by weight, if requested. Independent particles may be equal. Empty
    if nothing was decoded."""
    prompt_logprobs: tuple[PromptToken, ...] | None = None
    """For every token of the prompt except the first, if requested; None if the request was cancelled, failed or ran
    out of time before there was an answer."""

    @property
    def reported(self) -> int:
        """At most so many tokens are listed in the reports that the request asked for."""
        likeliest = MAX_TOP_LOGPROBS * (len(self.top_logprobs or ()) + len(self.prompt_logprobs or ()))
        drawn = len(self.logprobs or ()) + sum(len(particle.tokens) for particle in self.particles or ())
        return drawn + likeliest + len(self.prompt_logprobs or ())


@dataclass(frozen=True)
class Output:
    """An update of one request: new tokens and text, which can no longer change, and at the end the answer."""

    request_id: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    answer: Answer | None = None
    logprobs: tuple[float, ...] = ()
    """One log-probability for each of these tokens, if requested. Concatenated over all outputs, they are the
    answer's."""

    @property
    def reported(self) -> int:
        """At most so many tokens are listed in the reports of this update."""
        return len(self.logprobs) + (0 if self.answer is None else self.answer.reported)


def fit_by_acceptance(accepted: float) -> str | None:
    """Return a warning if the draft does not know the text, else None. `accepted`: drafted tokens accepted per round,
    with trees of the size that a request has."""
    if accepted >= LEAST_ACCEPTED:
        return None
    return f"the draft does not know this text: {accepted:.2f} drafted tokens are accepted a round"


def fit_by_evidence(log_z_per_token: float, particles: int) -> str | None:
    """Return a warning if the population is too small for this log Z-hat per token, else None."""
    if log_z_per_token >= LEAST_EVIDENCE:
        return None
    return (
        f"{particles} particles are too few for this draft and text: log Z is {log_z_per_token:.2f} a token, and below "
        f"{LEAST_EVIDENCE:g} the answers are the draft's rather than the target's"
    )


def fit_of_answer(params: SamplingParams, statistics: Statistics, tokens: int) -> str | None:
    """Return a warning about the draft of one answer, with advice; None if the draft fits, or if the answer is too
    short to tell."""
    if params.decoding in SMC and params.follows_target and statistics.rounds and tokens >= LEAST_TOKENS:
        words = fit_by_evidence(statistics.log_z / tokens, statistics.particles)
        return words and f"{words}; use --method exact, or more particles"
    drafted = statistics.rounds - statistics.alone_rounds
    if params.decoding in EXACT and statistics.accepted_per_round and drafted >= LEAST_ROUNDS:
        words = fit_by_acceptance(statistics.accepted_per_round - 1)
        return words and f"{words}; --method target is as fast, and `smcserve check --probe` measures the pair"
    return None
