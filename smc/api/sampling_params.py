"""Sampling parameters: how one request is decoded, as its user specifies it.

Settings are checked when the object is built; a setting that the chosen method would ignore is refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from smc.api.constraint import SCOPES, Constraint, check_constraint
from smc.api.limits import (
    DEFAULT_MAX_TOKENS,
    MAX_BAD_BYTES,
    MAX_BIASES,
    MAX_PARTICLES,
    MAX_STOP_BYTES,
    MAX_STOP_IDS,
    MAX_TOP_LOGPROBS,
    SCHEME_NAMES,
)
from smc.api.settings import (
    ALL,
    Biases,
    Holds,
    Items,
    OneOf,
    Setting,
    flag,
    integer,
    is_number,
    is_token,
    number,
    require,
    setting,
    settings_of,
)
from smc.once import warn_once
from smc.types import EXACT, OF_BOTH_MODELS, SMC, Decoding, ModelRole

logger = logging.getLogger(__name__)
MAX_STOPS = 64
MAX_BIAS = 100.0
"""Maximum absolute value of a change to a logit."""
POPULATIONS = ("distinct", "independent")
ANSWERS = ("draw", "best")
VERIFICATIONS = ("walk", "rejection")
SMALLEST, LARGEST = 1e-6, 1e6
"""Range of temperatures and of alpha: outside it, logits in float32 become infinite or NaN."""
MAX_GUIDANCE = 1e3
SCALES = f"> 0, from {SMALLEST:g} to {LARGEST:g}"


def is_scale(value: float) -> bool:
    return SMALLEST <= value <= LARGEST


def is_potential(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w.:-]{1,128}", value) is not None


class Method(StrEnum):
    """How a request is decoded."""

    SMC = "smc"
    EXACT = "exact"
    """The target's distribution, several tokens per round. Verified by walk (the default), the answer is that of
    `target`, but for near ties in some arithmetics (docs/quality.md)."""
    TARGET = "target"
    """Plain decoding by the target model: the baseline of performance and quality tables."""
    DRAFT = "draft"
    """Plain decoding by the draft model: the lower bound in quality tables."""

    @property
    def plain(self) -> bool:
        """Whether one model decodes alone, without the other."""
        return self in (Method.TARGET, Method.DRAFT)


DEFAULT_METHOD = Method.EXACT
"""Method of requests that name none, unless a service has another."""
_DECODINGS: dict[tuple[Method, str | None], Decoding] = {
    (Method.TARGET, None): Decoding.TARGET,
    (Method.DRAFT, None): Decoding.DRAFT,
    (Method.EXACT, "walk"): Decoding.WALK,
    (Method.EXACT, "rejection"): Decoding.REJECTION,
    (Method.SMC, "independent"): Decoding.INDEPENDENT,
    (Method.SMC, "distinct"): Decoding.DISTINCT,
}
"""Ways of decoding by method and by its verification or population."""
_VARIANTS = {Method.EXACT: "verification", Method.SMC: "population"}
"""Settings that choose between the ways of decoding of one method."""
_OF_METHOD = {
    method: frozenset(decoding for (one, _), decoding in _DECODINGS.items() if one is method) for method in Method
}


def methods_of(setting: Setting) -> tuple[Method, ...]:
    """Return the methods that a setting applies to, at least in part."""
    return tuple(method for method in Method if _OF_METHOD[method] & setting.decodings)


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Raises ValueError naming the field, the value and what is allowed.

    All properties of a field are defined here: commands, HTTP bodies and messages read them from `SETTINGS`.
    """

    method: Method = setting(
        DEFAULT_METHOD,
        OneOf(tuple(method.value for method in Method)),
        "exact: follow the target's distribution exactly; smc: approximate it, K tokens every round; "
        "target, draft: decode with one model alone.",
        "METHOD",
    )
    max_tokens: int = setting(
        DEFAULT_MAX_TOKENS,
        integer(lambda value: 1 <= value < 2**31, ">= 1, < 2**31"),
        "Maximum number of answer tokens, the end of text included. Default: 256, or the rest of the context if "
        "that is less.",
        "TOKENS",
    )
    seed: int | None = setting(
        None,
        integer(lambda value: -(2**63) <= value < 2**63, "a 64-bit signed integer"),
        "Seed of the random numbers: the same seed gives the same answer. Default: a random seed, which is reported.",
        "SEED",
    )
    temperature: float = setting(
        1.0,
        number(lambda value: value == 0 or is_scale(value), f"{SCALES}; or 0 = greedy"),
        "Temperature of the target distribution, and of the draft's unless --draft-temperature is given; 0 = "
        "greedy, not with --method smc, and exact decoding then drafts at 1. Default: 1.",
        "T",
    )
    top_k: int = setting(
        0,
        integer(lambda value: 0 <= value < 2**31, ">= 0 (0 = off), < 2**31"),
        "Keep only the K most likely tokens; 0 = all.",
        "K",
    )
    top_p: float = setting(
        1.0,
        number(lambda value: 0 < value <= 1, "0 < top_p <= 1"),
        "Keep only the most likely tokens whose probabilities sum to at least P; 1 = all.",
        "P",
    )
    min_p: float = setting(
        0.0,
        number(lambda value: 0 <= value < 1, "0 <= min_p < 1"),
        "Drop tokens less likely than P times the most likely token; 0 = none.",
        "P",
    )
    stop: tuple[str, ...] = setting(
        (),
        Items(lambda item: isinstance(item, str) and item != "", "non-empty strings", MAX_STOPS, "strings"),
        "A string that ends the answer, whose text ends before the earliest one; may be repeated.",
        "TEXT",
    )
    stop_token_ids: tuple[int, ...] = setting(
        (),
        Items(is_token, "token ids >= 0, < 2**31", MAX_STOP_IDS, "ids"),
        "A token id that ends the answer, besides the model's own; may be repeated.",
        "ID",
        names=("--stop-token-id",),
    )
    ignore_eos: bool = setting(False, flag(), "Continue after the model's end-of-text token.")
    min_tokens: int = setting(
        0,
        integer(lambda value: 0 <= value < 2**31, ">= 0, < 2**31"),
        "Minimum number of answer tokens: until then stop tokens are not drawn, and stop strings have no effect.",
        "TOKENS",
    )
    logit_bias: tuple[tuple[int, float], ...] = setting((), Biases(MAX_BIASES, MAX_BIAS))
    """Numbers added to both models' logits of these token ids, before temperature and truncation. Given as a mapping or
    as pairs; stored as pairs in ascending order of the ids, without zeros."""
    presence_penalty: float = setting(
        0.0,
        number(lambda value: -2 <= value <= 2, "-2..2 (0 = none)"),
        "Number subtracted from the logit of every token that the answer already contains, -2..2. Default: 0.",
        "P",
    )
    frequency_penalty: float = setting(
        0.0,
        number(lambda value: -2 <= value <= 2, "-2..2 (0 = none)"),
        "Number subtracted from a token's logit for each time that the answer contains it, -2..2. Default: 0.",
        "P",
    )
    repetition_penalty: float = setting(
        1.0,
        number(lambda value: 0.01 <= value <= 100, "0.01..100 (1 = none)"),
        "Number that divides positive and multiplies negative logits of tokens in the prompt or the "
        "answer, 0.01..100. Default: 1.",
        "R",
    )
    time_budget: float | None = setting(
        None,
        number(lambda value: value > 0, "> 0 seconds"),
        "Soft time limit from the request's arrival: it then ends with the answer decoded so far.",
        "SECONDS",
    )
    particles: int | None = setting(
        None,
        integer(lambda value: 1 <= value <= MAX_PARTICLES, f"1..{MAX_PARTICLES}"),
        "N, the number of particles, or with --method exact of rows or chains, 1..64. Default: 8.",
        "N",
        names=("--particles", "-n"),
        decodings=OF_BOTH_MODELS,
        fill=lambda params: 8,
    )
    verification: str | None = setting(
        None,
        OneOf(VERIFICATIONS),
        "walk: the target draws its own tokens and confirms drafted ones that match; rejection: drafted tokens are "
        "accepted or replaced, so that the answer follows the target's distribution. Default: walk.",
        "walk|rejection",
        decodings=EXACT,
        fill=lambda params: "walk",
    )
    min_particles: int | None = setting(
        None,
        None,
        "Minimum number of particles to keep when KV memory is short, 1..N. Default: all.",
        "N",
        decodings=SMC,
    )
    population: str | None = setting(
        None,
        OneOf(POPULATIONS),
        "distinct: particles are drawn without replacement; independent: each particle draws for itself, and all "
        "are resampled. Default: distinct, or independent if --ess-threshold or --resampling is given.",
        "distinct|independent",
        decodings=SMC,
        fill=lambda params: "independent" if params.resamples else "distinct",
    )
    ess_threshold: float | None = setting(
        None,
        number(lambda value: 0 <= value <= 1, "0..1 (0 = never resample)"),
        "Resample when the effective sample size is below this share of N; 0 = never. Only for independent "
        "particles. Default: 0.5.",
        "SHARE",
        decodings=frozenset({Decoding.INDEPENDENT}),
        fill=lambda params: 0.5,
    )
    resampling: str | None = setting(
        None,
        OneOf(SCHEME_NAMES),
        "Resampling scheme: systematic, stratified, residual, multinomial or ssp. Only for independent particles. "
        "Default: systematic.",
        "SCHEME",
        decodings=frozenset({Decoding.INDEPENDENT}),
        fill=lambda params: "systematic",
    )
    alpha: float | None = setting(
        None,
        number(is_scale, SCALES),
        "Power of the target's probability of whole answers: above 1 likely answers become likelier, whereas a "
        "lower temperature sharpens each token's distribution. Default: 1.",
        "A",
        decodings=SMC,
        fill=lambda params: 1.0,
    )
    potential: str | None = setting(
        None,
        Holds(is_potential, "the name of a potential, of letters, digits and any of _-.:"),
        "Multiply the weights of particles by this potential, a Python callable: MODULE:FUNCTION, or "
        "its name in a service's configuration.",
        "NAME",
        decodings=SMC,
    )
    """Name of a potential phi (`smc.potentials`): an answer's probability is proportional to its probability under the
    target times phi of the answer. SMC only; default: none."""
    answer: str | None = setting(
        None,
        OneOf(ANSWERS),
        "draw: the answer is a particle drawn by weight; best: it is the particle that is likeliest under the "
        "target, to the power of --alpha and times the potential. Default: draw.",
        "draw|best",
        decodings=SMC,
        fill=lambda params: "draw",
    )
    draft_temperature: float | None = setting(
        None,
        number(is_scale, SCALES),
        "Temperature of the draft's proposal; weights or acceptance correct for it. Default: --temperature, or 1 "
        "if that is 0.",
        "T",
        decodings=SMC | {Decoding.REJECTION},
        fill=lambda params: params.temperature or 1.0,
    )
    guidance_scale: float = setting(
        1.0,
        number(lambda value: 1 <= value <= MAX_GUIDANCE, f"1 to {MAX_GUIDANCE:g} (1 = none)"),
        "Strength of classifier-free guidance away from --negative-prompt, 1..1000; 1 = no guidance. Default: 1.",
        "S",
    )
    """s in the guided logits l_u + s (l_c - l_u), where l_c are the logits after the prompt and l_u those after the
    negative prompt; temperature and truncation follow. 1 = no guidance. A guided request takes two slots for each row,
    and twice the pages at the target. Not for method `draft`."""
    bad_words: tuple[str, ...] = setting(
        (),
        Items(
            lambda item: isinstance(item, str) and item.strip() != "",
            "strings that are not blank",
            MAX_STOPS,
            "strings",
        ),
        "A text that the answer must not contain; may be repeated.",
        "TEXT",
        names=("--bad-word",),
    )
    """Texts that the answer does not contain, whatever tokens they are written with, also within words: a token that
    would complete one is not drawn, unless a constraint allows no other. At most `MAX_BAD_BYTES` bytes together."""
    constraint: Constraint | None = setting(None, check_constraint)
    """Allowed answers: a `Constraint`, or an object with one of json_schema, json_object, regex, grammar and choice.
    The answer ends where the constraint allows it, or at `max_tokens`, a stop string or a stop token."""
    constraint_scope: str | None = setting(
        None,
        OneOf(SCOPES),
        "With a constraint. token: every token is drawn among those that are allowed; answer: the answer follows "
        "the target's distribution of whole answers, given the constraint. Default: token.",
        "token|answer",
        decodings=SMC,
        needs="constraint",
        fill=lambda params: "token",
    )
    logprobs: bool = setting(False, flag(), report=True)
    """Report the log-probability of every answer token under the target: under the softmax of its logits, or, with
    `EngineConfig.logprobs_mode` `processed`, under the distribution that the token was drawn from."""
    top_logprobs: int = setting(
        0, integer(lambda value: 0 <= value <= MAX_TOP_LOGPROBS, f"0..{MAX_TOP_LOGPROBS}"), report=True
    )
    """Also report this many of the likeliest tokens at every position of the answer, with their log-probabilities under
    the same distribution; requires `logprobs`. The answer is reported after it has run through the target once more, as
    a prompt does."""
    prompt_logprobs: int | None = setting(
        None, integer(lambda value: 0 <= value <= MAX_TOP_LOGPROBS, f"0..{MAX_TOP_LOGPROBS}"), report=True
    )
    """Report how likely the target finds every token of the prompt after the tokens before it, and this many of the
    likeliest tokens at its position: at temperature 1, without truncation, biases, penalties, constraint and guidance.
    The whole prompt runs through the target once more. Default: no such report."""
    return_particles: bool = setting(False, flag(), report=True)
    """Report every particle's answer with its weight; a method without particles reports its only answer."""

    def __post_init__(self) -> None:
        for name, known in SETTINGS.items():
            object.__setattr__(self, name, self._settled(name, known))
        object.__setattr__(self, "method", Method(self.method))
        self._check_together()
        self._check_bytes("stop", self.stop, MAX_STOP_BYTES)
        self._check_bytes("bad_words", self.bad_words, MAX_BAD_BYTES)

    @property
    def rows(self) -> int:
        """Sequences decoded in parallel: the number of particles, or 1."""
        return self.particles or 1

    @property
    def decoding(self) -> Decoding:
        """How the request is decoded: method, and population or verification, in one value."""
        return _DECODINGS[self.method, self.population or self.verification]

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens so far through a penalty."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def follows_tokens(self) -> bool:
        """Whether the models store the tokens of the request's rows, because logits depend on them."""
        return self.penalised or self.masked

    @property
    def masked(self) -> bool:
        """Whether the tokens so far decide which tokens may follow."""
        return self.constraint is not None or bool(self.bad_words)

    @property
    def follows_target(self) -> bool:
        """Whether answers follow the target's distribution itself, whose total mass is 1: not a power of it, nor its
        product with a potential, nor its restriction to answers that a constraint allows."""
        return self.alpha in (None, 1.0) and self.potential is None and self.constraint_scope != "answer"

    @property
    def keeps_logprobs(self) -> bool:
        """Whether the log-probability of every token is kept: it is reported, or decides which particle is the
        answer."""
        return self.logprobs or self.answer == "best"

    @property
    def guided(self) -> bool:
        """Whether every row has an unconditional row."""
        return self.guidance_scale != 1

    @property
    def guided_roles(self) -> tuple[ModelRole, ...]:
        """Models that run the unconditional rows; none without guidance."""
        return (ModelRole.TARGET,) if self.guided else ()

    @property
    def slots_per_row(self) -> int:
        """Slots that a row takes: an unconditional row takes one more."""
        return 2 if self.guided else 1

    @property
    def least_rows(self) -> int:
        """Minimum number of rows that the request allows. Exact decoding allows one, unless its draws depend on the
        number of rows (rejection)."""
        if self.method is Method.EXACT:
            return self.rows if self.verification == "rejection" else 1
        return self.min_particles or self.rows

    @property
    def resamples(self) -> bool:
        """Whether a resampling setting is given, which makes the particles independent."""
        return self.ess_threshold is not None or self.resampling is not None

    def _settled(self, name: str, known: Setting) -> Any:
        """Return the value of a field to store: fill in a value that the method needs and that was not given. Raises
        ValueError if the given value has no effect."""
        value = getattr(self, name)
        idle = self._idle(known)
        if value is None and known.optional:
            return known.fill(self) if known.fill and not idle else None
        if idle:
            remedy = ", or ".join([*self._remedies(known), "leave it out"])
            raise ValueError(f"{name}={value!r} has no effect with {idle}; {remedy}")
        return known.check(name, value) if known.check else value

    def _idle(self, known: Setting) -> str | None:
        """Return the choice that makes a setting ineffective, for an error message; None if it has an effect. Fields
        are declared after the fields that this depends on."""
        if known.decodings is ALL:
            return None
        own = _OF_METHOD.get(self.method, frozenset())
        if not own & known.decodings:
            return f"method={str(self.method)!r}"
        if known.needs and not getattr(self, known.needs):
            return f"no {known.needs}"
        if own <= known.decodings:
            return None
        name = _VARIANTS[self.method]
        return None if self.decoding in known.decodings else f"{name}={getattr(self, name)!r}"

    def _remedies(self, known: Setting) -> Iterator[str]:
        """Yield the choices with which a setting without effect would have one, for an error message. SMC is none at
        temperature 0."""
        first = "give "
        for method in methods_of(known):
            choices = [] if method == self.method else [f"method={method.value!r}"]
            if not _OF_METHOD[method] <= known.decodings:
                choices += [
                    f"{_VARIANTS[method]}={variant!r}"
                    for (one, variant), decoding in _DECODINGS.items()
                    if one is method and decoding in known.decodings
                ]
            if choices and (method is not Method.SMC or self.temperature != 0):
                yield first + " and ".join(choices)
                first = ""

    def _check_together(self) -> None:
        scored = "logprobs" if self.logprobs else "prompt_logprobs" if self.prompt_logprobs is not None else None
        if self.method is Method.DRAFT and scored:
            raise ValueError(
                f"{scored}={getattr(self, scored)} has no effect with method='draft', where the target does not run; "
                "leave it out"
            )
        if self.top_logprobs and not self.logprobs:
            raise ValueError(
                f"top_logprobs={self.top_logprobs} has no effect without logprobs; give logprobs=True, or leave it out"
            )
        if self.top_logprobs and self.penalised:
            raise ValueError(
                f"top_logprobs={self.top_logprobs} is not available with presence_penalty, frequency_penalty or "
                "repetition_penalty; leave one of them out"
            )
        if self.masked and self.top_logprobs:
            raise ValueError(
                f"top_logprobs={self.top_logprobs} is not available with a constraint or bad_words; leave one of "
                "them out"
            )
        if self.constraint and self.ignore_eos:
            raise ValueError("ignore_eos=True is not available with a constraint, whose end is EOS; leave it out")
        require(
            "min_tokens", self.min_tokens, self.min_tokens <= self.max_tokens, f"0..{self.max_tokens}, the max_tokens"
        )
        if self.method is Method.DRAFT and self.guided:
            scale = self.guidance_scale
            raise ValueError(
                f"guidance_scale={scale!r} has no effect with method='draft', where the target does not run; "
                "leave it out"
            )
        if self.method is not Method.SMC:
            return
        require(
            "temperature",
            self.temperature,
            self.temperature > 0,
            "> 0 with method='smc'; for greedy decoding, method='exact'",
        )
        if self.min_particles is not None:
            integer(lambda value: 1 <= value <= self.particles, f"1..{self.particles}, the particles")(
                "min_particles", self.min_particles
            )

    def _check_bytes(self, name: str, texts: tuple[str, ...], most: int) -> None:
        # Counting characters is cheaper than counting bytes, and a text has at least as many bytes.
        if (size := sum(map(len, texts))) <= most:
            try:
                size = sum(len(text.encode()) for text in texts)
            except UnicodeEncodeError as error:  # a lone surrogate
                raise ValueError(
                    f"{name} contains {error.object!r}, which has no UTF-8 form; allowed: valid Unicode"
                ) from error
        if size > most:
            raise ValueError(f"{name} has strings of {size} bytes together; allowed: at most {most}")


SETTINGS = settings_of(SamplingParams)
"""Settings of the sampling fields, by name."""


def with_defaults(
    given: Mapping[str, Any], defaults: Mapping[str, Any], method: str = DEFAULT_METHOD
) -> dict[str, Any]:
    """Return the given settings, completed with defaults by name. A default that contradicts them is left out; the
    first time, the log says so. `method`: that of a request that gives none; at temperature 0, for which SMC is not
    defined, `smc` becomes `exact`."""
    temperature = given.get("temperature", defaults.get("temperature"))
    is_greedy = is_number(temperature) and temperature == 0
    settings = {"method": Method.EXACT if is_greedy and method == Method.SMC else method, **given}
    for name, value in defaults.items():
        if name not in given:
            try:
                SamplingParams(**{**settings, name: value})
            except ValueError:
                if _is_valid(settings):  # otherwise the request itself is wrong
                    warn_once(
                        logger,
                        "the model's generation_config.json has %s=%r by default, which contradicts what some requests "
                        "ask for; it is left out of those",
                        name,
                        value,
                    )
                continue
            settings[name] = value
    return settings


def _is_valid(settings: Mapping[str, Any]) -> bool:
    try:
        SamplingParams(**settings)
    except ValueError:
        return False
    return True
