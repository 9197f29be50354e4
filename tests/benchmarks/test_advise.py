"""Forecasts from latency and acceptance: tokens per round against a simulation, times, possible arrangements, and the
best arrangement."""

from __future__ import annotations

import random

import pytest

from benchmarks.advise import (
    LOOKAHEAD,
    AcceptanceCurve,
    Arrangement,
    TreeShape,
    TreeShapes,
    advise,
    arrangements,
    best_of,
    measure_acceptance,
    missed_share,
)
from benchmarks.backends import CpuBackend
from smc import demo
from smc.local_engine import ModelPair
from smc.scheduler.speculation import WIDTH_GAIN, LatencyCurve, LatencyModel, ModelLatency
from smc.scheduler.stats import EngineStats

COSTS = LatencyModel(
    ModelLatency(LatencyCurve(((1, 0.001), (32, 0.001), (512, 0.008))), 1e-8),
    ModelLatency(LatencyCurve(((1, 0.004), (64, 0.005), (512, 0.040))), 3e-8),
    ModelLatency(LatencyCurve(((1, 0.004), (64, 0.005), (512, 0.020))), 5e-8),
    0.0002,
)
"""Latencies like those of an 8B and a 1B model on one GPU each."""


def simulated(stride: int, found: float, again: float, rounds: int = 200_000) -> float:
    """Simulate look-ahead and return its tokens per round. The tree of a block holds the target's next token with
    probability `found`; a tree newly grown after a miss holds it with probability `again`."""
    generator, tokens, tree = random.Random(7), 0, True
    for _ in range(rounds):
        if not tree:
            tokens, tree = tokens + 1, generator.random() < again
            continue
        right = 0
        while right < stride and generator.random() < found:
            right += 1
        # The first token was known to be right; the last comparison is with the target's token after the block.
        tokens, tree = tokens + min(right + 1, stride), right == stride
    return tokens / rounds


@pytest.mark.parametrize(
    ("one", "particles", "branches", "block"), [(0.7, 8, 4, 5), (0.9, 4, 4, 8), (0.5, 1, 1, 3), (0.97, 8, 4, 5)]
)
def test_tokens_a_round(one, particles, branches, block):
    acceptance = AcceptanceCurve(one)
    width = min(particles, max(1.0, particles * branches * one**block))
    found, again = (1 - (1 - one) / rows**WIDTH_GAIN for rows in (width, min(particles * branches, 32)))
    # A mean over 200,000 rounds has a standard error below 0.2%.
    assert acceptance.lookahead_tokens(particles, branches, block) == pytest.approx(
        simulated(block, found, again), rel=0.01
    )
    assert acceptance.lockstep_tokens(1, block) == pytest.approx((1 - one ** (block + 1)) / (1 - one))


def test_acceptance_and_its_limits():
    sure, blind = AcceptanceCurve(1 - 1e-9), AcceptanceCurve(1e-9, gain=0)
    assert sure.lookahead_tokens(8, 4, 5) == pytest.approx(5) and sure.lockstep_tokens(8, 5) == pytest.approx(6)
    assert blind.lookahead_tokens(8, 4, 5) == pytest.approx(1) and blind.lockstep_tokens(8, 5) == pytest.approx(1)
    assert AcceptanceCurve(0.6, gain=1.0).of_rows(4) == pytest.approx(0.9) and AcceptanceCurve(0.6, gain=0.5).of_rows(
        4
    ) == pytest.approx(0.8)
    for wrong in (0, 1, -0.5, float("nan")):
        with pytest.raises(ValueError, match="acceptance="):
            AcceptanceCurve(wrong)
    with pytest.raises(ValueError, match="gain=-1"):
        AcceptanceCurve(0.5, -1)


def test_time_of_a_round():
    plain, lockstep, ahead = arrangements(2, {1: COSTS})
    setting, acceptance = TreeShape(8, 4, 5), AcceptanceCurve(0.9)
    assert (plain.name, lockstep.name, ahead.name) == ("2 x plain", "2 x lockstep", "look-ahead 1 + 1")
    # Two services share three requests: one of them serves two.
    assert plain.speed(3, None, acceptance, 100).seconds == pytest.approx(COSTS.alone.at(2, 200) + 0.0002 / 16)
    drafting, scoring = 5 * COSTS.draft.at(2 * 8, 200), COSTS.target.at(2 * 8 * 6, 200)
    assert lockstep.speed(3, TreeShape(8, 1, 5), acceptance, 100).seconds == pytest.approx(drafting + scoring + 0.0002)
    drafting, scoring = 5 * COSTS.draft.at(3 * 32, 300), COSTS.target.at(3 * 40, 300)
    predicted = ahead.speed(3, setting, acceptance, 100)
    assert predicted.seconds == pytest.approx(max(drafting, scoring) + 0.0002)
    assert predicted.total == pytest.approx(3 * predicted.tokens / predicted.seconds)


def test_arrangements_fill_the_gpus():
    names = {each.name: each.gpus * each.copies for each in arrangements(4, {1: COSTS, 2: COSTS, 4: COSTS})}
    assert names == {
        "4 x plain": 4,
        "4 x lockstep": 4,
        "2 x look-ahead 1 + 1": 4,
        "2 x plain TP 2": 4,
        "2 x lockstep TP 2": 4,
        "look-ahead 1 + 2": 3,
        "plain TP 4": 4,
        "lockstep TP 4": 4,
    }


def test_the_best_setting_is_that_of_all():
    ahead, acceptance, among = (
        Arrangement("a", LOOKAHEAD, 2, 1, COSTS),
        AcceptanceCurve(0.9),
        TreeShapes((1, 4, 8), (1, 4), (2, 5, 9)),
    )
    best = best_of(ahead, 1, acceptance, among, 256)
    speeds = [ahead.speed(1, setting, acceptance, 256).per_request for setting in ahead.settings(among)]
    assert len(speeds) == 18 and best.per_request >= 0.999 * max(speeds)


def test_one_request_wants_two_gpus_and_a_crowd_plain_decoding():
    """Many requests make passes compute-bound, and with a poor draft nothing beats plain decoding, unless contexts are
    long."""
    found = arrangements(2, {1: COSTS})
    alone, *_ = advise(found, [1], AcceptanceCurve(0.9), TreeShapes(), 256)
    assert alone.arrangement.form == LOOKAHEAD and alone.setting.particles > 1
    crowd, *_ = advise(found, [512], AcceptanceCurve(0.3), TreeShapes(), 256)
    assert crowd.arrangement.name == "2 x plain"
    long, *_ = advise(found, [512], AcceptanceCurve(0.3), TreeShapes(), 16_384)
    assert long.arrangement.form != "plain"


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
    acceptance = measure_acceptance(machine, (0, 1), {"temperature": 1.0}, problems=2)
    # On 16 problems a single row holds 97 of 100 tokens; this test compares about 70 tokens, with fixed seeds.
    assert 0.85 < acceptance.one < 1 and 0 <= acceptance.gain <= 2
    assert acceptance.of_rows(8) >= acceptance.one
