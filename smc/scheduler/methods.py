"""Methods of decoding: what each asks of the models in a round, what it may hold, and how its answer grows.

Whatever differs between methods on the scheduler's side is said here, once; nothing else in the engine asks which
method a request has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from smc.algorithm.expansion import Kind
from smc.algorithm.weights import log_mean_weight, normalise
from smc.api.engine_config import EngineConfig
from smc.api.sampling_params import Method, SamplingParams
from smc.executor.plan import Program
from smc.types import ModelRole

ROUNDS_IN_FLIGHT = 2
"""At most, of one request: the one that is read, and the next."""


@dataclass(frozen=True)
class PagesPerRow:
    """Pages of one place of a round."""

    target: int = 0
    """Tokens that the target runs."""
    begin: int = 0
    """Pending tokens that the draft, or the model that decodes alone, begins with."""
    branches: int = 0
    branch: int = 0
    """Tokens of each branch that are run within the round."""


class Decoding(ABC):
    """How requests of one method are decoded."""

    program: Program
    """Rounds that they take part in."""
    roles: tuple[ModelRole, ...]
    """Models that run their prompts."""
    first: ModelRole
    """The one whose law the first token is drawn from."""
    kind = Kind.INDEPENDENT
    """How rows are continued."""
    records_population = False
    """Weights, effective sample sizes and resampling mean something."""
    elastic = False
    """How many rows it has, or none at all, decides its speed and nothing else."""
    confirms = False
    """Only what the target has drawn itself is part of the answer: what particles agree on may still be taken back."""

    @property
    def chained(self) -> bool:
        """Rows are chains, whose laws are kept."""
        return self.kind is Kind.CHAINS

    @property
    def competes(self) -> bool:
        """Rows are dealt out among all of a group, so that a place may be without one: it then repeats another, and has
        no weight."""
        return self.kind is not Kind.INDEPENDENT

    def rows(self, params: SamplingParams) -> int:
        """Sequences of a request that are decoded side by side."""
        return params.rows

    @abstractmethod
    def stride(self, config: EngineConfig) -> int:
        """Tokens by which an open answer grows in a round, at most."""

    def known_tokens(self, config: EngineConfig, *, length: int, block: int, rounds: int) -> int:
        """Tokens of an open answer that will have been weighed after so many rounds that are under way: of `length`
        now, the block in flight from index `block` on."""
        return length + self.stride(config) * rounds

    def ahead(self, config: EngineConfig) -> bool:
        """The tokens of a round are weighed in the next."""
        return False

    @abstractmethod
    def shape(self, config: EngineConfig) -> PagesPerRow:
        """Pages of a place in a round."""

    @abstractmethod
    def held_tokens(
        self, config: EngineConfig, role: ModelRole, *, length: int, block: int, ended: bool, rounds: int
    ) -> int:
        """Answer tokens of a particle that have keys and values on a side after so many rounds: of `length`, the block
        in flight from index `block` on. What has ended needs none at the draft, or where one model decodes alone."""

    def round_pages(
        self, config: EngineConfig, places: int, guided: Collection[ModelRole] = ()
    ) -> dict[ModelRole, int]:
        """Pages that one round is given on each side: the first drafts, or decodes alone. On sides that are `guided`,
        as many again."""
        shape = self.shape(config)
        drafting, *scoring = self.roles
        pages = {drafting: places * (shape.begin + shape.branches * shape.branch)} | dict.fromkeys(
            scoring, places * shape.target
        )
        return {role: count * (1 + (role in guided)) for role, count in pages.items()}

    def most_pages(
        self, config: EngineConfig, params: SamplingParams, prompt: int, rows: int | None = None, negative: int = 0
    ) -> dict[ModelRole, int]:
        """Pages that so many particles of a request, by default as few as it allows, may hold at once if they share
        nothing of its past. `prompt`, `negative`: tokens of its prompts."""
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
        """Pages with which no round of all its rows waits for any; `most_pages` will do, with one round after the other
        if need be."""
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
        """Pages that `rows` particles are likely to hold: of an answer of so many tokens each but the first has `own`
        for itself."""
        rounds, begins = self.round_pages(config, rows, params.guided_roles), self._prompts(params, prompt, negative)
        held = self._sequences(params, answer + own * (rows - 1))
        # Rows of exact decoding share all but what has not been confirmed.
        most = self.most_pages(config, params, prompt, None if self.confirms else rows, negative)
        likely = {role: begins[role] + held[role] + ROUNDS_IN_FLIGHT * rounds[role] for role in self.roles}
        return {role: min(pages, max(most[role], begins[role])) for role, pages in likely.items()}

    def _prompts(self, params: SamplingParams, prompt: int, negative: int) -> dict[ModelRole, int]:
        """Tokens of prompts on each side."""
        return {role: prompt + negative * (role in params.guided_roles) for role in self.roles}

    def _sequences(self, params: SamplingParams, tokens: int) -> dict[ModelRole, int]:
        """Pages of so many answer tokens on each side, with those of companions."""
        return {role: tokens * (1 + (role in params.guided_roles)) for role in self.roles}

    def log_z(self, logw_N: Tensor, count: int) -> float:
        """What a population's weights say of the target's total mass on answers."""
        return 0.0


class DraftTargetDecoding(Decoding):
    """The draft proposes, the target has the last word."""

    program = Program.PAIR
    roles = (ModelRole.DRAFT, ModelRole.TARGET)
    first = ModelRole.TARGET

    def stride(self, config: EngineConfig) -> int:
        return config.block if config.lookahead else config.block + 1

    def ahead(self, config: EngineConfig) -> bool:
        return config.lookahead

    def shape(self, config: EngineConfig) -> PagesPerRow:
        return PagesPerRow(config.target_tokens, config.begin_tokens, config.branches, config.block - 1)

    def held_tokens(
        self, config: EngineConfig, role: ModelRole, *, length: int, block: int, ended: bool, rounds: int
    ) -> int:
        if role == ModelRole.TARGET:
            return block
        # In lockstep, after its first round, neither the draft's last token nor the bonus.
        pending = config.begin_tokens if rounds else 1
        return 0 if ended else length - pending


class Independent(DraftTargetDecoding):
    """Particles draw for themselves and are resampled: `smc.algorithm.selection`."""

    records_population = True

    def known_tokens(self, config: EngineConfig, *, length: int, block: int, rounds: int) -> int:
        if not config.lookahead:
            return super().known_tokens(config, length=length, block=block, rounds=rounds)
        # What was drafted in a round is weighed in the next.
        return length + self.stride(config) * (rounds - 1) if rounds else block

    def log_z(self, logw_N: Tensor, count: int) -> float:
        return log_mean_weight(normalise(logw_N[None])[1], torch.tensor([count])).item()


class Distinct(Independent):
    """Particles are drawn without replacement: `smc.algorithm.expansion`."""

    kind = Kind.DISTINCT

    def log_z(self, logw_N: Tensor, count: int) -> float:
        return normalise(logw_N[None])[1].item()


class Exact(DraftTargetDecoding):
    """The target draws its own tokens; what was drafted decides how many at a time: `smc.algorithm.walk`."""

    kind = Kind.BEST
    elastic = True
    confirms = True

    def known_tokens(self, config: EngineConfig, *, length: int, block: int, rounds: int) -> int:
        return (block if config.lookahead else length) + rounds

    def held_tokens(
        self, config: EngineConfig, role: ModelRole, *, length: int, block: int, ended: bool, rounds: int
    ) -> int:
        # Taken up again, one sequence goes on from its last confirmed token.
        return length - 1


class Rejection(Exact):
    """The draft's draws are kept or replaced, so that the target's law comes out: `smc.algorithm.rejection`. Its
    answers depend on how many chains there are, so there are always as many as were asked for."""

    kind = Kind.CHAINS
    elastic = False

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

    def held_tokens(
        self, config: EngineConfig, role: ModelRole, *, length: int, block: int, ended: bool, rounds: int
    ) -> int:
        return 0 if ended else length - 1


class Rescoring(Decoding):
    """The answer has been drawn, and runs through the target once more, for what else could have stood there: in no
    round, and no slot."""

    program, roles, first = Program.TARGET, (ModelRole.TARGET,), ModelRole.TARGET

    def rows(self, params: SamplingParams) -> int:
        return 0

    def stride(self, config: EngineConfig) -> int:
        return 0

    def shape(self, config: EngineConfig) -> PagesPerRow:
        return PagesPerRow()

    def held_tokens(
        self, config: EngineConfig, role: ModelRole, *, length: int, block: int, ended: bool, rounds: int
    ) -> int:
        # Nothing comes after the last one.
        return length - 1

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
        begins, answers = self._prompts(params, prompt, negative), self._sequences(params, answer)
        return {role: begins[role] + answers[role] for role in self.roles}


RESCORING = Rescoring()
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
    """How a request is decoded, unless exact decoding goes on with `TARGET_ALONE`."""
    return DECODINGS[params.method, params.population or params.verification]


def program_of(method: Method) -> Program:
    """Whose rounds requests of a method take part in."""
    return next(decoding.program for (name, _), decoding in DECODINGS.items() if name is method)
