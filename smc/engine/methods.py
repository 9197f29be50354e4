"""Methods of decoding: what each asks of the models in a round, what it may hold, and how its answer grows.

Whatever differs between methods on the scheduler's side is said here, once; nothing else in the engine asks which method a request has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from smc.engine.request import Method, SamplingParams
from smc.runtime.config import EngineConfig
from smc.runtime.plan import Program

ROUNDS_IN_FLIGHT = 2
"""At most, of one request: the one that is read, and the next."""


@dataclass(frozen=True)
class Shape:
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
    sides: tuple[str, ...]
    """Models that run their prompts."""
    first: str
    """The one whose law the first token is drawn from."""
    records_population = False
    """Weights, effective sample sizes and resampling mean something."""

    @abstractmethod
    def stride(self, config: EngineConfig) -> int:
        """Tokens by which an open answer grows in a round."""

    def ahead(self, config: EngineConfig) -> bool:
        """The tokens of a round are weighed in the next."""
        return False

    @abstractmethod
    def shape(self, config: EngineConfig) -> Shape:
        """Pages of a place in a round."""

    @abstractmethod
    def held_tokens(self, config: EngineConfig, side: str, *, length: int, block: int, ended: bool, rounds: int) -> int:
        """Answer tokens of a particle that have keys and values on a side after so many rounds: of `length`, the block in flight from
        index `block` on. What has ended needs none at the draft, or where one model decodes alone."""

    def round_pages(self, config: EngineConfig, places: int) -> dict[str, int]:
        """Pages that one round is given on each side: the first drafts, or decodes alone."""
        shape = self.shape(config)
        drafting, *scoring = self.sides
        return {drafting: places * (shape.begin + shape.branches * shape.branch)} | dict.fromkeys(scoring, places * shape.target)

    def most_pages(self, config: EngineConfig, params: SamplingParams, prompt: int) -> dict[str, int]:
        """Pages that a request may hold at once, if nothing of its past is ever shared, with as few particles as it allows."""
        n, answer = params.least_rows, params.max_tokens
        few, all_rows = self.round_pages(config, n), self.round_pages(config, params.rows)
        return {side: prompt + max(n * answer + ROUNDS_IN_FLIGHT * few[side], ROUNDS_IN_FLIGHT * all_rows[side]) for side in self.sides}

    def expected_pages(self, config: EngineConfig, params: SamplingParams, prompt: int, share: float) -> dict[str, int]:
        """Pages that a request is likely to hold: `share` of the longest answer, of which particles share all but the end."""
        n, answer = params.rows, max(1, round(share * params.max_tokens))
        rounds = self.round_pages(config, n)
        own = min(answer, OWN_TOKENS) * (n - 1)
        likely = {side: prompt + answer + own + ROUNDS_IN_FLIGHT * rounds[side] for side in self.sides}
        most = self.most_pages(config, params, prompt)
        return {side: min(pages, max(most[side], prompt)) for side, pages in likely.items()}


OWN_TOKENS = 64
"""Tokens of its past that a particle shares with no other, as a rule: further back, all descend from one."""


class Smc(Decoding):
    """The draft proposes, the target weighs: `smc.algorithm.selection`."""

    program = Program.PAIR
    sides = ("draft", "target")
    first = "target"
    records_population = True

    def stride(self, config: EngineConfig) -> int:
        return config.block if config.lookahead else config.block + 1

    def ahead(self, config: EngineConfig) -> bool:
        return config.lookahead

    def shape(self, config: EngineConfig) -> Shape:
        return Shape(config.target_tokens, config.begin_tokens, config.branches, config.block - 1)

    def held_tokens(self, config: EngineConfig, side: str, *, length: int, block: int, ended: bool, rounds: int) -> int:
        if side == "target":
            return block
        # In lockstep, after its first round, neither the draft's last token nor the bonus.
        pending = config.begin_tokens if rounds else 1
        return 0 if ended else length - pending


class Alone(Decoding):
    """One model decodes by itself, token after token."""

    def __init__(self, side: str) -> None:
        self.program, self.sides, self.first = Program(side), (side,), side

    def stride(self, config: EngineConfig) -> int:
        return config.block

    def shape(self, config: EngineConfig) -> Shape:
        return Shape(begin=1, branches=1, branch=config.block - 1)

    def held_tokens(self, config: EngineConfig, side: str, *, length: int, block: int, ended: bool, rounds: int) -> int:
        return 0 if ended else length - 1


METHODS: dict[Method, Decoding] = {Method.SMC: Smc(), Method.TARGET: Alone("target"), Method.DRAFT: Alone("draft")}
