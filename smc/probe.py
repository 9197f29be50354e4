"""Measures on a few prompts whether a draft suits a target: how close their distributions are, how many drafted tokens
exact decoding accepts, how well an SMC population represents the target, and the speed to expect on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smc.api.engine_config import EngineConfig
from smc.api.request import LEAST_GAIN, Answer, Request, fit_by_acceptance, fit_by_evidence
from smc.api.sampling_params import Method, SamplingParams
from smc.local_engine import ModelPair, local_engine
from smc.model.decoder import Decoder, RopeTable, hidden_states
from smc.scheduler.engine import Engine
from smc.scheduler.speculation import LatencyModel
from smc.scheduler.stats import ExactStats
from smc.scheduler.tree_policy import ThroughputForecast

PROMPTS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a list.",
    "Tell me a short story about a fox and a river.",
    "Name three famous painters and one work of each.",
    "Tom has 12 apples and gives 5 away. How many are left?",
    "Translate into French: Where is the station?",
)
TOKENS = 32
"""Maximum tokens of each answer."""
FIRST_TOKENS = 8
"""Tokens of one answer after which the first figures are reported."""
REPORT_SECONDS = 10.0
"""Seconds between two reports of how far a part is."""
SHARES = {"target": 0.4, "exact": 0.7, "smc": 0.9}
"""Part of the probe -> share of its seconds after which the part is cut."""
COSTS_SECONDS = 60.0
"""Seconds that must be left for the models to be timed, which cannot be cut."""
CONFIG = EngineConfig(form="lockstep", block=5, drafting="always")
"""In lockstep every round drafts from the target's own token: acceptance depends on the models, not on guesses
ahead."""


@dataclass(frozen=True)
class Probe:
    """Means over the target's own answers to the prompts, at one temperature."""

    temperature: float
    particles: int
    """N: rows of the tree, and particles."""
    block: int
    """K."""
    positions: int
    """Number of answer tokens at which both distributions were compared."""
    kl: float
    """KL divergence of the draft's distribution from the target's, in nats per token."""
    overlap: float
    """Sum over tokens of min(p, q)."""
    same_likeliest: float
    """Share of positions at which both models have the same likeliest token."""
    accepted_by_depth: tuple[float, ...]
    """Share of rounds of exact decoding in which the first, the first two, ... drafted tokens were accepted."""
    tokens_a_round: float | None
    """Tokens of a round of exact decoding, including the target's own; None, like the next: there was no time."""
    log_evidence: float | None
    """log Z-hat of SMC per token."""
    exact_speed: float | None
    """Expected speed of exact decoding by the latency model, for one request in lockstep on this machine, as a multiple
    of the target's alone; None: there is no latency model."""
    smc_speed: float | None
    """Expected speed of SMC, likewise."""

    @property
    def recommendation(self) -> tuple[str, ...]:
        """Advice on the method, one sentence for each of exact decoding and SMC that was measured."""
        return tuple(words for words in (self._of_exact(), self._of_smc()) if words)

    def _of_smc(self) -> str:
        if self.log_evidence is None:
            return ""
        words = fit_by_evidence(self.log_evidence, self.particles)
        enough = f"{self.particles} particles represent the target well enough for many weighted answers"
        return f"method=smc: {words or enough}."

    def _of_exact(self) -> str:
        if self.tokens_a_round is None:
            return ""
        if words := fit_by_acceptance(self.tokens_a_round - 1):
            return f"Use method=target: {words}."
        if self.exact_speed is None:
            return f"method=exact: a round brings {self.tokens_a_round:.1f} tokens."
        if self.exact_speed < LEAST_GAIN:
            return (
                f"Use method=target here: a round brings {self.tokens_a_round:.1f} tokens, but on this machine it "
                f"takes as long as the target alone needs for {self.tokens_a_round / self.exact_speed:.1f}."
            )
        return f"Use method=exact: about {self.exact_speed:.1f} times as fast as the target alone on this machine."


class ProbeClock:
    """The time that a probe may take, and its reports."""

    def __init__(self, seconds: float | None = None, report: Callable[[str], None] = lambda text: None) -> None:
        """`seconds` from now, None: unlimited. `report` gets each line of progress."""
        self._seconds, self._report = seconds, report
        self._begin = self._said = time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds since the probe began."""
        return time.monotonic() - self._begin

    @property
    def left(self) -> float | None:
        """Seconds that are left; None: unlimited."""
        return None if self._seconds is None else self._seconds - self.spent

    def over(self, part: str) -> bool:
        """Whether the share of a part has passed."""
        return self._seconds is not None and self.spent >= SHARES[part] * self._seconds

    def left_of(self, part: str) -> float | None:
        """Seconds that are left of the share of a part, at least a millisecond; None: unlimited."""
        return None if self._seconds is None else max(1e-3, SHARES[part] * self._seconds - self.spent)

    def say(self, text: str) -> None:
        self._said = time.monotonic()
        self._report(f"[{self.spent:5.1f} s] {text}")

    def say_now_and_then(self, text: str) -> None:
        if time.monotonic() - self._said >= REPORT_SECONDS:
            self.say(text)


def probe_pair(
    pair: ModelPair,
    prompts: Sequence[Sequence[int]],
    latency: Callable[[], LatencyModel | None],
    particles: int = 8,
    temperature: float = 1.0,
    clock: ProbeClock | None = None,
) -> Probe:
    """Run prompts, given as token ids, through both models and measure. `latency` is called at the end, if there is
    time. Raises ValueError if the draft or the prompts do not fit."""
    clock = clock or ProbeClock()
    params = SamplingParams(method=Method.TARGET, temperature=temperature, max_tokens=TOKENS)
    compared, spec, smc = _measure(pair, prompts, params, particles, clock)
    tokens = None if spec is None else spec.tokens_a_round
    kl, overlap, same = torch.stack(compared).mean(0).tolist()
    speeds: tuple[float | None, ...] = (None, None)
    if tokens is not None and (clock.left is None or clock.left >= COSTS_SECONDS):
        clock.say("timing both models, unless their latency is known")
        if (known := latency()) is not None:
            speeds = tuple(expected_speed(known, each, particles) for each in (tokens, CONFIG.block + 1.0))
    return Probe(
        temperature=temperature,
        particles=particles,
        block=CONFIG.block,
        positions=len(compared),
        kl=kl,
        overlap=overlap,
        same_likeliest=same,
        accepted_by_depth=() if spec is None or tokens is None else spec.accepted_by_depth,
        tokens_a_round=tokens,
        log_evidence=_log_evidence(smc),
        exact_speed=speeds[0],
        smc_speed=speeds[1],
    )


def _measure(
    pair: ModelPair, prompts: Sequence[Sequence[int]], params: SamplingParams, particles: int, clock: ProbeClock
) -> tuple[list[Tensor], ExactStats | None, list[Answer]]:
    """Return the comparisons of the target's answer tokens, the counters of exact decoding (None: there was no time)
    and the answers of SMC (none: likewise)."""
    longest = max(map(len, prompts)) + TOKENS
    slots = max(len(prompts), particles)
    engine = local_engine(
        pair, replace(CONFIG, max_slots=slots, max_context=min(longest + CONFIG.block, pair.max_context))
    )
    first = _answers(engine, prompts[:1], replace(params, max_tokens=min(FIRST_TOKENS, TOKENS)), "target", clock)
    clock.say(f"first look, {_in_words(list(_compare(pair, prompts, first, params.temperature)))}")
    answers = first if clock.over("target") else _answers(engine, prompts, params, "target", clock)
    compared = list(_compare(pair, prompts, answers, params.temperature))
    clock.say(f"all prompts, {_in_words(compared)}")
    engine.take_stats()
    spec, smc = None, []
    if not clock.over("exact"):
        _answers(engine, prompts, replace(params, method=Method.EXACT, particles=particles), "exact", clock)
        spec = engine.take_stats().exact["walk"]
        found = spec.tokens_a_round
        clock.say("exact decoding: " + ("no round was complete" if found is None else f"{found:.2f} tokens a round"))
    if not clock.over("smc"):
        drawn = replace(params, method=Method.SMC, particles=particles, population="distinct")
        smc = _answers(engine, prompts, drawn, "smc", clock)
    return compared, spec, smc


def _in_words(compared: Sequence[Tensor]) -> str:
    kl, overlap, same = torch.stack(list(compared)).mean(0).tolist()
    return (
        f"{len(compared)} answer tokens of the target: KL {kl:.2f} nats a token, overlap {overlap:.2f}, "
        f"same likeliest token {same:.0%}"
    )


def _log_evidence(answers: Sequence[Answer]) -> float | None:
    """log Z-hat a token; None if no answer had a round."""
    weighted = [answer for answer in answers if answer.statistics.rounds]
    tokens = sum(len(answer.tokens) for answer in weighted)
    return sum(answer.statistics.log_z for answer in weighted) / tokens if tokens else None


def _answers(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, part: str, clock: ProbeClock
) -> list[Answer]:
    """Answer all prompts; those that are not finished when the part's time has passed are cut. The target answers
    until it has a token. An answer of SMC that is cut is drawn from its particles, to which its evidence belongs."""
    is_target = params.method == Method.TARGET
    if not is_target:
        params = replace(params, time_budget=clock.left_of(part))
    for index, prompt in enumerate(prompts):
        engine.submit(Request(str(index), tuple(prompt), replace(params, seed=index)))
    found: dict[str, Answer] = {}
    count = 0
    while not engine.idle:
        for output in engine.step():
            count += len(output.tokens)
            if output.answer is not None:
                found[output.request_id] = output.answer
        clock.say_now_and_then(f"{part}: {count} tokens of at most {params.max_tokens * len(prompts)}")
        if is_target and count and clock.over(part):
            for index in range(len(prompts)):
                engine.abort(str(index))
    return [found[str(index)] for index in range(len(prompts))]


@torch.inference_mode()
def _compare(
    pair: ModelPair, prompts: Sequence[Sequence[int]], answers: Sequence[Answer], temperature: float
) -> Iterator[Tensor]:
    """Yield KL divergence, overlap and whether the likeliest tokens are equal, for every answer token."""
    for prompt, answer in zip(prompts, answers):
        tokens = [*prompt, *answer.tokens]
        logp_LV, logq_LV = (
            torch.log_softmax(_logits(model, tokens, len(prompt), pair.tokenizer.size) / (temperature or 1.0), -1)
            for model in (pair.target, pair.draft)
        )
        if pair.draft_head is not None:
            logq_LV = pair.draft_head.vocab.proposal(logq_LV)
        p_LV, q_LV = logp_LV.exp(), logq_LV.exp()
        kl_L = torch.where(p_LV > 0, p_LV * (logp_LV - logq_LV), 0.0).sum(-1)
        same_L = (logp_LV.argmax(-1) == logq_LV.argmax(-1)).float()
        yield from torch.stack((kl_L, torch.minimum(p_LV, q_LV).sum(-1), same_L), 1)


def _logits(model: Decoder, tokens: Sequence[int], first: int, vocab: int) -> Tensor:
    """Logits [L, V] on the CPU from which the tokens from `first` on were drawn."""
    device = model.embed.weight.device
    rope_LD = RopeTable(model.config, len(tokens), device).table
    (hidden_LE,) = hidden_states(model, rope_LD, torch.tensor([tokens], device=device))
    return model.logits(hidden_LE[first - 1 : -1])[:, :vocab].cpu()


def expected_speed(latency: LatencyModel, tokens: float, particles: int) -> float:
    """Expected speed of one request in lockstep whose rounds bring `tokens` tokens, as a multiple of plain
    decoding's."""
    drafted = ThroughputForecast(CONFIG, latency).seconds_of_round(particles)
    return tokens * latency.alone.at(1, 0) / drafted
