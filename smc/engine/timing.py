"""Times what a draft step and a target pass cost on the devices of an engine, before anybody is served: the curves of `smc.engine.costs`.

Rounds of full rows that belong to nobody: their particles have the dummy page for a prompt and write to it, so that every size can be had
without memory. A request of the engine's own says what a round takes besides.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import numpy as np

from smc.algorithm.expansion import Kind
from smc.engine.costs import Costs, Curve, Point
from smc.engine.engine import Engine
from smc.engine.methods import PROGRAMS
from smc.engine.rehearsal import TURNS, empty_plan
from smc.engine.request import Method, Request, SamplingParams
from smc.engine.rounds import bucket
from smc.runtime.config import EngineConfig
from smc.runtime.messages import SIDES
from smc.runtime.plan import SHORT, Join, Program, RoundPlan
from smc.stops import START

PROMPT = 256
"""Tokens before a timed row, where there is room for them."""
GROUP = 8
"""Rows of a timed tree, at most."""
LIKELY_GROWTH = 2
"""By which the next size takes longer than the last."""


@dataclass(frozen=True)
class Effort:
    """How much is timed. The smallest sizes are, whatever they take."""

    seconds: float
    """Of timed rounds: no larger size is begun that is likely to exceed them."""
    factor: int
    """Between sizes."""
    repeats: int
    """Timed rounds of a size: their median counts."""
    untimed: int
    """Rounds of a size before those."""


BRIEF = Effort(0.6, 8, 2, 0)
"""Where nothing is compiled, and a start must not take longer for it."""
STEADY = Effort(10.0, 2, 5, 1)
"""The same, where there is time."""
THOROUGH = Effort(20.0, 2, 5, TURNS)
"""Where rounds are recorded."""


def time_costs(engine: Engine, effort: Effort) -> Costs | None:
    """Of an idle engine. None if its contexts are too short for a round of full rows."""
    assert engine.idle, "requests are running"
    base = min(PROMPT, engine.context - 3 * engine.config.block - 4)
    if base < 1:
        return None
    samples: dict[str, list[Point]] = {side: [] for side in SIDES}
    spent = 0.0
    for count in _sizes(engine.config.max_slots, effort.factor):
        before = spent
        for program in Program:
            # The draft alone: what one row costs.
            if program is Program.DRAFT and count > 1:
                continue
            for side, seconds in _time_rounds(engine, program, count, base, effort).items():
                spent += sum(seconds)
                samples[side].append(_sample(program, side, engine.config, count, statistics.median(seconds)))
        if spent + LIKELY_GROWTH * (spent - before) > effort.seconds:
            break
    return Costs(Curve.through(samples["draft"]), Curve.through(samples["target"]), _overhead(engine, effort))


def _sizes(most: int, factor: int) -> list[int]:
    sizes = [1]
    while sizes[-1] * factor < most:
        sizes.append(sizes[-1] * factor)
    return sizes if most == 1 else [*sizes, most]


def _time_rounds(engine: Engine, program: Program, count: int, base: int, effort: Effort) -> dict[str, list[float]]:
    """Seconds of the passes of each side that works, round by round."""
    config, found = engine.config, {side: [] for side in PROGRAMS[program].sides}
    plan = live_plan(program, config, count, base)
    # One model alone takes many passes in a round.
    repeats = effort.repeats if program is Program.PAIR else -(-effort.repeats // 2)
    for turn in range(effort.untimed + repeats):
        for side, group in joins(program, config, count, base, engine.context).items():
            engine.pair.join(side, group)
        pending = engine.pair.round(plan)
        pending.result()
        for side, (begin, end) in pending.spans().items():
            if side in found and turn >= effort.untimed:
                found[side].append(1e-9 * (end - begin))
    return found


def _sample(program: Program, side: str, config: EngineConfig, count: int, seconds: float) -> Point:
    """Size and seconds of one step or pass, of a round of `count` places that had that model at work for so long."""
    if program is not Program.PAIR:
        return count, seconds / config.block
    return (count * config.branches, seconds / config.block) if side == "draft" else (count * config.target_tokens, seconds)


def live_plan(program: Program, config: EngineConfig, count: int, base: int) -> RoundPlan:
    """A round of the first `count` slots, behind `base` tokens: trees of `GROUP` rows, or where one model decodes alone single rows."""
    places, columns = bucket(count), base + 3 * config.block + 4
    kind, size = (Kind.BEST, GROUP) if program is Program.PAIR else (Kind.INDEPENDENT, 1)
    shape = PROGRAMS[program].shape(config)
    plan = empty_plan(program, shape, places, config.max_slots, short=columns <= SHORT, kinds=frozenset({kind}))
    first_X = np.arange(0, count, size, dtype=np.int32)
    sizes_X = np.minimum(size, count - first_X)
    place_A = np.arange(places)

    def of_groups(values_X: np.ndarray | int) -> np.ndarray:
        values_G = np.zeros(places, dtype=np.int32)
        values_G[: len(first_X)] = values_X
        return values_G

    return replace(
        plan,
        columns=columns,
        slot_A=np.where(place_A < count, place_A, config.max_slots),
        group_A=np.where(place_A < count, place_A // size, places - 1),
        particle_A=place_A % size,
        seed_A=place_A // size,
        first_G=of_groups(first_X),
        size_G=of_groups(sizes_X),
        count_G=of_groups(sizes_X),
        draws_G=of_groups(sizes_X),
        shared_G=of_groups(base),
        kind_G=of_groups(int(kind)),
    )


def joins(program: Program, config: EngineConfig, count: int, base: int, context: int) -> dict[str, Join]:
    """What the first `count` slots hold when such a round begins: behind `base` tokens, in look-ahead a whole block to score."""
    block = config.block if program is Program.PAIR and config.lookahead else 1
    pending = {"draft": 1, "target": block}
    decoding = PROGRAMS[program]
    tokens_NQ = np.arange(count * block, dtype=np.int32).reshape(count, block) % 2
    return {
        side: Join(
            slots_N=np.arange(count, dtype=np.int32),
            pages_XL=np.zeros((1, base + block - pending[side]), dtype=np.int32),
            base=base,
            limit=context,
            least=0,
            end_N=np.full(count, base + block, dtype=np.int32),
            pending_NQ=tokens_NQ[:, -pending[side] :],
            pending_N=np.full(count, pending[side], dtype=np.int32),
            logq_NQ=np.zeros((count, pending[side]), dtype=np.float32),
            ended_N=np.zeros(count, dtype=bool),
            alive_N=np.ones(count, dtype=bool),
            text_N=np.full(count, START, dtype=np.int32),
            logw_N=np.zeros(count),
            stops=0,
            machine=None,
        )
        for side in decoding.sides
    }


def _overhead(engine: Engine, effort: Effort) -> float:
    """Seconds of a round in which neither model is at its pass, the median over rounds of a request."""
    config, rounds = engine.config, engine.rounds_of(Method.EXACT)
    # The first is alone on its way, so that what goes on beside it is not seen.
    turns = 1 + effort.untimed + effort.repeats
    most = min((turns + 1) * config.target_tokens, engine.context - 4)
    params = SamplingParams(method=Method.EXACT, particles=min(2, config.max_slots), seed=0, ignore_eos=True, max_tokens=most)
    engine.submit(Request("timing", tuple(i % engine.tokenizer.size for i in range(4)), params))
    found, read = [], rounds.last
    while not engine.idle and len(found) < turns:
        begin = time.perf_counter()
        engine.step()
        whole = time.perf_counter() - begin
        if rounds.last is not read:
            read = rounds.last
            found.append(max(0.0, whole - _busy(read.spans())))
    engine.abort("timing")
    engine.step()
    engine.check_books()
    engine.take_stats()
    return statistics.median(found[1 + effort.untimed :] or found)


def _busy(spans: dict[str, tuple[int, int]]) -> float:
    """Seconds in which a model was at its pass, or both were."""
    (begin, end), (other, last) = sorted(spans[side] for side in SIDES)
    return 1e-9 * (end - begin + max(0, last - max(end, other)))
