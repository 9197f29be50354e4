"""Forecasts from latency and acceptance: tokens per round against a simulation, times, and the best division."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import advise
from benchmarks.advise import Advisor, measure_split, missed_share
from benchmarks.backends import CpuBackend, Mode
from benchmarks.reports.advise import to_run, with_runs
from services.launch.config import WorkerGroupConfig, WorkerGroupError
from services.launch.division import Degrees, DegreeTimes, Division, best_setting, divisions, rank_divisions
from services.launch.division_choice import weights_fit
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.sampling_params import Method
from smc.calibration.forecast import LOCKSTEP, LOOKAHEAD, PLAIN, AcceptanceCurve, TreeShape, TreeShapes
from smc.calibration.latency import BRIEF, STEADY
from smc.local_engine import ModelPair
from smc.scheduler.speculation import LatencyCurve, LatencyModel, ModelLatency
from smc.scheduler.stats import EngineStats
from tests.launch.test_division import CONTEXT, EIGHT, flat, times

COSTS = LatencyModel(
    ModelLatency(LatencyCurve(((1, 0.001), (32, 0.001), (512, 0.008))), 1e-8),
    ModelLatency(LatencyCurve(((1, 0.004), (64, 0.005), (512, 0.040))), 3e-8),
    ModelLatency(LatencyCurve(((1, 0.004), (64, 0.005), (512, 0.020))), 5e-8),
    0.0002,
)
"""Latencies like those of an 8B and a 1B model on one GPU each."""
TIMES, ONE = DegreeTimes({1: COSTS}, {1: COSTS.draft}, COSTS.round_overhead), Degrees((1,), (1,))
LARGE = WorkerGroupConfig(load="random", target=Path("llama-70b"), draft=Path("llama-1b"), device="cuda")
GPU = 141 << 30


@pytest.mark.parametrize("apart", [True, False])
def test_rounds_are_timed_in_the_form_of_the_mode(apart):
    """In look-ahead that includes what drafting again costs rounds in which nobody has missed."""
    machine, effort = CpuBackend(ModelPair.load(demo.TARGET, demo.DRAFT)), replace(BRIEF, seconds=0.0)
    mode = Mode("lookahead", Method.EXACT, EngineConfig(branches=2), 8, (1, 1) if apart else (0, 1))
    latency = measure_split(machine, mode, effort, 8)
    assert (latency.redraft_overhead > 0) is apart
    assert (2 in (size for size, _ in latency.draft.curve.points)) is apart


def test_tokens_a_round_and_their_limits():
    shape, wide = TreeShape(1, 1, 5), TreeShape(8, 4, 5)
    sure, half, blind = AcceptanceCurve(1 - 1e-9), AcceptanceCurve(0.5), AcceptanceCurve(1e-9, gain=0)
    assert sure.tokens(wide, lookahead=True) == pytest.approx(5)
    assert sure.tokens(wide, lookahead=False) == pytest.approx(6)
    assert blind.tokens(wide, lookahead=False) == pytest.approx(1)
    assert half.tokens(shape, lookahead=False) == pytest.approx((1 - 0.5**6) / 0.5)
    assert 1 < half.tokens(shape, lookahead=True) < half.tokens(wide, lookahead=True) < 5
    for wrong in (0, 1, -0.5, float("nan")):
        with pytest.raises(ValueError, match="acceptance="):
            AcceptanceCurve(wrong)
    with pytest.raises(ValueError, match="gain=-1"):
        AcceptanceCurve(0.5, -1)


def test_time_of_a_round():
    plain, lockstep, ahead, _ = divisions(2, ONE)
    setting, acceptance = TreeShape(8, 4, 5), AcceptanceCurve(0.9)
    assert (plain.name, lockstep.name, ahead.name) == ("2 x plain", "2 x lockstep", "look-ahead 1 + 1")

    def speed(division, shape):
        among = TreeShapes((shape.particles,), (shape.branches,), (shape.block,))
        return best_setting(division, TIMES.latency(division), 3, acceptance, among, 100)

    # Two services share three requests: one of them serves two.
    assert speed(plain, setting).seconds == pytest.approx(COSTS.alone.at(2, 200) + 0.0002 / 16)
    drafting, scoring = 5 * COSTS.draft.at(2 * 8, 200), COSTS.target.at(2 * 8 * 6, 200)
    assert speed(lockstep, TreeShape(8, 1, 5)).seconds == pytest.approx(drafting + scoring + 0.0002)
    drafting, scoring = 5 * COSTS.draft.at(3 * 32, 300), COSTS.target.at(3 * 40, 300)
    predicted = speed(ahead, setting)
    assert predicted.seconds == pytest.approx(max(drafting, scoring) + 0.0002)
    assert predicted.total == pytest.approx(3 * predicted.tokens / predicted.seconds)


def test_the_best_setting_is_that_of_all():
    ahead, acceptance, among = (
        Division(LOOKAHEAD, "apart", 1, 1, 1),
        AcceptanceCurve(0.9),
        TreeShapes((1, 4, 8), (1, 4), (2, 5, 9)),
    )
    best = best_setting(ahead, COSTS, 1, acceptance, among, 256)
    each = [TreeShapes((s.particles,), (s.branches,), (s.block,)) for s in among.of(LOOKAHEAD)]
    speeds = [best_setting(ahead, COSTS, 1, acceptance, one, 256).per_request for one in each]
    assert len(speeds) == 18 and best.per_request >= 0.999 * max(speeds)


def test_one_request_wants_two_gpus_and_a_crowd_plain_decoding():
    """Many requests make passes compute-bound, and with a poor draft nothing beats plain decoding, unless contexts are
    long."""
    found = divisions(2, ONE)

    def fastest(requests, one, context):
        return rank_divisions(found, TIMES, requests, AcceptanceCurve(one), TreeShapes(), context)[0]

    alone = fastest(1, 0.9, 256)
    assert alone.division.form == LOOKAHEAD and alone.setting.particles > 1
    assert fastest(512, 0.3, 256).division.name == "2 x plain"
    assert fastest(512, 0.3, 16_384).division.form != "plain"


def test_acceptance_from_round_counts():
    stats = EngineStats()
    # Two answers of 3 and 2 rounds, each of which ends within a block. Of the other rounds, one accepts its whole block
    # and two reject a token.
    for accepted in (3, 1, 2, 0, 1):
        stats.exact["walk"].count(accepted, 3, 4, ahead=False, hit=False)
    assert missed_share(stats, 2) == pytest.approx((2 + 0.5) / (7 + 2 + 1))


@pytest.mark.slow
def test_what_a_pair_s_own_answers_say_of_acceptance():
    machine = CpuBackend(ModelPair.load(demo.TARGET, demo.DRAFT))
    acceptance = Advisor(machine, {"temperature": 1.0}).acceptance(Division(LOCKSTEP, "shared", 1, 1, 1), problems=2)
    # On 16 problems a single row holds 97 of 100 tokens; this test compares about 70 tokens, with fixed seeds.
    assert 0.85 < acceptance.one < 1 and 0 <= acceptance.gain <= 2
    one, eight = (acceptance.tokens(TreeShape(rows, 1, 5), lookahead=False) for rows in (1, 8))
    assert eight >= one


@pytest.fixture
def timed(monkeypatch):
    """Replace the timing of a split by a function that returns times in proportion to the GPUs of each model, or
    raises. Returns a function that takes what says why a mode does not run, and returns the list of timed modes."""

    def replace_timing(error_of: Callable[[Mode], str | None] = lambda mode: None) -> list[Mode]:
        modes: list[Mode] = []

        def measure(backend, mode, effort, rows):
            modes.append(mode)
            if (error := error_of(mode)) is not None:
                raise WorkerGroupError(f"{error}\nin detail")
            draft, target = mode.degrees
            return LatencyModel(flat(1e-3 / draft), flat(2e-2 / target), flat(2e-2 / target), 3e-4)

        monkeypatch.setattr(advise, "measure_split", measure)
        return modes

    return replace_timing


def splits(modes: list[Mode]) -> list[tuple[bool, tuple[int, int]]]:
    return [(mode.shared, mode.degrees) for mode in modes]


def test_a_target_that_leaves_a_gpu_no_room_does_not_hide_the_draft_s_times(timed):
    """70B in bfloat16 take 131 GiB, more than a GPU of 141 GiB can hold beside its pools. A draft on one GPU is timed
    all the same, so that the times of all divisions that fit are known."""
    modes, degrees, fits = timed(), Degrees.of(LARGE, 8), weights_fit(LARGE, GPU)
    found = Advisor(None, {}).times(degrees, 8, fits, STEADY, 32)
    assert {*found.of_target} == {*range(2, 9)} and {*found.of_draft} == {*range(1, 9)}
    that_fit = divisions(8, degrees, fits)
    assert len(that_fit) == 63 and all(map(found.knows, that_fit)) and not any(map(found.left_out_of, that_fit))
    assert splits(modes) == [*((True, (each, each)) for each in range(2, 9)), (False, (1, 2))]
    whole = found.latency(Division(LOCKSTEP, "shared", 1, 4, 1))
    assert (whole.draft.at(1, 0), whole.target.at(1, 0)) == pytest.approx((1e-3, 5e-3))
    (why,) = {str(found.left_out_of(each)) for each in divisions(8, degrees) if each.target == 1}
    assert why == "target on 1 GPU (its weights do not fit)"


def test_with_too_few_gpus_for_models_apart_the_draft_is_timed_whole(timed):
    modes = timed()
    found = Advisor(None, {}).times(Degrees.of(LARGE, 2), 2, weights_fit(LARGE, GPU), STEADY, 32)
    assert splits(modes) == [(True, (2, 2)), (True, (1, 2))]
    assert {*found.of_target} == {2} and {*found.of_draft} == {1, 2}


def test_a_target_that_fits_alone_is_timed_apart_from_the_draft(timed):
    """On one GPU there is room for either model, not for both."""
    modes, both = timed(), {("shared", 1, 1)}

    def fits(division: Division) -> bool:
        return (division.placement, division.draft, division.target) not in both

    found = Advisor(None, {}).times(Degrees((1, 2), (1, 2)), 3, fits, STEADY, 32)
    assert splits(modes) == [(False, (1, 1)), (True, (2, 2))]
    assert {*found.of_target} == {*found.of_draft} == {1, 2}
    assert [str(each) for each in found.left_out] == [
        "target on 1 GPU with placement shared (the weights of both models do not fit)"
    ]
    assert found.left_out_of(Division(PLAIN, "shared", 0, 1, 3)) is None


def test_timings_that_fail_are_left_out_with_their_reason(timed):
    """Processes with both models on two GPUs do not start, nor does a draft on three."""
    modes = timed(lambda mode: "no start" if (mode.shared and mode.degrees[1] == 2) or mode.degrees[0] == 3 else None)
    said: list[str] = []
    degrees = Degrees((1, 2, 3), (1, 2))
    found = Advisor(None, {}, say=said.append).times(degrees, 4, lambda division: True, STEADY, 32)
    assert splits(modes) == [(True, (1, 1)), (True, (2, 2)), (False, (1, 2)), (False, (2, 1)), (False, (3, 1))]
    assert {*found.of_target} == {*found.of_draft} == {1, 2}
    assert [str(each) for each in found.left_out] == [
        "draft on 2 GPUs and target on 2 GPUs with placement shared (no start)",
        "draft on 3 GPUs and target on 1 GPU with placement apart (no start)",
        "draft on 3 GPUs (no start)",
    ]
    known = {each.name for each in divisions(4, degrees) if found.knows(each) and found.left_out_of(each) is None}
    assert {"2 x look-ahead 1 + 1", "look-ahead 2 + 2", "look-ahead 1 + 2", "2 x plain TP 2"} <= known
    assert not known & {"2 x lockstep TP 2", "look-ahead 3 + 1"}
    assert "left out: no start\nin detail" in said


def test_models_that_fit_nowhere(timed):
    for fits in (lambda division: False, lambda division: division.form == PLAIN):
        timed()
        with pytest.raises(ValueError, match="the models fit on these GPUs at no degree"):
            Advisor(None, {}).times(EIGHT, 8, fits, STEADY, 32)


def test_what_ran_comes_first():
    """A forecast that is too high does not win. The fastest plain decoding runs beside the best three."""
    of = times(draft=dict.fromkeys(EIGHT.draft, 0.5), target=dict.fromkeys(EIGHT.target, 5.0))
    ranked = rank_divisions(divisions(8, EIGHT), of, 8, AcceptanceCurve(0.8), TreeShapes(), CONTEXT)
    chosen = to_run(ranked, 3)
    assert chosen[:3] == ranked[:3] and [speed.division.form for speed in chosen[3:]] == [PLAIN]
    measured = dict(zip([(speed.division, speed.requests) for speed in chosen], [100.0, 300.0, 200.0, 250.0]))
    found = with_runs(ranked, measured)
    assert [speed.per_request for speed in found[:4]] == [300.0, 250.0, 200.0, 100.0]
    assert found[0].division == ranked[1].division and found[0].forecast == ranked[1].forecast
    assert found[4:] == [speed for speed in ranked if speed not in chosen]
    assert to_run(chosen[3:], 3) == chosen[3:]
    failed = with_runs(ranked, {(ranked[0].division, ranked[0].requests): 0.0})
    assert failed[:-1] == ranked[1:] and failed[-1].measured == 0.0
