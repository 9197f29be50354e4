"""Methods of decoding: what each asks of the models in a round, how many pages it may hold, and how its answer grows.

This file contains every difference between methods on the scheduler's side. Other files of the scheduler call these
functions and never ask which method a request has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from smc.algorithm.expansion import CandidateTokens, SourceRows, expand
from smc.algorithm.resampling import Bounds, Spans, log_mean_weight, normalise
from smc.algorithm.selection import final_weights, select
from smc.api.engine_config import EngineConfig
from smc.api.limits import SCHEME_NAMES
from smc.api.sampling_params import SamplingParams
from smc.philox import RoundKeys
from smc.scheduler.slots import Checkpoint, ShrunkCheckpoint
from smc.scheduler.speculation import Acceptance, Miss
from smc.scheduler.stats import EngineStats, RequestCounters
from smc.types import Decoding, ModelRole

ROUNDS_IN_FLIGHT = 2
"""Maximum rounds of one request in flight: the one whose result is read, and the next."""


@dataclass(frozen=True)
class PagesPerRow:
    """KV pages that a round allocates for each row."""

    target: int = 0
    """Tokens that the target runs."""
    begin: int = 0
    """Pending tokens that the draft, or the model that decodes alone, runs at the beginning of the round."""
    branches: int = 0
    branch: int = 0
    """Tokens of each branch that are run within the round."""


class Progress(NamedTuple):
    """How far a particle has advanced."""

    length: int
    """Tokens of its answer."""
    block: int
    """Index of the first token of the block in flight."""
    ended: bool
    rounds: int
    """Rounds that its request has had."""

    @property
    def over(self) -> bool:
        """Whether it has ended, and no part of its block is left that the target may refuse."""
        return self.ended and self.block == self.length - 1


class CountedRequest(Protocol):
    """The parts of a request that `DecodingRules.count_round` uses. `smc.scheduler.sequence_group.SequenceGroup` has
    them."""

    slots: np.ndarray
    lag: int
    log_z: float
    error: str | None
    acceptance: Acceptance
    counters: RequestCounters

    @property
    def params(self) -> SamplingParams: ...


class TreeFacts(NamedTuple):
    """What a round says about its tree, or about its population of rows. Many requests have the same in a round."""

    confirmed: int
    """Answer tokens that became certain."""
    rows: int
    hit: bool
    """Whether tokens drafted ahead continued what the target drew."""
    restarts: bool
    """Whether the round verified one token alone, since no rows drafted ahead had continued."""
    again: bool
    """Whether it verified a block that was drafted again for the same reason."""
    block: int
    """Maximum number of tokens that were drafted for a row."""
    branches: int
    """Rows that continued each row."""
    ahead: bool
    """Whether the round drafted the next block while the target scored the current one."""

    def add_to(self, acceptance: Acceptance, times: int = 1) -> None:
        """Count so many rounds with these facts."""
        confirmed, block, width = self.confirmed, self.block, (self.rows, self.branches)
        if not self.ahead:
            acceptance.count(min(confirmed, block), confirmed <= block, *width, block, times=times)
        elif self.restarts:
            acceptance.count_outcome(Miss.RESTART, not self.hit, *width, times)
        else:
            # The first token of a block is known.
            is_whole = confirmed >= block
            outcome = Miss.WHOLE if is_whole else Miss.PART, not self.hit
            tried = min(confirmed, block - 1)
            acceptance.count(tried, not is_whole, *width, block, again=self.again, outcome=outcome, times=times)


class RoundFacts(NamedTuple):
    """What one round did to one request."""

    ess: float
    log_z: float
    resampled: bool
    collapsed: bool
    open: bool
    """Whether a row of the request has not ended."""
    tree: TreeFacts


class DecodingRules(ABC):
    """How requests of one method are decoded."""

    decoding: Decoding
    first: ModelRole
    """The model whose distribution the first token is drawn from."""
    coupled = False
    """Whether drafted rows are coupled to the target's draws (`smc.algorithm.coupling`)."""
    redrafts = False
    """Whether the draft may draft again after a miss (`smc.executor.redraft`)."""
    needs_every_mask = True
    """Whether the draft, for a constrained request, must propose allowed tokens at every step."""
    resizable = False
    """Whether the caller, or a shortage of pages, may change the number of particles."""

    @property
    def roles(self) -> tuple[ModelRole, ...]:
        """Models that run its prompts, and take part in its rounds."""
        return self.decoding.roles

    @property
    def without_draft(self) -> DecodingRules | None:
        """How its requests continue while there is no draft; None: they cannot."""
        return None if ModelRole.DRAFT in self.roles else self

    def adaptive(self, params: SamplingParams) -> bool:
        """Whether the number of rows, and whether anything is drafted, affect only the speed of a request."""
        return False

    def rows(self, params: SamplingParams) -> int:
        """Number of sequences of a request that are decoded in parallel."""
        return params.rows

    def chains(self, rows: int) -> int:
        """Number of draft chains among `rows` rows for which token distributions are stored."""
        return 0

    def draft_temperature(self, params: SamplingParams) -> float:
        return params.temperature if params.draft_temperature is None else params.draft_temperature

    def block(self, config: EngineConfig) -> int:
        """K: number of tokens that a round drafts, at most."""
        return config.block

    @abstractmethod
    def stride(self, config: EngineConfig) -> int:
        """Maximum number of tokens by which an open answer grows in a round."""

    def known_tokens(self, config: EngineConfig, *, length: int, block: int, rounds: int) -> int:
        """Number of scored tokens of an open answer after all of its `rounds` in flight. `length`: tokens now; `block`:
        index of the first token of the block in flight."""
        return length + self.stride(config) * rounds

    def ahead(self, config: EngineConfig) -> bool:
        """Whether the tokens drafted in a round are scored in the next one."""
        return False

    def settled(self, length_N: np.ndarray, block_N: np.ndarray) -> np.ndarray:
        """Leading tokens of each row that later rounds cannot take back [N]."""
        return length_N

    def drafting(self, open_A: np.ndarray, any_open_A: np.ndarray) -> np.ndarray:
        """Rows that the draft extends in a round [A]. `open_A`: rows that have not ended; `any_open_A`: rows of
        requests with at least one such row."""
        return open_A

    def alive(self, logw_N: np.ndarray) -> np.ndarray:
        """Which rows hold a particle [N]."""
        return np.ones(len(logw_N), dtype=bool)

    def living(self, slots_N: np.ndarray, logw_N: np.ndarray) -> np.ndarray:
        """Slots whose particles differ from all others of the request."""
        return slots_N[self.alive(logw_N)]

    def saved(self, slots_N: np.ndarray, logw_N: np.ndarray) -> np.ndarray:
        """Slots that a checkpoint saves: also those without a particle, because draws depend on the positions of the
        particles among the slots."""
        return slots_N

    def kept_rows(self, alive_N: np.ndarray, rows: int) -> np.ndarray:
        """Which rows stay after a round that leaves a request `rows` of them."""
        return alive_N

    @abstractmethod
    def shape(self, config: EngineConfig) -> PagesPerRow:
        """Pages of a row in a round."""

    @abstractmethod
    def held_tokens(self, config: EngineConfig, role: ModelRole, particle: Progress) -> int:
        """Number of leading answer tokens of a resumed particle whose keys and values a model needs. Those of an ended
        particle are not needed if one model decodes alone, nor at the draft once the target can refuse none of them
        (`Progress.over`)."""

    def round_pages(self, config: EngineConfig, params: SamplingParams, rows: int) -> dict[ModelRole, int]:
        """Pages that one round of `rows` rows allocates in each pool. The first model of `roles` drafts, or decodes
        alone. Guided models need twice as many."""
        shape = self.shape(config)
        drafting, *scoring = self.roles
        pages = {drafting: rows * (shape.begin + shape.branches * shape.branch)} | dict.fromkeys(
            scoring, rows * shape.target
        )
        return {role: count * (1 + (role in params.guided_roles)) for role, count in pages.items()}

    def redraft_pages(self, config: EngineConfig, rows: int) -> int:
        """Pages that one round of `rows` rows allocates at the draft to draft again after a miss."""
        return rows * (config.block - 1) if self.redrafts else 0

    def most_pages(
        self, config: EngineConfig, params: SamplingParams, prompt: int, rows: int | None = None, negative: int = 0
    ) -> dict[ModelRole, int]:
        """Maximum pages in each pool that `rows` particles of a request hold at once, if their answers share nothing.
        Default of `rows`: as few as the request allows. `prompt`, `negative`: tokens of the prompts."""
        n, answer = rows or params.least_rows, params.max_tokens
        few, all_rows = (self.round_pages(config, params, size) for size in (n, self.rows(params)))
        begins, answers = self._prompts(params, prompt, negative), self._sequences(params, n * answer)
        most = {
            role: max(answers[role] + ROUNDS_IN_FLIGHT * few[role], ROUNDS_IN_FLIGHT * all_rows[role])
            for role in self.roles
        }
        return {role: begins[role] + most[role] for role in self.roles}

    def ample_pages(
        self, config: EngineConfig, params: SamplingParams, prompt: int, negative: int = 0
    ) -> dict[ModelRole, int]:
        """Pages in each pool with which no round of all of the request's rows waits for pages or does without drafting
        again. `most_pages` suffices if rounds may run one after the other."""
        most = self.most_pages(config, params, prompt, negative=negative)
        few, all_rows = (self.round_pages(config, params, n) for n in (params.least_rows, self.rows(params)))
        ample = {role: pages + ROUNDS_IN_FLIGHT * (all_rows[role] - few[role]) for role, pages in most.items()}
        again = self.redraft_pages(config, self.rows(params))
        if again and config.redraft_levels and self.ahead(config):
            # A round drafts again only while the pages of a next round are left.
            ample[ModelRole.DRAFT] += ROUNDS_IN_FLIGHT * again + all_rows[ModelRole.DRAFT]
        return ample

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
        """Pages in each pool that `rows` particles are likely to hold, if each but the first shares all but `own` of
        the `answer` tokens."""
        rounds, begins = self.round_pages(config, params, rows), self._prompts(params, prompt, negative)
        held = self._sequences(params, answer + own * (rows - 1))
        most = self.most_pages(config, params, prompt, self._rows_apart(rows), negative)
        likely = {role: begins[role] + held[role] + ROUNDS_IN_FLIGHT * rounds[role] for role in self.roles}
        return {role: min(pages, max(most[role], begins[role])) for role, pages in likely.items()}

    def _rows_apart(self, rows: int) -> int | None:
        """Number of rows whose answers may share nothing; None: as few as the request allows."""
        return rows

    def _prompts(self, params: SamplingParams, prompt: int, negative: int) -> dict[ModelRole, int]:
        """Tokens of the prompts at each model."""
        return {role: prompt + negative * (role in params.guided_roles) for role in self.roles}

    def _sequences(self, params: SamplingParams, tokens: int) -> dict[ModelRole, int]:
        """Pages of `tokens` answer tokens at each model, including those of unconditional rows."""
        return {role: tokens * (1 + (role in params.guided_roles)) for role in self.roles}

    def log_z(self, logw_N: np.ndarray, count: int) -> float:
        """Log of the estimate of the target's total mass on answers that the weights of a population give."""
        return 0.0

    def population(self, logw_N: np.ndarray) -> list[tuple[int, float]]:
        """Indices of particles with their normalised weights; empty if the method has no population."""
        return []

    def count_round(
        self, group: CountedRequest, facts: RoundFacts, stats: EngineStats, trees: Counter[TreeFacts]
    ) -> None:
        """Record what a round did: for the request, and in the statistics of the whole engine. `trees`: gets what the
        acceptance of the whole engine counts."""
        return

    def trim_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Remove from a checkpoint what the request must not continue from."""
        return

    def shrink(self, checkpoint: Checkpoint, rows: int, params: SamplingParams, keys_G: RoundKeys) -> ShrunkCheckpoint:
        """Reduce a saved population to `rows` particles, by the unbiased choice that rounds use: here that of
        `smc.algorithm.selection` among independent particles."""
        assert params.resampling is not None, "the resampling scheme of independent particles is filled in"
        n = len(checkpoint)
        first_G, size_G, next_count_G = (torch.tensor([value], dtype=torch.int32) for value in (0, n, rows))
        chosen = select(
            torch.from_numpy(checkpoint["logw_S"])[:, None],
            torch.ones(n, dtype=torch.bool),
            Bounds(Spans(first_G, size_G), size_G, next_count_G),
            torch.zeros(1, dtype=torch.float64),
            torch.tensor([SCHEME_NAMES.index(params.resampling)], dtype=torch.int32),
            *keys_G,
        )
        alive_N = chosen.particles.alive_A.numpy()
        ancestor_N = chosen.particles.ancestor_A.numpy()[alive_N]
        kept = checkpoint.take(ancestor_N, chosen.particles.logw_A.numpy()[alive_N])
        return ShrunkCheckpoint(kept, np.flatnonzero(alive_N), float(chosen.statistics.log_z_G[0]))


class DraftTargetRules(DecodingRules):
    """The draft proposes, the target accepts."""

    first = ModelRole.TARGET

    def block(self, config: EngineConfig) -> int:
        return config.fixed_block

    def stride(self, config: EngineConfig) -> int:
        return self.block(config) + (not config.lookahead)

    def ahead(self, config: EngineConfig) -> bool:
        return config.lookahead

    def shape(self, config: EngineConfig) -> PagesPerRow:
        return PagesPerRow(config.target_tokens, config.begin_tokens, config.branches, config.block - 1)

    def held_tokens(self, config: EngineConfig, role: ModelRole, particle: Progress) -> int:
        if role is ModelRole.TARGET:
            return particle.block
        # In lockstep, after its first round, the draft has run neither its last token nor the bonus token.
        pending = config.begin_tokens if particle.rounds else 1
        return 0 if particle.over else max(particle.length - pending, 0)


class Independent(DraftTargetRules):
    """Particles draw for themselves and are resampled: `smc.algorithm.selection`."""

    decoding = Decoding.INDEPENDENT
    resizable = True
    records_ess = True
    """Whether the effective sample size before resampling, as a share of the particles, is recorded."""

    def known_tokens(self, config: EngineConfig, *, length: int, block: int, rounds: int) -> int:
        if not config.lookahead:
            return super().known_tokens(config, length=length, block=block, rounds=rounds)
        # The tokens drafted in a round are scored in the next one.
        return length + self.stride(config) * (rounds - 1) if rounds else block

    def settled(self, length_N: np.ndarray, block_N: np.ndarray) -> np.ndarray:
        # Tokens that the target has not scored are taken back if no particle has weight after the scoring.
        return np.minimum(length_N, block_N + 1)

    def log_z(self, logw_N: np.ndarray, count: int) -> float:
        return log_mean_weight(normalise(torch.from_numpy(logw_N)[None])[1], torch.tensor([count])).item()

    def population(self, logw_N: np.ndarray) -> list[tuple[int, float]]:
        return list(enumerate(final_weights(torch.from_numpy(logw_N)).tolist()))

    def count_round(
        self, group: CountedRequest, facts: RoundFacts, stats: EngineStats, trees: Counter[TreeFacts]
    ) -> None:
        group.counters.count_population(facts.ess, facts.resampled, facts.collapsed)
        group.log_z += facts.log_z
        ess_share = facts.ess / len(group.slots) if self.records_ess else None
        stats.count_round(ess_share, group.lag, facts.resampled, facts.collapsed)


class Competing(DraftTargetRules):
    """All candidates of a request compete for its rows: `smc.algorithm.expansion`. If there are fewer particles than
    rows, a row without a particle repeats another one and has no weight."""

    def alive(self, logw_N: np.ndarray) -> np.ndarray:
        return logw_N > -np.inf

    def kept_rows(self, alive_N: np.ndarray, rows: int) -> np.ndarray:
        # If there are fewer particles than `rows`, rows without a particle stay, too.
        return alive_N | (np.cumsum(~alive_N) <= rows - alive_N.sum())

    def drafting(self, open_A: np.ndarray, any_open_A: np.ndarray) -> np.ndarray:
        return any_open_A

    def shrink(self, checkpoint: Checkpoint, rows: int, params: SamplingParams, keys_G: RoundKeys) -> ShrunkCheckpoint:
        logw_N = torch.from_numpy(checkpoint["logw_S"])
        n, one_G = len(logw_N), torch.ones(1, dtype=torch.int64)
        sources, kept = (Spans(one_G * 0, one_G * size) for size in (n, rows))
        source = SourceRows(CandidateTokens.whole(logw_N), logw_N, torch.ones(n, dtype=torch.bool), sources)
        chosen = expand(source, kept, one_G * rows, one_G * int(self.decoding), keys_G, 0, rows)
        parent_X, mass_X = (values_X[chosen.alive_X].numpy() for values_X in (chosen.parent_X, chosen.mass_X))
        return ShrunkCheckpoint(checkpoint.take(parent_X, mass_X), np.arange(rows), 0.0)


class Distinct(Competing, Independent):
    """Particles are drawn without replacement. Their weights are unequal by construction, so their effective sample
    size says little."""

    decoding = Decoding.DISTINCT
    records_ess = False

    def log_z(self, logw_N: np.ndarray, count: int) -> float:
        return normalise(torch.from_numpy(logw_N)[None])[1].item()

    def population(self, logw_N: np.ndarray) -> list[tuple[int, float]]:
        # Rows without weight hold no particle.
        return [(n, weight) for n, weight in super().population(logw_N) if weight]


class Exact(Competing):
    """The target draws its own tokens; the drafted tokens decide how many it draws in a round:
    `smc.algorithm.verification`. Only tokens that the target has drawn are part of the answer. Other tokens may be
    taken back, even if all rows agree on them."""

    needs_every_mask = False

    @property
    def without_draft(self) -> DecodingRules | None:
        return TARGET_ALONE

    def draft_temperature(self, params: SamplingParams) -> float:
        # Greedy decoding drafts at temperature 1: a distribution with all mass on one token offers no second row.
        return super().draft_temperature(params) or 1.0

    def known_tokens(self, config: EngineConfig, *, length: int, block: int, rounds: int) -> int:
        return (block if config.lookahead else length) + rounds

    def settled(self, length_N: np.ndarray, block_N: np.ndarray) -> np.ndarray:
        return block_N + 1

    def living(self, slots_N: np.ndarray, logw_N: np.ndarray) -> np.ndarray:
        # All rows have the same confirmed tokens.
        return super().living(slots_N, logw_N)[:1]

    def saved(self, slots_N: np.ndarray, logw_N: np.ndarray) -> np.ndarray:
        return self.living(slots_N, logw_N)

    def held_tokens(self, config: EngineConfig, role: ModelRole, particle: Progress) -> int:
        # A resumed request continues as one sequence from its last confirmed token.
        return particle.length - 1

    def _rows_apart(self, rows: int) -> int | None:
        # Rows share all tokens that have been confirmed.
        return None

    def count_round(
        self, group: CountedRequest, facts: RoundFacts, stats: EngineStats, trees: Counter[TreeFacts]
    ) -> None:
        if group.error:
            return
        tree = facts.tree
        group.counters.count_tree(tree.confirmed, tree.rows, tree.ahead, tree.hit)
        if self.adaptive(group.params) and facts.open:
            tree.add_to(group.acceptance)
            trees[tree] += 1
        # The last confirmed token is a draw of the target that was not drafted, unless rows drafted ahead begin with
        # it.
        accepted = tree.confirmed if tree.hit else max(tree.confirmed - 1, 0)
        verification = group.params.verification
        assert verification is not None, "the verification of exact decoding is filled in"
        stats.exact[verification].count(accepted, tree.block, tree.rows, tree.ahead, tree.hit)

    def trim_checkpoint(self, checkpoint: Checkpoint) -> None:
        confirmed_N = checkpoint["block_S"] + 1
        checkpoint["ended_S"][:] &= checkpoint["length_S"] == confirmed_N
        checkpoint["length_S"][:] = confirmed_N
        checkpoint["logw_S"][:] = 0.0


class Walk(Exact):
    """The draft grows a tree of the tokens that the target most probably draws."""

    decoding = Decoding.WALK
    coupled = True
    redrafts = True

    def block(self, config: EngineConfig) -> int:
        return config.block

    def adaptive(self, params: SamplingParams) -> bool:
        # A guided request runs two positions for each token, which the latency model does not cover.
        return not params.guided


class Rejection(Exact):
    """The draft's tokens are kept or replaced such that answers follow the target's distribution:
    `smc.algorithm.verification`. Answers depend on the number of chains, so it is always the requested one."""

    decoding = Decoding.REJECTION
    # Answers depend on what the chains propose. So that must not depend on whether another request of the round needs
    # every mask.
    needs_every_mask = True

    def chains(self, rows: int) -> int:
        return rows

    def most_pages(
        self, config: EngineConfig, params: SamplingParams, prompt: int, rows: int | None = None, negative: int = 0
    ) -> dict[ModelRole, int]:
        # In look-ahead, equal chains continue on separate pages as long as all of their tokens are accepted. Other
        # chains hold, from the last round that was read, no more pages than that round was given.
        chains = self.rows(params)
        rounds, copies = self.round_pages(config, params, chains), chains if config.lookahead else 1
        begins, answers = self._prompts(params, prompt, negative), self._sequences(params, copies * params.max_tokens)
        return {role: begins[role] + answers[role] + (ROUNDS_IN_FLIGHT + 1) * rounds[role] for role in self.roles}


class SingleModelRules(DecodingRules):
    """One model decodes alone, token after token."""

    def __init__(self, decoding: Decoding) -> None:
        self.decoding, (self.first,) = decoding, decoding.roles

    def rows(self, params: SamplingParams) -> int:
        return 1

    def stride(self, config: EngineConfig) -> int:
        return config.block

    def shape(self, config: EngineConfig) -> PagesPerRow:
        return PagesPerRow(begin=1, branches=1, branch=config.block - 1)

    def held_tokens(self, config: EngineConfig, role: ModelRole, particle: Progress) -> int:
        return 0 if particle.ended else particle.length - 1


TARGET_ALONE = SingleModelRules(Decoding.TARGET)
"""Plain decoding, and exact decoding while nothing is drafted: both draw the same tokens."""
RULES: dict[Decoding, DecodingRules] = {
    rules.decoding: rules
    for rules in (Independent(), Distinct(), Walk(), Rejection(), TARGET_ALONE, SingleModelRules(Decoding.DRAFT))
}
RULES_OF_ROUNDS: dict[tuple[ModelRole, ...], DecodingRules] = {rules.roles: rules for rules in RULES.values()}
"""Rules by the models that take part in rounds. Those for the same models have rounds of the same shape, ahead or not,
so that any of them may stand here. A step launches rounds in this order, those of both models first."""


def fixed_steps(config: EngineConfig, decodings: Iterable[Decoding]) -> int | None:
    """Return how many tokens the draft drafts for a row in rounds of requests that are decoded in these ways, where the
    latency model does not choose it. If the answer of one depends on it, all have as many. None: all K."""
    block = min(RULES[decoding].block(config) for decoding in decodings)
    return None if block == config.block else block


def rules_of(params: SamplingParams) -> DecodingRules:
    """Return how a request is decoded, unless exact decoding falls back to `TARGET_ALONE`."""
    return RULES[params.decoding]
