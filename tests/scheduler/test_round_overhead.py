"""The overhead of rounds in the latency model: a disturbed start does not leave it too high for ever."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from smc.api.engine_config import EngineConfig
from smc.calibration.latency import Effort, measure_latency
from smc.local_engine import local_engine
from smc.scheduler.round_overhead import PATIENCE, RETRY, SAMPLES, RoundOverhead
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


def pair_rounds(count: int, period: int, drift: int = 0, at_once: int = 1) -> list[list[Read]]:
    """Steps that read rounds in which the draft works for 2 ms and then the target for 3, `at_once` in each. The last
    of a step ends `period` after that of the one before. `drift`: of the draft's clock. Times are in nanoseconds."""
    work = {"draft": (drift, drift + 2 * MS), "target": (2 * MS, 5 * MS), "select": (0, MS)}
    return [
        [
            Read({name: (at + 3 * MS * n + begin, at + 3 * MS * n + end) for name, (begin, end) in work.items()})
            for n in range(at_once)
        ]
        for at in range(0, count * period, period)
    ]


def after(steps: list[list[Read]], *, beside_prompts: bool = False, lookahead: bool = False) -> list[float]:
    """Overheads of `DISTURBED` after each step."""
    watch, found = RoundOverhead(lookahead=lookahead), []
    watch.begin(DISTURBED)
    for rounds in steps:
        watch.follow(rounds, beside_prompts=beside_prompts)
        assert watch.latency is not None and watch.latency.parts == DISTURBED.parts
        found.append(watch.latency.round_overhead)
    return found


def test_it_counts_as_nothing_until_rounds_have_shown_it():
    """Otherwise one that is measured too high would keep the engine from drafting."""
    assert after(pair_rounds(SAMPLES, 6 * MS)) == [0.0] * SAMPLES
    # Never as more than was measured: a host that is slower than its GPUs is not counted.
    assert after(pair_rounds(3 * SAMPLES, 14 * MS))[-1] == 5e-3
    # Nor as more than is shown, even if that is little beside long rounds.
    assert after(pair_rounds(SAMPLES + 1, 9 * MS))[-1] == pytest.approx(4e-3)


def test_it_counts_as_nothing_again_after_a_long_time_without_the_draft():
    """The rounds that have shown it may have been disturbed, too, and nothing is shown while nothing is drafted."""
    alone = [[Read({"target": (0, MS)})]] * RETRY
    found = after([*pair_rounds(SAMPLES + 1, 10 * MS), *alone, *pair_rounds(SAMPLES + 1, 6 * MS)])
    assert found[SAMPLES] == 5e-3 == found[SAMPLES + RETRY - 1]
    assert found[SAMPLES + RETRY] == 0 and found[-1] == pytest.approx(1e-3)


def test_what_was_measured_counts_if_rounds_never_show_it():
    """A request that the target decodes alone runs beside all of them."""
    beside = [[*one, Read({"target": (0, MS)})] for one in pair_rounds(PATIENCE, 6 * MS)]
    assert after(beside) == [0.0] * (PATIENCE - 1) + [5e-3]


@pytest.mark.parametrize("drift", [0, 40 * MS, -40 * MS])
@pytest.mark.parametrize(
    ("period", "options"),
    [
        pytest.param(5 * MS, {"at_once": 1}, id="lockstep"),
        pytest.param(3 * MS, {"at_once": 1, "lookahead": True}, id="look-ahead"),
        pytest.param(6 * MS, {"at_once": 2}, id="two micro-batches"),
    ],
)
def test_what_rounds_show_replaces_a_higher_measurement(period, options, drift, caplog):
    lookahead, at_once = options.get("lookahead", False), options["at_once"]
    with caplog.at_level("INFO"):
        found = after(pair_rounds(SAMPLES + 1, period + MS // 5, drift, at_once), lookahead=lookahead)
    assert found == [0.0] * SAMPLES + [pytest.approx(2e-4)]
    assert "0.20 ms besides the models' work, not the 5.00 ms" in caplog.text


def test_it_falls_further_with_what_later_rounds_show():
    found = after([*pair_rounds(SAMPLES + 1, 8 * MS), *pair_rounds(SAMPLES + 1, 6 * MS)])
    assert found[SAMPLES] == pytest.approx(3e-3) and found[-1] == pytest.approx(1e-3)


def test_steps_with_other_work_show_nothing():
    """Prompts and rounds of the target alone take their time between two rounds, a step without rounds has no end, and
    the round of another micro-batch may lie beside this one."""
    quick = pair_rounds(3 * SAMPLES, 6 * MS)
    for steps, prompts in (
        (quick, True),
        ([[Read({"target": (0, MS)})]] * len(quick), False),
        ([each for one in quick for each in (one, [])], False),
        ([each for one, two in zip(quick, pair_rounds(len(quick), 6 * MS, at_once=2)) for each in (one, two)], False),
        (pair_rounds(3 * SAMPLES, 3 * MS), False),
    ):
        assert set(after(steps, beside_prompts=prompts)) == {0.0}


@by_form
def test_an_engine_drafts_after_a_disturbed_start(config):
    """A process that starts on the same host while the models are timed made rounds of 0.2 ms besides the models' work
    look like 5 ms; the policy then let the target decode alone whenever 16 requests ran."""
    engine = local_engine(tiny_pair(max_context=512), config)
    # Drafting costs nothing, so that only the overhead speaks against it.
    nothing, second = ModelLatency(LatencyCurve(((1, 1e-9),))), ModelLatency(LatencyCurve(((1, 1.0),)))
    engine.latency = LatencyModel(nothing, nothing, second, round_overhead=1e3)
    requests = [
        request([1, 2], str(i), method="exact", particles=2, max_tokens=200, ignore_eos=True, seed=i) for i in range(2)
    ]
    statistics = [output.answer.statistics for output in engine.run(requests) if output.answer]
    assert [each.alone_rounds for each in statistics] == [0, 0]
    assert engine.latency.round_overhead < 0.1


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
