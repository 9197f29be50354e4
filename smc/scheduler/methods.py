"""Methods of decoding: what each asks of the models in a round, what it may hold, and how its answer grows.

Everything in which methods differ on the scheduler's side is here. Other files of the scheduler call these verbs and
never ask which method a request has.

Axes: N rows of one request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from smc.algorithm.expansion import PopulationKind
from smc.algorithm.resampling import log_mean_weight, normalise
from smc.algorithm.selection import final_weights
from smc.api.engine_config import EngineConfig
from smc.api.sampling_params import Method, SamplingParams
from smc.executor.plan import Program
from smc.scheduler.slots import Checkpoint, RandomKeys, ShrunkCheckpoint, expand_rows, select_rows
from smc.scheduler.speculation import Acceptance
from smc.scheduler.stats import EngineStats, RequestCounters
from smc.types import ModelRole

ROUNDS_IN_FLIGHT = 2
"""Rounds of one request that may be in flight at once: the one that is read, and the next."""


@dataclass(frozen=True)
class PagesPerRow:
    """KV pages that a round allocates for each row."""

    target: int = 0
    """Tokens that the target runs."""
    begin: int = 0
    """Pending tokens that the draft, or the model that decodes alone, begins with."""
    branches: int = 0
    branch: int = 0
    """Tokens of each branch that are run within the round."""

    def scored(self, steps: int | None) -> int:
        """Tokens that the target runs where so many are drafted of every row; None: all of a block."""
        return self.target if steps is None else min(self.target, steps + 1)


class Progress(NamedTuple):
    """How far a particle is."""

    length: int
    """Tokens of its answer."""
    block: int
    """Index at which the block in flight begins."""
    ended: bool
    rounds: int
    """Rounds that its request has had."""


class CountedRequest(Protocol):
    """What a method counts rounds in: `smc.scheduler.sequence_group.SequenceGroup`."""

    slots: np.ndarray
    lag: int
    log_z: float
    error: str | None
    acceptance: Acceptance
    counters: RequestCounters

    @property
    def params(self) -> SamplingParams: ...


class RoundFacts(NamedTuple):
    """What one round did to one request."""

    ess: float
    log_z: float
    resampled: bool
    collapsed: bool
    confirmed: int
    """Answer tokens that became certain."""
    rows: int
    block: int
    """Tokens that were drafted for each row, at most."""
    ahead: bool
    """The round drafted the next block while the target scored this one."""
    hit: bool
    """What had been drafted ahead continued the target's own tokens."""
    whole: bool
    """A block was right to its end."""
    open: bool
    """A row of the request has not ended."""


class Decoding(ABC):
    """How requests of one method are decoded."""

    program: Program
    """Rounds that its requests take part in."""
    roles: tuple[ModelRole, ...]
    """Models that run its prompts."""
    first: ModelRole
    """The model whose distribution the first token is drawn from."""
    kind = PopulationKind.INDEPENDENT
    """How rows are continued."""
    coupled = False
    """Drafted rows are coupled to the target's draws (`smc.algorithm.coupling`)."""
    needs_every_mask = True
    """Of a constrained request the draft must propose what is allowed, in every step."""
    resizable = False
    """The caller, or a shortage of pages, may change the number of particles."""

    @property
    def without_draft(self) -> Decoding | None:
        """How its requests go on while there is no draft; None: they cannot."""
        return None if ModelRole.DRAFT in self.roles else self

    def adaptive(self, params: SamplingParams) -> bool:
        """Whether the number of rows, or whether anything is drafted, decides the speed of a request and nothing
        else."""
        return False

    def rows(self, params: SamplingParams) -> int:
        """Sequences of a request that are decoded in parallel."""
        return params.rows

    def chains(self, rows: int) -> int:
        """Draft chains among so many rows whose token distributions are stored."""
        return 0

    def draft_temperature(self, params: SamplingParams) -> float:
        return params.temperature if params.draft_temperature is None else params.draft_temperature

    @abstractmethod
    def stride(self, config: EngineConfig) -> int:
        """Tokens by which an open answer grows in a round, at most."""

    def known_tokens(self, config: EngineConfig, *, length: int, block: int, rounds: int) -> int:
        """Tokens of an open answer that will have been scored after so many in-flight rounds: of `length` now, the
        block in flight from index `block` on."""
        return length + self.stride(config) * rounds

    def ahead(self, config: EngineConfig) -> bool:
        """Whether the tokens of a round are scored in the next one."""
        return False

    def settled(self, length_N: np.ndarray, block_N: np.ndarray) -> np.ndarray:
        """Leading tokens of each row that later rounds cannot take back."""
        return length_N

    def drafting(self, open_A: np.ndarray, any_open_A: np.ndarray) -> np.ndarray:
        """Rows that the draft extends in a round, of those that are open and of those whose request has an open row."""
        return open_A

    def alive(self, logw_N: np.ndarray) -> np.ndarray:
        """Which rows hold a particle."""
        return np.ones(len(logw_N), dtype=bool)

    def living(self, slots_N: np.ndarray, logw_N: np.ndarray) -> np.ndarray:
        """Slots whose particles differ from all others of the request."""
        return slots_N[self.alive(logw_N)]

    def kept_rows(self, alive_N: np.ndarray, rows: int) -> np.ndarray:
        """Which rows stay after the round that leaves a request so many."""
        return alive_N

    @abstractmethod
    def shape(self, config: EngineConfig) -> PagesPerRow:
        """Pages of a row in a round."""

    @abstractmethod
    def held_tokens(self, config: EngineConfig, role: ModelRole, particle: Progress) -> int:
        """Answer tokens of a particle that a model has keys and values of. An ended particle needs none at the draft,
        or where one model decodes alone."""

    def round_pages(self, config: EngineConfig, rows: int, guided: Collection[ModelRole] = ()) -> dict[ModelRole, int]:
        """Pages that one round allocates in each pool: the first model drafts, or decodes alone. A `guided` model needs
        as many again."""
        shape = self.shape(config)
        drafting, *scoring = self.roles
        pages = {drafting: rows * (shape.begin + shape.branches * shape.branch)} | dict.fromkeys(
            scoring, rows * shape.target
        )
        return {role: count * (1 + (role in guided)) for role, count in pages.items()}

    def most_pages(
        self, config: EngineConfig, params: SamplingParams, prompt: int, rows: int | None = None, negative: int = 0
    ) -> dict[ModelRole, int]:
        """Pages that so many particles of a request, by default as few as it allows, may hold at once if they share
        nothing of their answers. `prompt`, `negative`: tokens of its prompts."""
        n, answer = rows or params.least_rows, params.max_tokens
        few, all_rows = (self.round_pages(config, size, params.guided_roles) for size in (n, self.rows(params)))
        begins, answers = self._prompts(params, prompt, negative), self._sequences(params, n * answer)
        most = {
            role: max(answers[role] + ROUNDS_IN_FLIGHT * few[role], ROUNDS_IN_FLIGHT * all_rows[role])
            for role in self.roles
        }
        return {role: begins[role] + most[role] for role in self.roles}

    def ample_pages(
        self, config: EngineConfig, params: SamplingParams, prompt: int, negative: int = 0
    ) -> dict[ModelRole, int]:
        """Pages with which no round of all its rows waits for any. `most_pages` suffices if rounds may run one after
        the other."""
        most = self.most_pages(config, params, prompt, negative=negative)
        few, all_rows = (
            self.round_pages(config, n, params.guided_roles) for n in (params.least_rows, self.rows(params))
        )
        return {role: pages + ROUNDS_IN_FLIGHT * (all_rows[role] - few[role]) for role, pages in most.items()}

    def expected_pages(
        self,
        config: EngineConfig,
        params: SamplingParams,
        prompt: int,
        rows: int,
        answer: int,
        own: int,
        negative: int = 0,
    ) -> dict[ModelRole, int]:
        """Pages that `rows` particles are likely to hold, where each but the first shares all but `own` of the `answer`
        tokens."""
        rounds, begins = self.round_pages(config, rows, params.guided_roles), self._prompts(params, prompt, negative)
        held = self._sequences(params, answer + own * (rows - 1))
        most = self.most_pages(config, params, prompt, self._rows_apart(rows), negative)
        likely = {role: begins[role] + held[role] + ROUNDS_IN_FLIGHT * rounds[role] for role in self.roles}
        return {role: min(pages, max(most[role], begins[role])) for role, pages in likely.items()}

    def _rows_apart(self, rows: int) -> int | None:
        """Rows whose answers may share nothing, of so many; None: as few as the request allows."""
        return rows

    def _prompts(self, params: SamplingParams, prompt: int, negative: int) -> dict[ModelRole, int]:
        """Tokens of prompts at each model."""
        return {role: prompt + negative * (role in params.guided_roles) for role in self.roles}

    def _sequences(self, params: SamplingParams, tokens: int) -> dict[ModelRole, int]:
        """Pages of so many answer tokens at each model, with those of unconditional rows."""
        return {role: tokens * (1 + (role in params.guided_roles)) for role in self.roles}

    def log_z(self, logw_N: np.ndarray, count: int) -> float:
        """Log of what a population's weights estimate of the target's total mass on answers."""
        return 0.0

    def population(self, logw_N: np.ndarray) -> list[tuple[int, float]]:
        """Particles and their normalised weights; empty where a method has no population."""
        return []

    def count_round(self, group: CountedRequest, facts: RoundFacts, stats: EngineStats, acceptance: Acceptance) -> None:
        """Record what a round did: for the request, and in the stats and the acceptance of the whole engine."""
        return

    def trim_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Drop from a checkpoint what the request must not go on from."""
        return

    def shrink(self, checkpoint: Checkpoint, rows: int, params: SamplingParams, keys: RandomKeys) -> ShrunkCheckpoint:
        """A smaller saved population, by the unbiased choice of a round."""
        return select_rows(checkpoint, rows, params.resampling, keys)


class DraftTargetDecoding(Decoding):
    """The draft proposes, the target accepts."""

    program = Program.PAIR
    roles = (ModelRole.DRAFT, ModelRole.TARGET)
    first = ModelRole.TARGET

    def stride(self, config: EngineConfig) -> int:
        return config.block if config.lookahead else config.block + 1

    def ahead(self, config: EngineConfig) -> bool:
        return config.lookahead

    def shape(self, config: EngineConfig) -> PagesPerRow:
        return PagesPerRow(config.target_tokens, config.begin_tokens, config.branches, config.block - 1)

    def held_tokens(self, config: EngineConfig, role: ModelRole, particle: Progress) -> int:
        if role is ModelRole.TARGET:
            return particle.block
        # In lockstep, after its first round, neither the draft's last token nor the bonus.
        pending = config.begin_tokens if particle.rounds else 1
        return 0 if particle.ended else max(particle.length - pending, 0)


class Independent(DraftTargetDecoding):
    """Particles draw for themselves and are resampled: `smc.algorithm.selection`."""

    resizable = True

    def known_tokens(self, config: EngineConfig, *, length: int, block: int, rounds: int) -> int:
        if not config.lookahead:
            return super().known_tokens(config, length=length, block=block, rounds=rounds)
        # What was drafted in a round is scored in the next.
        return length + self.stride(config) * (rounds - 1) if rounds else block

    def settled(self, length_N: np.ndarray, block_N: np.ndarray) -> np.ndarray:
        # What the target has not scored is taken back if no particle has weight then.
        return np.minimum(length_N, block_N + 1)

    def log_z(self, logw_N: np.ndarray, count: int) -> float:
        return log_mean_weight(normalise(torch.from_numpy(logw_N)[None])[1], torch.tensor([count])).item()

    def population(self, logw_N: np.ndarray) -> list[tuple[int, float]]:
        return list(enumerate(final_weights(torch.from_numpy(logw_N)).tolist()))

    def count_round(self, group: CountedRequest, facts: RoundFacts, stats: EngineStats, acceptance: Acceptance) -> None:
        group.counters.count_population(facts.ess, facts.resampled, facts.collapsed)
        group.log_z += facts.log_z
        stats.count_round(self._ess_share(facts.ess, len(group.slots)), group.lag, facts.resampled, facts.collapsed)

    def _ess_share(self, ess: float, particles: int) -> float | None:
        """Effective sample size before resampling, as a share of the particles."""
        return ess / particles


class Competing(DraftTargetDecoding):
    """Rows are assigned among all of a request, so that a row may be without a particle: it then repeats another, and
    has no weight: `smc.algorithm.expansion`."""

    def alive(self, logw_N: np.ndarray) -> np.ndarray:
        return logw_N > -np.inf

    def kept_rows(self, alive_N: np.ndarray, rows: int) -> np.ndarray:
        # It has fewer particles than it may have, whenever there were no more.
        return alive_N | (np.cumsum(~alive_N) <= rows - alive_N.sum())

    def drafting(self, open_A: np.ndarray, any_open_A: np.ndarray) -> np.ndarray:
        return any_open_A

    def shrink(self, checkpoint: Checkpoint, rows: int, params: SamplingParams, keys: RandomKeys) -> ShrunkCheckpoint:
        return expand_rows(checkpoint, rows, self.kind, keys)


class Distinct(Competing, Independent):
    """Particles are drawn without replacement."""

    kind = PopulationKind.DISTINCT

    def log_z(self, logw_N: np.ndarray, count: int) -> float:
        return normalise(torch.from_numpy(logw_N)[None])[1].item()

    def population(self, logw_N: np.ndarray) -> list[tuple[int, float]]:
        # Rows without weight are without a particle, too.
        return [(n, weight) for n, weight in super().population(logw_N) if weight]

    def _ess_share(self, ess: float, particles: int) -> float | None:
        # Distinct particles are of unequal weight by construction: their effective number says little.
        return None


class Exact(Competing):
    """The target draws its own tokens; what was drafted decides how many at a time: `smc.algorithm.verification`.
    Only what the target has drawn is part of the answer: what all rows agree on may still be taken back."""

    kind = PopulationKind.BEST
    coupled = True
    needs_every_mask = False

    @property
    def without_draft(self) -> Decoding | None:
        return TARGET_ALONE

    def adaptive(self, params: SamplingParams) -> bool:
        # A guided request runs two positions for one, which the latency model does not cover.
        return not params.guided

    def draft_temperature(self, params: SamplingParams) -> float:
        # Greedy decoding drafts at 1: a distribution with all mass on one token has no second row.
        return super().draft_temperature(params) or 1.0

    def known_tokens(self, config: EngineConfig, *, length: int, block: int, rounds: int) -> int:
        return (block if config.lookahead else length) + rounds

    def settled(self, length_N: np.ndarray, block_N: np.ndarray) -> np.ndarray:
        return block_N + 1

    def living(self, slots_N: np.ndarray, logw_N: np.ndarray) -> np.ndarray:
        # Rows differ in nothing that is confirmed.
        return super().living(slots_N, logw_N)[:1]

    def held_tokens(self, config: EngineConfig, role: ModelRole, particle: Progress) -> int:
        # When resumed, one sequence goes on from its last confirmed token.
        return particle.length - 1

    def _rows_apart(self, rows: int) -> int | None:
        # Rows share all but what has not been confirmed.
        return None

    def count_round(self, group: CountedRequest, facts: RoundFacts, stats: EngineStats, acceptance: Acceptance) -> None:
        if group.error:
            return
        confirmed, block, ahead, hit = facts.confirmed, facts.block, facts.ahead, facts.hit
        group.counters.count_tree(confirmed, facts.rows, ahead, hit)
        if self.adaptive(group.params) and facts.open:
            for counted in (group.acceptance, acceptance):
                missed = not (hit and facts.whole) if ahead else confirmed <= block
                counted.count(min(confirmed, block), missed, facts.rows)
                if ahead and not facts.whole:
                    counted.count_broken(hit)
        # The token that the target draws after them is its own, unless rows that begin with it had been drafted ahead.
        accepted = confirmed if hit else max(confirmed - 1, 0)
        verification = group.params.verification
        assert verification is not None, "the verification of exact decoding is filled in"
        stats.spec[verification].count(accepted, block, facts.rows, ahead, hit)

    def trim_checkpoint(self, checkpoint: Checkpoint) -> None:
        confirmed_N = checkpoint["block_S"] + 1
        checkpoint["ended_S"][:] &= checkpoint["length_S"] == confirmed_N
        checkpoint["length_S"][:] = confirmed_N
        checkpoint["logw_S"][:] = 0.0


class Rejection(Exact):
    """The draft's tokens are kept or replaced, so that the target's distribution comes out: `smc.algorithm.verification`.
    Answers depend on how many chains there are, so there are always as many as were requested."""

    kind = PopulationKind.CHAINS
    coupled = False

    def adaptive(self, params: SamplingParams) -> bool:
        return False

    def chains(self, rows: int) -> int:
        return rows

    def most_pages(
        self, config: EngineConfig, params: SamplingParams, prompt: int, rows: int | None = None, negative: int = 0
    ) -> dict[ModelRole, int]:
        # In look-ahead, chains that are equal go on from pages of their own as long as all are right; what the last
        # round that was read has left of the others is not more than it was given.
        chains = self.rows(params)
        rounds, copies = self.round_pages(config, chains, params.guided_roles), chains if config.lookahead else 1
        begins, answers = self._prompts(params, prompt, negative), self._sequences(params, copies * params.max_tokens)
        return {role: begins[role] + answers[role] + (ROUNDS_IN_FLIGHT + 1) * rounds[role] for role in self.roles}


class SingleModelDecoding(Decoding):
    """One model decodes by itself, token after token."""

    def __init__(self, role: ModelRole) -> None:
        self.program, self.roles, self.first = Program(role), (role,), role

    def rows(self, params: SamplingParams) -> int:
        return 1

    def stride(self, config: EngineConfig) -> int:
        return config.block

    def shape(self, config: EngineConfig) -> PagesPerRow:
        return PagesPerRow(begin=1, branches=1, branch=config.block - 1)

    def held_tokens(self, config: EngineConfig, role: ModelRole, particle: Progress) -> int:
        return 0 if particle.ended else particle.length - 1


TARGET_ALONE = SingleModelDecoding(ModelRole.TARGET)
"""Plain decoding, and exact decoding while nothing is drafted: their draws are the same."""
DECODINGS: dict[tuple[Method, str | None], Decoding] = {
    (Method.SMC, "independent"): Independent(),
    (Method.SMC, "distinct"): Distinct(),
    (Method.EXACT, "walk"): Exact(),
    (Method.EXACT, "rejection"): Rejection(),
    (Method.TARGET, None): TARGET_ALONE,
    (Method.DRAFT, None): SingleModelDecoding(ModelRole.DRAFT),
}
"""By method and population, or verification."""
PROGRAMS: dict[Program, Decoding] = {decoding.program: decoding for decoding in DECODINGS.values()}
"""A decoding of every program: all of a program have rounds of the same shape."""


def decoding_of(params: SamplingParams) -> Decoding:
    """How a request is decoded, unless exact decoding falls back to `TARGET_ALONE`."""
    return DECODINGS[params.method, params.population or params.verification]


def program_of(method: Method) -> Program:
    """Rounds that requests of a method take part in."""
    return next(decoding.program for (name, _), decoding in DECODINGS.items() if name is method)
