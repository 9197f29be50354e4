"""One request inside the engine: its particles' slots, how far it has come, and what has been streamed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from smc.api.outputs import Alternatives, Answer, Statistics, Times
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.executor.messages import Stream
from smc.executor.state import biased_tokens
from smc.scheduler.acceptance import Acceptance
from smc.scheduler.detokenizer import StopRules, TextStream
from smc.scheduler.methods import RESCORING, TARGET_ALONE, Decoding, decoding_of
from smc.scheduler.slots import Slots
from smc.types import ModelRole

MEMORY = 0.97
"""Of what a request's rounds have shown, by the next one."""


class Phase(Enum):
    QUEUED = "queued"
    """It waits to start, or to be taken up again."""
    PREFILL = "prefill"
    RUNNING = "running"


@dataclass(eq=False)
class SequenceGroup:
    """Mutable state of one request. Particles are in `Slots`; this holds what they have in common."""

    request: Request
    seed: int
    rules: StopRules
    submitted: float
    """Engine clock at its arrival, seconds."""
    number: int
    """Of requests in the order of submission."""
    expected: dict[ModelRole, int]
    """KV pages in each pool that it was likely to need when it was submitted."""
    taken_up: float | None = None
    """Engine clock when it was first given slots and pages."""
    begun: float | None = None
    """And when its first token was there."""
    keys: dict[str, list[bytes]] = field(default_factory=dict)
    """Of its prompts' blocks in the prefix caches, `prompt` and `negative`, once they have been asked for."""
    needs: dict[Stream, int] | None = None
    """Pages of what it is to start from, by lane, once they have been counted; while it waits."""
    phase: Phase = Phase.QUEUED
    decoding: Decoding = field(init=False)
    """How it is decoded: of exact decoding by the pair, or by the target alone. It may change between two rounds."""
    turn: int | None = None
    """Of exact decoding, if it shall be decoded in another way as soon as no round of it is under way: by the pair with
    a tree of so many rows, or by the target alone: 0."""
    most_rows: int = field(init=False)
    """That it may have: fewer than were asked for where there was too little memory for more."""
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(MEMORY))
    """Of exact decoding."""
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    particles: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Number of the particle in each slot: part of the key of its random numbers."""
    stops: int = 0
    """Entry of the stop tables."""
    count: int = 0
    """Slots that hold a particle."""
    cached_tokens: int | None = None
    """Prompt tokens that needed not be run, on the side where they were fewest."""
    saved: dict[str, np.ndarray] | None = None
    """The record of particles whose slots and pages were given up, to go on from: arrays of `Slots`, by name."""
    lives: int = 0
    """How often it has been taken up; what was asked for in an earlier life concerns it no more."""
    rounds: int = 0
    """That have been read."""
    in_flight: deque[dict[Stream, np.ndarray]] = field(default_factory=deque)
    """Pages, by lane, of every round that has been asked for and not read."""
    wanted: int | None = None
    """Particles that it shall have after its next round, where that is a change."""
    wish: int | None = None
    """Particles that its caller has asked for, or rows that the policy has, until it has them."""
    committed: int = 0
    """Answer tokens on which all particles agree."""
    streamed: int = 0
    """Answer tokens that have been reported to the caller."""
    lag: int = 0
    """Tokens between the committed prefix and the longest particle."""
    log_z: float = 0.0
    answer: Answer | None = None
    """Once it has been drawn, while it is rescored."""
    top_logprobs: tuple[Alternatives, ...] | None = None
    """What has come of that."""
    error: str | None = None
    text: TextStream = field(init=False)
    tally: RequestCounters = field(init=False)

    def __post_init__(self) -> None:
        self.decoding, self.most_rows = decoding_of(self.params), self.params.rows
        self.text = TextStream(self.rules)
        self.tally = RequestCounters(self.request.params.rows)

    def fail(self, role: ModelRole) -> None:
        """Its request ends with an error that names the model."""
        self.error = self.error or f"the {role} model returned NaN logits: its weights or its numeric type are at fault"

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def alone(self) -> bool:
        """Nothing is drafted for it, although its method would."""
        return self.decoding is not decoding_of(self.params)

    @property
    def turned(self) -> tuple[Decoding, int]:
        """How it is decoded after its turn, and with how many rows."""
        return (decoding_of(self.params), self.turn) if self.turn else (TARGET_ALONE, 1)

    def decode_by(self, decoding: Decoding, rows: int | None = None) -> None:
        """Of particles that hold no slots, or have not begun; `rows`, if not as many as the request asks for."""
        self.decoding, self.turn, self.wish = decoding, None, None
        self.particles = np.arange(rows or decoding.rows(self.params))
        self.count = len(self.particles)

    def rescore(self, answer: Answer, record: dict[str, np.ndarray]) -> None:
        """What is left to do for it, which holds neither slots nor pages: `record`, of the drawn particle, shall run
        through the target."""
        self.answer, self.saved = answer, record
        self.decode_by(RESCORING)
        self.needs = None
        self.phase = Phase.QUEUED

    @property
    def asks_beyond_prompt(self) -> bool:
        """What comes after its prompt is asked of its first model, whatever is cached: to draw first tokens, or to
        rescore."""
        return self.saved is None or self.answer is not None

    def first_biases(self) -> list[tuple[int, float]]:
        """What is added to the logits that its first token is drawn by, by token."""
        if not self.params.min_tokens:
            return list(self.params.logit_bias)
        return [(token, early) for token, (early, _) in biased_tokens(self.rules.machine).items()]

    def times(self, now: float) -> Times:
        """Until `now`, by the engine's clock."""
        taken_up = now if self.taken_up is None else self.taken_up
        begun = now if self.begun is None else self.begun
        return Times(taken_up - self.submitted, begun - taken_up, now - begun)

    @property
    def has_particles(self) -> bool:
        """In slots, or in a record to go on from."""
        return self.phase is Phase.RUNNING or self.saved is not None

    @property
    def has_begun(self) -> bool:
        """It has been taken up at least once."""
        return self.phase is not Phase.QUEUED or self.tally.preemptions > 0

    @property
    def rows(self) -> int:
        """Slots that it has, or wants."""
        return len(self.particles) if len(self.particles) else self.decoding.rows(self.params)

    def living(self, slots: Slots) -> np.ndarray:
        """Its slots that stand for something of their own; of exact decoding one, since its rows differ in nothing that
        is confirmed."""
        slots_N = self.slots[: self.count]
        if not self.decoding.competes:
            return slots_N
        alive_N = slots_N[slots.alive(slots_N)]
        return alive_N[:1] if self.decoding.confirms else alive_N

    @property
    def launched(self) -> int:
        """Rounds that have been asked for."""
        return self.rounds + len(self.in_flight)

    @property
    def prompt_size(self) -> int:
        return len(self.request.prompt)

    @property
    def context(self) -> int:
        """Tokens that a model reads to go on with it."""
        return len(self.request.prompt) + self.committed

    @property
    def elastic(self) -> bool:
        """A policy says how many rows it has, and with what ahead. A guided request takes two positions for one, which
        costs are not known of: its tree stays."""
        return decoding_of(self.params).elastic and not self.params.guided and self.answer is None

    @property
    def negative_size(self) -> int:
        """0: it is not guided."""
        return self.request.negative_size

    @property
    def streams(self) -> tuple[Stream, ...]:
        """What the models run of it."""
        return self.streams_by(self.decoding)

    def streams_by(self, decoding: Decoding) -> tuple[Stream, ...]:
        """If it was decoded so."""
        guided = (role for role in decoding.roles if role in self.params.guided_roles)
        return (*map(Stream, decoding.roles), *(Stream(role, unconditional=True) for role in guided))

    def prompt_of(self, stream: Stream) -> tuple[int, ...]:
        if not stream.unconditional:
            return self.request.prompt
        assert self.request.negative_prompt is not None, "nobody guides it"
        return self.request.negative_prompt

    @property
    def slots_needed(self) -> int:
        """Slots that its rows take, with those of companions."""
        return self.rows * self.params.slots_per_row

    @property
    def chains_needed(self) -> int:
        """Rows whose laws are kept."""
        return self.rows if self.decoding.chained else 0


@dataclass
class RequestCounters:
    """Running sums behind Statistics."""

    particles: int
    rounds: int = 0
    resamples: int = 0
    collapses: int = 0
    preemptions: int = 0
    alone_rounds: int = 0
    rows_sum: int = 0
    confirmed: int = 0
    hits: int = 0
    misses: int = 0
    ess_sum: float = 0.0
    ess_min: float = float("inf")
    draft_tokens: int = 0
    target_tokens: int = 0
    lag_sum: int = 0

    def count_tokens(self, role: ModelRole, tokens: int) -> None:
        if role == ModelRole.DRAFT:
            self.draft_tokens += tokens
        else:
            self.target_tokens += tokens

    def statistics(self, log_z: float, particles_left: int) -> Statistics:
        rounds, drafted = max(self.rounds, 1), max(self.rounds - self.alone_rounds, 1)
        return Statistics(
            particles=self.particles,
            particles_left=particles_left,
            rounds=self.rounds,
            resamples=self.resamples,
            collapses=self.collapses,
            preemptions=self.preemptions,
            mean_ess=self.ess_sum / rounds,
            min_ess=self.ess_min if self.ess_sum else 0.0,
            log_z=log_z,
            draft_tokens=self.draft_tokens,
            target_tokens=self.target_tokens,
            committed_lag=self.lag_sum / rounds,
            accepted_per_round=self.confirmed / drafted,
            hits=self.hits,
            misses=self.misses,
            alone_rounds=self.alone_rounds,
            mean_rows=self.rows_sum / drafted,
        )
