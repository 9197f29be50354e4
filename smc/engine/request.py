"""The nouns a user meets: what is asked (SamplingParams), what comes back (Output, Answer, Statistics).

Settings are checked when they are built; a setting that the chosen method would ignore is refused.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import StrEnum

from smc.limits import MAX_PARTICLES, MAX_STOP_BYTES, SCHEME_NAMES

MAX_STOPS = 64
MAX_STOP_IDS = 1024
POPULATIONS = ("distinct", "independent")
SMALLEST, LARGEST = 1e-6, 1e6
"""Of temperatures and alpha: beyond, they make infinities and NaN of logits in float32."""
MAX_GUIDANCE = 1e3
SCALES = f"> 0, from {SMALLEST:g} to {LARGEST:g}"


class Method(StrEnum):
    """How a request is decoded."""

    SMC = "smc"
    EXACT = "exact"
    """The target's own draws, confirmed many at a time: the answer of `target`, sooner."""
    TARGET = "target"
    """Plain decoding by the target model: the baseline of every table."""
    DRAFT = "draft"
    """Plain decoding by the draft model: the floor of every quality table."""

    @property
    def plain(self) -> bool:
        """One model decodes by itself: there are no rounds of both."""
        return self in (Method.TARGET, Method.DRAFT)


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
class SamplingParams:
    """How one request is decoded. Raises ValueError naming the field, the value and what is allowed."""

    method: str | None = None
    """`smc`, `exact`, `target` or `draft`. Default: `smc`, and at temperature 0 `exact`."""
    particles: int | None = None
    """N, 1..64: of SMC particles; of exact decoding rows of the tree, which decide its speed alone. Default 8."""
    population: str | None = None
    """`distinct`: particles are drawn without replacement; `independent`: each draws for itself, and they are resampled. SMC only;
    default `distinct`, or `independent` where `ess_threshold` or `resampling` is given."""
    min_particles: int | None = None
    """Particles that must be left where memory is short, 1..N. SMC only; default N: never fewer."""
    temperature: float = 1.0
    """Of the target law, and of the draft's unless `draft_temperature` is given. > 0 for SMC; 0 = greedy otherwise, where exact decoding
    drafts at 1."""
    draft_temperature: float | None = None
    """Of the proposal. SMC only; default: `temperature`. Weights correct for it."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 = all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens with at least this mass; 1 = all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest; 0 = none."""
    alpha: float | None = None
    """Exponent of the target law over sequences, > 0. SMC only; default 1."""
    guidance_scale: float = 1.0
    """s of the target law of l_u + s (l_c - l_u): l_c are the logits after the prompt, l_u those after the negative prompt; temperature and
    truncation come afterwards. 1 = none. A guided request takes two slots a row, and twice the pages at the target. Not of `draft`."""
    ess_threshold: float | None = None
    """Resample when ESS < threshold * N, 0..1; 0 = never. Independent particles only; default 0.5."""
    resampling: str | None = None
    """Scheme. Independent particles only; default `systematic`."""
    seed: int | None = None
    """64-bit; the same seed gives the same answer. Default: drawn by the engine and reported with the answer."""
    max_tokens: int = 256
    """Longest answer in tokens, EOS included."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer; the text ends before the first of them."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the answer, besides the model's own EOS."""
    ignore_eos: bool = False
    """EOS is a token like any other."""
    time_budget: float | None = None
    """Soft limit in seconds from arrival; checked between rounds."""
    logprobs: bool = False
    """Report the log-probability of every answer token under the target law (after temperature and truncation)."""
    return_particles: bool = False
    """Report every particle's answer with its weight; where a method has no particles, its answer alone."""

    def __post_init__(self) -> None:
        if self.method is None:
            object.__setattr__(self, "method", Method.EXACT if _is_number(self.temperature) and self.temperature == 0 else Method.SMC)
        if self.method not in tuple(Method):
            raise ValueError(f"method={self.method!r}; allowed: {', '.join(m.value for m in Method)}")
        object.__setattr__(self, "method", Method(self.method))
        self._fill_defaults()
        if self.method is Method.DRAFT and self.logprobs:
            raise ValueError("logprobs=True has no effect with method='draft', where the target does not run; leave it out")
        if self.method is Method.DRAFT and self.guidance_scale != 1:
            raise ValueError(
                f"guidance_scale={self.guidance_scale!r} has no effect with method='draft', where the target does not run; leave it out"
            )
        self._check_numbers()
        if self.method is Method.SMC:
            self._check_smc()
        self._check_stops()

    @property
    def rows(self) -> int:
        """Sequences decoded side by side: the particles, or 1."""
        return self.particles or 1

    @property
    def guided(self) -> bool:
        """Every row has a companion at the target."""
        return self.guidance_scale != 1

    @property
    def slots_per_row(self) -> int:
        """A companion takes one, too."""
        return 2 if self.guided else 1

    @property
    def least_rows(self) -> int:
        """As few as the request allows: of exact decoding one will do."""
        return 1 if self.method is Method.EXACT else self.min_particles or self.rows

    def _fill_defaults(self) -> None:
        """What the method needs and was not given; what was given and has no effect is refused."""
        resamples = self.ess_threshold is not None or self.resampling is not None
        population = "independent" if resamples else "distinct"
        smc_only = {"population": population, "alpha": 1.0, "draft_temperature": self.temperature, "min_particles": None}
        independent_only = {"ess_threshold": 0.5, "resampling": "systematic"}
        is_smc = self.method is Method.SMC
        is_independent = is_smc and (self.population == "independent" or (self.population is None and resamples))
        where = f"method={self.method.value!r}"
        for names, has_effect, said in (
            ({"particles": 8}, is_smc or self.method is Method.EXACT, where),
            (smc_only, is_smc, where),
            (independent_only, is_independent, "population='distinct'" if is_smc else where),
        ):
            for name, default in names.items():
                given = getattr(self, name)
                if given is not None and not has_effect:
                    raise ValueError(f"{name}={given!r} has no effect with {said}; leave it out")
                if given is None and has_effect:
                    object.__setattr__(self, name, default)

    def _check_smc(self) -> None:
        least = self.min_particles
        _require(
            "min_particles",
            least,
            least is None or (_is_int(least) and 1 <= least <= self.particles),
            f"1..{self.particles}, the particles",
        )
        _require("population", self.population, self.population in POPULATIONS, ", ".join(POPULATIONS))
        greedy = "> 0 with method='smc'; for greedy decoding, method='exact'"
        _require("temperature", self.temperature, _is_number(self.temperature) and self.temperature > 0, greedy)
        _require("draft_temperature", self.draft_temperature, _is_scale(self.draft_temperature), SCALES)
        _require("alpha", self.alpha, _is_scale(self.alpha), SCALES)
        if self.population == "distinct":
            return
        threshold = self.ess_threshold
        _require("ess_threshold", threshold, _is_number(threshold) and 0 <= threshold <= 1, "0..1 (0 = never resample)")
        _require("resampling", self.resampling, self.resampling in SCHEME_NAMES, ", ".join(SCHEME_NAMES))

    def _check_numbers(self) -> None:
        n = self.particles
        _require("particles", n, n is None or (_is_int(n) and 1 <= n <= MAX_PARTICLES), f"1..{MAX_PARTICLES}")
        greedy = _is_number(self.temperature) and self.temperature == 0
        _require("temperature", self.temperature, greedy or _is_scale(self.temperature), f"{SCALES}; or 0 = greedy")
        _require("top_k", self.top_k, _is_int(self.top_k) and 0 <= self.top_k < 2**31, ">= 0 (0 = off), < 2**31")
        _require("top_p", self.top_p, _is_number(self.top_p) and 0 < self.top_p <= 1, "0 < top_p <= 1")
        _require("min_p", self.min_p, _is_number(self.min_p) and 0 <= self.min_p < 1, "0 <= min_p < 1")
        scale = self.guidance_scale
        _require("guidance_scale", scale, _is_number(scale) and 1 <= scale <= MAX_GUIDANCE, f"1 to {MAX_GUIDANCE:g} (1 = none)")
        _require("max_tokens", self.max_tokens, _is_int(self.max_tokens) and self.max_tokens >= 1, ">= 1")
        seed_ok = self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**63)
        _require("seed", self.seed, seed_ok, "a 64-bit signed integer")
        budget = self.time_budget
        _require("time_budget", budget, budget is None or (_is_number(budget) and budget > 0), "> 0 seconds")

    def _check_stops(self) -> None:
        for name, values, kind, say in (
            ("stop", self.stop, str, "non-empty strings"),
            ("stop_token_ids", self.stop_token_ids, int, "token ids >= 0"),
        ):
            if isinstance(values, str) or not isinstance(values, (list, tuple)):
                raise ValueError(f"{name}={values!r}; allowed: a list of {say}")
            check_stop_count(name, len(values))
            bad = [v for v in values if not isinstance(v, kind) or isinstance(v, bool) or v == "" or (kind is int and v < 0)]
            if bad:
                raise ValueError(f"{name} contains {bad[0]!r}; allowed: {say}")
            object.__setattr__(self, name, tuple(values))
        # Characters are cheaper to count than bytes, and there are no more of them.
        if (size := sum(map(len, self.stop))) <= MAX_STOP_BYTES:
            try:
                size = sum(len(text.encode()) for text in self.stop)
            except UnicodeEncodeError as error:  # a lone surrogate
                raise ValueError(f"stop contains {error.object!r}, which has no UTF-8 form; allowed: valid Unicode") from error
        if size > MAX_STOP_BYTES:
            raise ValueError(f"stop has strings of {size} bytes together; allowed: at most {MAX_STOP_BYTES}")


@dataclass(frozen=True)
class Statistics:
    """What the rows of one request went through: its particles, or of exact decoding those of the tree."""

    particles: int
    rounds: int = 0
    resamples: int = 0
    collapses: int = 0
    """Rounds after which every weight was zero and all were set equal. Above 0 the answer is not to be trusted."""
    particles_left: int = 0
    """Particles at the end: fewer than `particles` where memory was short and the request allowed it, or costs had it so (`exact`)."""
    preemptions: int = 0
    """How often the request gave up its memory to others and was taken up again."""
    mean_ess: float = 0.0
    """Effective sample size before resampling, averaged over rounds; between 1 and N."""
    min_ess: float = 0.0
    log_z: float = 0.0
    """log Z-hat, of the estimate of the target's total mass on answers: its exponential has expectation 1 at alpha = 1."""
    draft_tokens: int = 0
    """Tokens drawn by the draft, over all particles and branches."""
    target_tokens: int = 0
    """Positions run through the target after the prompt, over all particles."""
    committed_lag: float = 0.0
    """Tokens between the committed prefix and the longest particle, averaged over rounds."""
    accepted_per_round: float = 0.0
    """Of exact decoding: answer tokens that a round confirmed, on average. The first token comes with the prompt, in no round."""
    hits: int = 0
    """Of exact decoding ahead: rounds after which what had been drafted went on as the target did."""
    misses: int = 0
    """The other rounds: the draft began anew from the target's token."""
    alone_rounds: int = 0
    """Of exact decoding: rounds in which nothing was drafted, and the target decoded alone. They count in none of the three before."""
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
    """Of every token under the target law, if asked for; NaN for one that was streamed and not weighed before time was up."""
    error: str | None = None
    cached_tokens: int = 0
    """Prompt tokens that had been computed for another request."""
    times: Times = field(default=Times(), compare=False)
    particles: tuple[Particle, ...] | None = None
    """If asked for; the answer was drawn among them by weight. Two may be the same, of independent particles; where nothing was decoded
    there are none."""


@dataclass(frozen=True)
class Output:
    """News of one request: tokens and text that can no longer change, and at the end the answer."""

    request_id: str
    tokens: tuple[int, ...] = ()
    text: str = ""
    answer: Answer | None = None


@dataclass(frozen=True)
class Request:
    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""
    """Prompts share what has been computed for them only with prompts of the same salt."""
    waited: float = 0.0
    """Seconds between its arrival and its submission."""
    negative_prompt: tuple[int, ...] | None = None
    """What a guided request is led away from; None: the token that begins texts."""

    @property
    def negative_size(self) -> int:
        """Tokens of the negative prompt; 0: it is not guided."""
        return 0 if not self.params.guided else 1 if self.negative_prompt is None else len(self.negative_prompt)


def check_stop_count(name: str, count: int) -> None:
    """Of `stop` or `stop_token_ids`. Raises ValueError for more than are allowed."""
    most, what = {"stop": (MAX_STOPS, "strings"), "stop_token_ids": (MAX_STOP_IDS, "ids")}[name]
    if count > most:
        raise ValueError(f"{name} has {count} {what}; allowed: at most {most}")


def _require(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r}; allowed: {allowed}")


def _is_number(value: object) -> bool:
    """Finite, and not larger than a float can be, as an integer from JSON may be."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_scale(value: object) -> bool:
    return _is_number(value) and SMALLEST <= value <= LARGEST


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
