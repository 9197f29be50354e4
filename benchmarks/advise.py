"""Predicts which arrangement of GPUs, and which N, F and K, decode a number of requests fastest, by exact decoding or
by plain decoding. The prediction uses cost curves and acceptance, which short runs measure here.

N: rows of a tree; K: tokens of a block; F: rows ahead for each of the N rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from benchmarks.backends import Mode, PromptBackend
from benchmarks.load import PLAIN_BLOCK, ClosedLoop, problem_load, sized_config
from smc.api.engine_config import EngineConfig
from smc.api.sampling_params import Method, SamplingParams
from smc.calibration.latency import Effort, measure_latency, room_for
from smc.memory.kv_cache import pool_for
from smc.scheduler.speculation import WIDTH_GAIN, LatencyModel
from smc.scheduler.stats import EngineStats
from smc.types import ModelRole

CANDIDATES = 32
"""Candidate tokens of a tree's root, so the maximum width of its first level."""
PARTICLES = (1, 2, 4, 8, 16, 32)
BRANCHES = (1, 2, 4, 8)
BLOCKS = tuple(range(1, 17))
PLAIN, LOCKSTEP, LOOKAHEAD = "plain", "lockstep", "look-ahead"


PROBED_BLOCK = 5
WIDE_ROWS = 8
"""Rows in the second run that measures acceptance. The first has one row; the gain of width follows from both."""
PROBED_PROBLEMS = 16
BESIDE = 4
"""Number of requests in flight while acceptance is measured."""
MOST_GAIN = 2.0


@dataclass(frozen=True)
class AcceptanceCurve:
    """Probability that the target draws a drafted token, by the number of rows. Raises ValueError naming the field, the
    value and what is allowed."""

    one: float
    """Probability that a single drafted row has the target's next token."""
    gain: float = WIDTH_GAIN
    """Exponent: N rows miss the token N^gain times less often."""

    def __post_init__(self) -> None:
        if not 0 < self.one < 1:
            raise ValueError(f"acceptance={self.one!r}; allowed: between 0 and 1, both excluded")
        if not 0 <= self.gain < math.inf:
            raise ValueError(f"gain={self.gain!r}; allowed: finite, >= 0")

    def of_rows(self, rows: float) -> float:
        """Return the probability that one of `rows` rows has the target's next token."""
        return 1 - (1 - self.one) / max(1.0, rows) ** self.gain

    def lockstep_tokens(self, particles: int, block: int) -> float:
        """Return the expected tokens of a round: the accepted ones of K, and one that the target draws."""
        return 1 + sum(self.of_rows(particles) ** token for token in range(1, block + 1))

    def lookahead_tokens(self, particles: int, branches: int, block: int) -> float:
        """Return the expected tokens of a round in the long run.

        Rounds are of two kinds. A round of the first kind verifies a tree whose first token is known to be right. Every
        further token of the block is in the tree with the probability that its number of rows gives, and likewise the
        target's token after the block is in the rows ahead. If one of these tokens is missing, the next round is of the
        second kind: it verifies a single token, and drafts a tree ahead from one root, at most `CANDIDATES` wide. Rows
        ahead are distributed over all outcomes by likelihood; the winning row is followed by its share of them."""
        share = self.one**block
        found = self.of_rows(min(particles, particles * branches * share))
        hit, again = found**block, self.of_rows(min(particles * branches, CANDIDATES))
        trees = again / (again + 1 - hit)
        return trees * sum(found**token for token in range(block)) + (1 - trees)


@dataclass(frozen=True)
class TreeShape:
    """N, F and K of exact decoding."""

    particles: int
    branches: int
    block: int


@dataclass(frozen=True)
class Arrangement:
    """A number of equal services that share the requests."""

    name: str
    form: str
    gpus: int
    """GPUs of one service."""
    copies: int
    latency: LatencyModel
    """Latency model of one service's devices."""

    def speed(
        self, requests: int, setting: TreeShape | None, acceptance: AcceptanceCurve, context: int
    ) -> PredictedSpeed:
        """Predict the speed. `setting`: None for plain decoding; `context`: tokens of each request."""
        latency, here = self.latency, math.ceil(requests / self.copies)
        read = here * context
        if setting is None:
            tokens = 1.0
            seconds = latency.alone.at(here, read) + latency.round_overhead / PLAIN_BLOCK
        else:
            n, f, k = setting.particles, setting.branches, setting.block
            drafting, overhead = k * latency.draft.at(here * n * f, read), latency.round_overhead
            if self.form == LOCKSTEP:
                tokens = acceptance.lockstep_tokens(n, k)
                seconds = drafting + latency.target.at(here * n * (k + 1), read) + overhead
            else:
                tokens = acceptance.lookahead_tokens(n, f, k)
                seconds = max(drafting, latency.target.at(here * n * k, read)) + overhead
        return PredictedSpeed(self, requests, setting, tokens, seconds)

    def settings(self, among: TreeShapes) -> Iterator[TreeShape | None]:
        if self.form == PLAIN:
            yield None
        else:
            branches = (1,) if self.form == LOCKSTEP else among.branches
            yield from (TreeShape(*each) for each in product(among.particles, branches, among.blocks))


@dataclass(frozen=True)
class PredictedSpeed:
    """The predicted speed of an arrangement under a load."""

    arrangement: Arrangement
    requests: int
    setting: TreeShape | None
    tokens: float
    """Tokens that a round, or in plain decoding a pass, adds to an answer."""
    seconds: float
    """Seconds of that round or pass."""

    @property
    def per_request(self) -> float:
        """Tokens a second of one request."""
        return self.tokens / self.seconds

    @property
    def total(self) -> float:
        return self.requests * self.per_request


@dataclass(frozen=True)
class TreeShapes:
    """The values of N, F and K that are tried."""

    particles: Sequence[int] = PARTICLES
    branches: Sequence[int] = BRANCHES
    blocks: Sequence[int] = BLOCKS


def arrangements(gpus: int, curves: Mapping[int, LatencyModel]) -> list[Arrangement]:
    """Return all arrangements that fit on `gpus` GPUs, each with as many services as fit. `curves`: latency models by
    the number of the target's GPUs."""
    found = []
    for degree, latency in curves.items():
        split = f"TP {degree}" if degree > 1 else ""
        forms = (
            (PLAIN, degree, f"plain {split}"),
            (LOCKSTEP, degree, f"lockstep {split}"),
            (LOOKAHEAD, 1 + degree, f"look-ahead 1 + {degree}"),
        )
        for form, size, name in forms:
            if copies := gpus // size:
                times = f"{copies} x " if copies > 1 else ""
                found.append(Arrangement(f"{times}{name}".strip(), form, size, copies, latency))
    return found


def best_of(
    arrangement: Arrangement,
    requests: int,
    acceptance: AcceptanceCurve,
    among: TreeShapes,
    context: int,
) -> PredictedSpeed:
    """Return the setting with the most tokens a second; among those within a thousandth of it, the one with the least
    drafted tokens (N * F * K)."""
    speeds = [arrangement.speed(requests, setting, acceptance, context) for setting in arrangement.settings(among)]
    most = max(speed.per_request for speed in speeds)
    return min((s for s in speeds if s.per_request >= 0.999 * most), key=_work)


def advise(
    found: Sequence[Arrangement],
    loads: Iterable[int],
    acceptance: AcceptanceCurve,
    among: TreeShapes,
    context: int,
) -> list[PredictedSpeed]:
    """Return the best setting of every arrangement at every load; for each load the fastest first."""
    return [
        speed
        for requests in loads
        for speed in sorted(
            (best_of(each, requests, acceptance, among, context) for each in found),
            key=lambda s: -s.per_request,
        )
    ]


def _work(speed: PredictedSpeed) -> int:
    setting = speed.setting
    return 0 if setting is None else setting.particles * setting.branches * setting.block


def measure_split(backend: PromptBackend, degrees: tuple[int, int], effort: Effort, rows: int) -> LatencyModel:
    """Measure the latency model with `degrees` GPUs for draft and target (0: the draft is on the target's), for draft
    steps of up to `rows` rows. One model works at a time, so that models on one GPU do not slow each other down."""
    mode = _mode(EngineConfig(form="lockstep", block=PROBED_BLOCK), degrees, WIDE_ROWS)
    longest = min(backend.shape(mode, role).max_context for role in ModelRole)
    context = min(room_for(effort.context, PROBED_BLOCK), longest)
    # Every timed row reads its own pages, and so does the request whose whole rounds are timed.
    pages = pool_for(max(4, min(rows, effort.crowd)) * context)
    config = replace(mode.config, max_slots=rows, max_context=context, pages=pages)
    with backend.engine(mode, config) as engine:
        latency = measure_latency(engine, effort)
    assert latency is not None, "the context has room for a prompt"
    return latency


def measure_acceptance(
    backend: PromptBackend, degrees: tuple[int, int], distribution: Mapping[str, Any], problems: int = PROBED_PROBLEMS
) -> AcceptanceCurve:
    """Measure acceptance in exact answers to problems, with one row and with `WIDE_ROWS`. `distribution`: settings of
    `SamplingParams`, by name."""
    missed = {}
    for rows in (1, WIDE_ROWS):
        load = problem_load(backend.tokenizer, problems)
        assert load.answer is not None
        requests = load.make_requests(SamplingParams(method=Method.EXACT, particles=rows, **distribution), load.answer)[
            :problems
        ]
        config = sized_config(EngineConfig(form="lockstep", block=PROBED_BLOCK), requests, BESIDE)
        with backend.engine(_mode(config, degrees, rows), config) as engine:
            for _ in ClosedLoop(engine, requests, BESIDE).run():
                pass
            missed[rows] = missed_share(engine.take_stats(), problems)
    gain = math.log(missed[1] / missed[WIDE_ROWS]) / math.log(WIDE_ROWS)
    return AcceptanceCurve(1 - missed[1], min(max(gain, 0.0), MOST_GAIN))


def missed_share(stats: EngineStats, answers: int) -> float:
    """Return the share of the tokens compared by rounds in lockstep that the target drew differently. It is never 0 or
    1, however few tokens were compared.

    A round compares tokens up to the first wrong one; the last round of an answer, up to the answer's end.
    """
    accepted = stats.exact["walk"].accepted_by_position
    found, unfinished = sum(accepted), stats.exact["walk"].rounds - accepted[-1]
    missed = max(0, unfinished - answers)
    return (missed + 0.5) / (found + missed + 1)


def _mode(config: EngineConfig, degrees: tuple[int, int], particles: int) -> Mode:
    return Mode("lockstep" if degrees == (0, 1) else "lockstep-apart", Method.EXACT, config, particles, degrees)
