"""The overhead of rounds in the latency model: a disturbed start does not leave it too high for ever."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import pytest

from smc.api.engine_config import EngineConfig
from smc.calibration.latency import BRIEF, Effort, measure_latency
from smc.local_engine import local_engine
from smc.scheduler.round_overhead import SAMPLES, RoundOverhead
from smc.scheduler.speculation import LatencyCurve, LatencyModel, ModelLatency
from smc.types import Decoding
from tests.pairwise import one_of
from tests.scheduler.harness import request
from tests.scheduler.pairs import tiny_pair

FORMS = [EngineConfig(form="lockstep", block=3, max_slots=8), EngineConfig(block=3, branches=2, max_slots=8)]
by_form = pytest.mark.parametrize("config", one_of(*FORMS), ids=["lockstep", "look-ahead"])
MS = 1_000_000
ONE = ModelLatency(LatencyCurve(((1, 1e-3),)))
DISTURBED = LatencyModel(ONE, ONE, ONE, round_overhead=5e-3)


@dataclass(frozen=True)
class Read:
    """A round that has been read."""

    work: dict[str, tuple[int, int]]

    def spans(self) -> dict[str, tuple[int, int]]:
        return self.work


def pair_rounds(count: int, period: int, gap: int = 0) -> list[Read]:
    """Rounds in which the draft works for 2 ms and the target for 3, `gap` after it. One ends `period` after the other.
    All times are in nanoseconds."""
    begins = range(0, count * period, period)
    return [
        Read({"draft": (at, at + 2 * MS), "target": (at + 2 * MS + gap, at + 5 * MS + gap), "select": (at, at + MS)})
        for at in begins
    ]


def after(latency: LatencyModel, steps: list[list[Read]], *, beside_prompts: bool = False) -> LatencyModel:
    watch = RoundOverhead()
    for rounds in steps:
        latency = watch.corrected(latency, rounds, beside_prompts=beside_prompts)
    return latency


@pytest.mark.parametrize("gap", [0, MS // 10], ids=["at once", "later"])
def test_what_rounds_show_replaces_a_higher_measurement(gap, caplog):
    rounds = [[one] for one in pair_rounds(SAMPLES + 1, 5 * MS + MS // 5, gap)]
    assert after(DISTURBED, rounds[:-1]) is DISTURBED
    with caplog.at_level("INFO"):
        found = after(DISTURBED, rounds)
    assert found.round_overhead == pytest.approx(2e-4) and found.parts == DISTURBED.parts
    assert "0.20 ms besides the models' work, not the 5.00 ms" in caplog.text
    assert after(found, rounds) is found


def test_it_is_never_raised():
    low = replace(DISTURBED, round_overhead=1e-4)
    assert after(low, [[one] for one in pair_rounds(2 * SAMPLES, 9 * MS)]) is low


def test_rounds_beside_other_work_show_nothing():
    """Prompts, rounds of another micro-batch, and rounds of the target alone take their time between two rounds."""
    quick = pair_rounds(4 * SAMPLES, 5 * MS)
    assert after(DISTURBED, [[one] for one in quick], beside_prompts=True) is DISTURBED
    assert after(DISTURBED, [[one, one] for one in quick]) is DISTURBED
    assert after(DISTURBED, [[Read({"target": (0, MS)})]] * (4 * SAMPLES)) is DISTURBED
    assert after(DISTURBED, [each for one in quick for each in ([one], [])]) is DISTURBED


@by_form
def test_rounds_of_an_engine_correct_a_disturbed_start(config):
    """A process that starts on the same host while the models are timed made rounds of 0.2 ms besides the models' work
    look like 5 ms; the policy then let the target decode alone whenever 16 requests ran."""
    engine = local_engine(tiny_pair(max_context=512), config)
    measured = measure_latency(engine, BRIEF)
    engine.latency = replace(measured, round_overhead=1.0)
    list(engine.run([request([1, 2], particles=2, max_tokens=400, ignore_eos=True)]))
    assert engine.latency.round_overhead < 0.1
    assert replace(engine.latency, round_overhead=0) == replace(measured, round_overhead=0)


def test_other_work_on_the_host_does_not_change_the_measurement():
    engine, paused = local_engine(tiny_pair(), FORMS[0]), []
    run = engine.executor.round

    def paused_often(plan):
        # Only rounds of the request that is timed for this have one group of two particles.
        if plan.kind.decodings == {Decoding.WALK} and plan.arrays.size_G.max() == 2:
            paused.append(len(paused) % 2)
            time.sleep(0.2 * paused[-1])
        return run(plan)

    engine.executor.round = paused_often
    latency = measure_latency(engine, Effort(0.0, 8, 8, 0, 4, 64))
    assert len(paused) > 8
    assert latency.round_overhead < 0.15
