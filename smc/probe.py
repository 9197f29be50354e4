"""Measures on a few prompts whether a draft suits a target: how close their distributions are, how many drafted tokens
exact decoding accepts, how well an SMC population represents the target, and the speed to expect on this machine.

Axes: S positions of a text, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smc.api.engine_config import EngineConfig
from smc.api.request import LEAST_GAIN, Answer, Request, fit_by_acceptance, fit_by_evidence
from smc.api.sampling_params import Method, SamplingParams
from smc.local_engine import ModelPair, local_engine
from smc.model.decoder import Decoder, RopeTable, hidden_states
from smc.scheduler.engine import Engine
from smc.scheduler.round_plan import DraftSize
from smc.scheduler.speculation import LatencyModel
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
    tokens_a_round: float
    """Tokens of a round of exact decoding, including the target's own."""
    log_evidence: float
    """log Z-hat of SMC per token."""
    exact_speed: float | None
    """Expected speed of exact decoding by measured costs, for one request in lockstep on this machine, as a multiple of
    the target's alone; None: costs are unknown."""
    smc_speed: float | None
    """Expected speed of SMC, likewise."""

    @property
    def accepted(self) -> float:
        """Number of drafted tokens that a round of exact decoding accepts."""
        return self.tokens_a_round - 1

    @property
    def recommendation(self) -> tuple[str, ...]:
        """Advice on the method, one sentence for each of exact decoding and SMC."""
        exact, smc = self._of_exact(), fit_by_evidence(self.log_evidence, self.particles)
        return (
            exact,
            f"method=smc: {smc}."
            if smc
            else f"method=smc: {self.particles} particles represent the target well enough for many weighted answers.",
        )

    def _of_exact(self) -> str:
        if words := fit_by_acceptance(self.accepted):
            return f"Use method=target: {words}."
        if self.exact_speed is None:
            return f"method=exact: a round brings {self.tokens_a_round:.1f} tokens."
        if self.exact_speed < LEAST_GAIN:
            return (
                f"Use method=target here: a round brings {self.tokens_a_round:.1f} tokens, but on this machine it "
                f"takes as long as the target alone needs for {self.tokens_a_round / self.exact_speed:.1f}."
            )
        return f"Use method=exact: about {self.exact_speed:.1f} times as fast as the target alone on this machine."


def probe_pair(
    pair: ModelPair,
    prompts: Sequence[Sequence[int]],
    costs: LatencyModel | None,
    particles: int = 8,
    temperature: float = 1.0,
) -> Probe:
    """Run prompts, given as token ids, through both models and measure. Raises ValueError if the draft or the prompts
    do not fit."""
    longest = max(map(len, prompts)) + TOKENS
    slots = max(len(prompts), particles)
    engine = local_engine(
        pair, replace(CONFIG, max_slots=slots, max_context=min(longest + CONFIG.block, pair.max_context))
    )
    params = SamplingParams(method=Method.TARGET, temperature=temperature, max_tokens=TOKENS)
    answers = _answers(engine, prompts, params)
    compared = list(_compare(pair, prompts, answers, temperature))
    engine.take_stats()
    _answers(engine, prompts, replace(params, method=Method.EXACT, particles=particles))
    spec = engine.take_stats().spec["walk"]
    smc = _answers(engine, prompts, replace(params, method=Method.SMC, particles=particles, population="distinct"))
    tokens = spec.tokens_a_round or 1.0
    speeds = (
        (None, None)
        if costs is None
        else tuple(expected_speed(costs, each, particles) for each in (tokens, CONFIG.block + 1.0))
    )
    kl, overlap, same = torch.stack(compared).mean(0).tolist()
    return Probe(
        temperature=temperature,
        particles=particles,
        block=CONFIG.block,
        positions=len(compared),
        kl=kl,
        overlap=overlap,
        same_likeliest=same,
        accepted_by_depth=spec.accepted_by_depth,
        tokens_a_round=tokens,
        log_evidence=sum(answer.statistics.log_z for answer in smc) / sum(len(answer.tokens) for answer in smc),
        exact_speed=speeds[0],
        smc_speed=speeds[1],
    )


def _answers(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Answer]:
    requests = [Request(str(i), tuple(prompt), replace(params, seed=i)) for i, prompt in enumerate(prompts)]
    found = {output.request_id: output.answer for output in engine.run(requests) if output.answer is not None}
    return [found[request.request_id] for request in requests]


@torch.inference_mode()
def _compare(
    pair: ModelPair, prompts: Sequence[Sequence[int]], answers: Sequence[Answer], temperature: float
) -> Iterator[Tensor]:
    """Yield KL divergence, overlap and whether the likeliest tokens are equal, for every answer token."""
    for prompt, answer in zip(prompts, answers):
        tokens = [*prompt, *answer.tokens]
        logp_SV, logq_SV = (
            torch.log_softmax(_logits(model, tokens, len(prompt), pair.tokenizer.size) / (temperature or 1.0), -1)
            for model in (pair.target, pair.draft)
        )
        p_SV, q_SV = logp_SV.exp(), logq_SV.exp()
        kl_S = torch.where(p_SV > 0, p_SV * (logp_SV - logq_SV), 0.0).sum(-1)
        same_S = (logp_SV.argmax(-1) == logq_SV.argmax(-1)).float()
        yield from torch.stack((kl_S, torch.minimum(p_SV, q_SV).sum(-1), same_S), 1)


def _logits(model: Decoder, tokens: Sequence[int], first: int, vocab: int) -> Tensor:
    """Logits [S, V] on the CPU from which the tokens from `first` on were drawn."""
    device = model.embed.weight.device
    rope_SD = RopeTable(model.config, len(tokens), device).table
    (hidden_SE,) = hidden_states(model, rope_SD, torch.tensor([tokens], device=device))
    return model.logits(hidden_SE[first - 1 : -1])[:, :vocab].cpu()


def expected_speed(costs: LatencyModel, tokens: float, particles: int) -> float:
    """Expected speed of one request in lockstep whose rounds bring `tokens` tokens, as a multiple of plain
    decoding's."""
    drafted = ThroughputForecast(CONFIG, costs).seconds_of_round(particles, 0, 0.0, DraftSize(CONFIG.branches, None))
    return tokens * costs.alone.at(1, 0) / drafted
