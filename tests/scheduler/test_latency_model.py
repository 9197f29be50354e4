"""The latency model: curves through measured points, and the timed rounds that measure them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from smc.api.engine_config import EngineConfig
from smc.arrays import map_tensors
from smc.calibration.latency import BRIEF, TREE, Effort, live_plan, measure_latency
from smc.calibration.warm_up import warm_up_plans
from smc.executor.forward import StaticForward
from smc.executor.ops import RoundOps
from smc.executor.round_executor import LocalRoundExecutor
from smc.local_engine import local_engine
from smc.scheduler.engine import Engine
from smc.scheduler.speculation import LatencyCurve, LatencyModel, Miss, ModelLatency
from smc.types import Decoding
from tests.scheduler.harness import answers, request
from tests.scheduler.pairs import tiny_pair

FORMS = [EngineConfig(block=3, branches=2, max_slots=11), EngineConfig(form="lockstep", block=4, max_slots=9)]
PASS, PAGE = 1_000_000, 2_000
"""Simulated nanoseconds of a pass, and of reading a page."""
by_form = pytest.mark.parametrize("config", FORMS, ids=["look-ahead", "lockstep"])


def test_between_points_and_beyond_them():
    curve = LatencyCurve(((4, 1.0), (8, 1.0), (16, 3.0)))
    assert [curve.at(size) for size in (1, 4, 6, 8, 12, 16)] == [1, 1, 1, 1, 2, 3]
    assert curve.at(32) == 3 + 16 * 0.25
    # Beyond the last point a curve grows at least in proportion: a single point or a flat end tells nothing about
    # larger sizes.
    assert LatencyCurve(((4, 1.0),)).at(12) == 3 and LatencyCurve(((2, 1.0), (4, 1.0))).at(8) == 2


def test_samples_make_a_curve_that_never_falls():
    samples = [(8, 2.0), (1, 1.0), (4, 4.0), (8, 2.2), (8, 9.0), (16, 7.0)]
    # The median of size 8 is 2.2, less than the 4.0 of size 4: both get the mean.
    assert LatencyCurve.through(samples).points == ((1, 1.0), (4, 3.1), (8, 3.1), (16, 7.0))
    falling = LatencyCurve.through([(1, 3.0), (2, 2.0), (3, 1.0)])
    assert falling.points == ((1, 2.0), (2, 2.0), (3, 2.0))


@pytest.mark.parametrize(
    "points", [(), ((0, 1.0),), ((2, 1.0), (2, 2.0)), ((1, 2.0), (2, 1.0)), ((1, 0.0),), ((1, float("nan")),)]
)
def test_what_is_no_curve(points):
    with pytest.raises(ValueError, match="allowed: "):
        LatencyCurve(points)


def test_a_latency_model_travels_as_json():
    latency = LatencyModel(
        ModelLatency(LatencyCurve(((1, 0.001), (64, 0.004))), 1e-8),
        ModelLatency(LatencyCurve(((1, 0.01),))),
        ModelLatency(LatencyCurve(((2, 0.02),)), 3e-8),
        0.0005,
    )
    assert json.loads(latency.to_json())["draft"] == {"points": [[1, 0.001], [64, 0.004]], "read": 1e-8}
    assert (latency.draft.at(64, 100), latency.target.at(2, 100), latency.round_overhead) == (
        0.004 + 1e-6,
        0.02,
        0.0005,
    )
    for name in ("round_overhead", "redraft_overhead"):
        with pytest.raises(ValueError, match=f"{name}=-1"):
            replace(latency, **{name: -1})
    for wrong in (-1e-9, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="read="):
            ModelLatency(LatencyCurve(((1, 1.0),)), wrong)


class Clock:
    """A clock that stands still between passes."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic_ns(self) -> int:
        return self.now


def watched(config: EngineConfig, clock: Clock | None = None) -> tuple[Engine, dict[str, list[tuple[int, int]]]]:
    """An engine, and for each model a list of its passes: (tokens, pages of context that were read). A `clock` advances
    by `PASS` in each pass and by `PAGE` for each page."""
    engine, passes = local_engine(tiny_pair(), config), {"draft": [], "target": []}

    class Watched(StaticForward):
        def __init__(self, worker):
            super().__init__(worker.model, worker.pool, worker.rope)
            self.name = worker.name

        def __call__(self, tokens_T, rows):
            tables, (start_R, count_R) = rows.tables, rows.spans
            live_R = count_R > 0
            reach_R = (start_R if tables.tail_R is None else torch.minimum(start_R, tables.tail_R))[live_R]
            read_RL = tables.table_SL[tables.slot_R[live_R], : int(reach_R.min()) if len(reach_R) else 0]
            pages = read_RL[read_RL > 0].unique()
            assert not len(pages) or pages.max() <= engine.memory.capacity[self.name]
            passes[self.name].append((int(count_R.sum()), len(pages)))
            if clock is not None:
                clock.now += PASS + PAGE * len(pages)
            return super().__call__(tokens_T, rows)

    class WatchedOps(RoundOps):
        def forward(self, reader):
            return Watched(reader)

    engine.executor = LocalRoundExecutor(config, engine.workers, WatchedOps())
    return engine, passes


@by_form
def test_timed_rounds_are_full(config):
    """Timed rounds run rows of live requests, each with its own pages. On a CPU empty rows are skipped, so empty rounds
    would time nothing."""
    engine, passes = watched(config)
    latency = measure_latency(engine, Effort(60.0, 8, 1, 0, 4, 100))
    k, f, last = config.block, config.branches, config.max_slots
    long, begun = engine.context - 3 * k - 4, k - 1 if config.lookahead else 0
    short = long // 2
    assert [size for size, _ in latency.draft.curve.points] == sorted({1, f, 8 * f, last * f})
    assert [size for size, _ in latency.target.curve.points] == [n * config.target_tokens for n in (1, 8, last)]
    assert [size for size, _ in latency.alone.curve.points] == [1, 8, last]
    assert latency.round_overhead > 0
    assert (latency.redraft_overhead > 0) is config.lookahead
    for count in (1, 8, last):
        trees = -(-count // 8)
        assert (count * config.target_tokens, trees * short) in passes["target"] and passes["target"].count(
            (count, count * short)
        ) >= k
        # The draft's first step runs the particles, the others F rows of each particle; in look-ahead the draft has
        # also read most of the block in flight.
        assert passes["draft"].count((count * f, trees * (short + begun))) >= k - 1
    for context in (short, long):
        assert (4 * config.target_tokens, 4 * context) in passes["target"] and passes["target"].count(
            (4, 4 * context)
        ) >= k
        assert passes["draft"].count((4 * f, 4 * (context + begun))) >= k - 1


@by_form
def test_reading_is_timed_by_itself(config, monkeypatch):
    """The time of reading the context is a separate term, not part of the curves by size."""
    clock = Clock()
    monkeypatch.setattr("smc.executor.graph_runner.time", clock)
    engine, _ = watched(config, clock)
    latency = measure_latency(engine, Effort(60.0, 8, 1, 0, 4, 100))
    for part in latency.parts.values():
        assert part.read == pytest.approx(1e-9 * PAGE)
        # In look-ahead, the draft has read most of the block in flight as well.
        assert all(PASS <= 1e9 * seconds <= 1.02 * PASS for _, seconds in part.curve.points)


@by_form
def test_timed_rounds_change_nothing(config):
    asked = [request([1, 2], str(i), particles=n, seed=i, max_tokens=20) for i, n in enumerate((3, 5))]
    expected = answers(local_engine(tiny_pair(), config), asked)
    engine = local_engine(tiny_pair(), config)
    assert engine.latency is None and measure_latency(engine, BRIEF)
    engine.check_books()
    assert not engine.rounds_of(Decoding.WALK).acceptance.tries(Miss.TOKEN), "what was timed decides about users"
    found = answers(engine, asked)
    assert {name: one.tokens for name, one in found.items()} == {name: one.tokens for name, one in expected.items()}


@by_form
@pytest.mark.parametrize("decoding", [Decoding.WALK, Decoding.TARGET])
def test_timed_rounds_are_of_kinds_that_are_warmed_up(config, decoding):
    """Plans of timed rounds have the same arrays, types and shapes as warm-up plans of the same key: captured graphs
    share memory by key."""

    def layout(plan):
        return map_tensors(lambda array: (array.dtype, array.shape), plan.parts)

    warmed_up = {plan.kind: plan for plan in warm_up_plans(config, 600)}
    for count in (1, 2, 8, config.max_slots):
        for tree in (TREE, 1) if decoding is Decoding.WALK else (1,):
            plan = live_plan(decoding, config, count, 256, tree)
            assert layout(plan) == layout(warmed_up[plan.kind])


def test_contexts_that_are_too_short_for_full_rows():
    engine = local_engine(tiny_pair(), EngineConfig(block=8, max_slots=4, max_context=24))
    assert measure_latency(engine, BRIEF) is None
