"""Divisions of GPUs: which there are, and which one is the fastest by given times of every degree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from services.launch.config import WorkerGroupConfig
from services.launch.division import (
    Degrees,
    DegreeTimes,
    Division,
    LeftOut,
    best_setting,
    divisions,
    rank_divisions,
)
from smc.calibration.forecast import LOCKSTEP, LOOKAHEAD, PLAIN, AcceptanceCurve, TreeShape, TreeShapes
from smc.scheduler.speculation import LatencyCurve, LatencyModel, ModelLatency

EIGHT = Degrees((1, 2, 4, 6, 8), (1, 2, 4, 6, 8))
CONTEXT = 512


def flat(seconds: float, rows: int = 64) -> ModelLatency:
    """A pass that takes equally long up to `rows` rows, and then in proportion."""
    return ModelLatency(LatencyCurve(((1, seconds), (rows, seconds * 1.01), (64 * rows, seconds * 64))), 1e-8)


def times(draft: Mapping[int, float], target: Mapping[int, float]) -> DegreeTimes:
    """Times of a step and of a pass in milliseconds, by degree."""
    steps = {degree: flat(1e-3 * each) for degree, each in draft.items()}
    passes = {degree: flat(1e-3 * each) for degree, each in target.items()}
    models = {degree: LatencyModel(steps[min(steps)], each, each, 3e-4) for degree, each in passes.items()}
    return DegreeTimes(models, steps, 4e-4)


def best(of: DegreeTimes, requests: int, one: float = 0.8) -> Division:
    found = divisions(8, Degrees(tuple(of.of_draft), tuple(of.of_target)))
    return rank_divisions(found, of, requests, AcceptanceCurve(one), TreeShapes(), CONTEXT)[0].division


def test_all_divisions_of_four_gpus():
    names = {each.name: each.gpus for each in divisions(4, Degrees((1, 2), (1, 2, 3, 4)))}
    assert names == {
        "4 x plain": 4,
        "2 x plain TP 2": 4,
        "plain TP 3": 3,
        "plain TP 4": 4,
        "4 x lockstep": 4,
        "2 x lockstep TP 2": 4,
        "2 x lockstep TP 2, draft whole": 4,
        "lockstep TP 3, draft whole": 3,
        "lockstep TP 4, draft whole": 4,
        **{
            each.replace("FORM", form): size
            for form in (LOOKAHEAD, LOCKSTEP)
            for each, size in {
                "2 x FORM 1 + 1": 4,
                "FORM 1 + 2": 3,
                "FORM 1 + 3": 4,
                "FORM 2 + 1": 3,
                "FORM 2 + 2": 4,
            }.items()
        },
    }
    few = divisions(4, Degrees((1, 2), (1, 2, 3, 4)), lambda each: each.placement == "apart" and each.draft == 2)
    assert [each.name for each in few] == [
        f"{form} 2 + {target}" for target in (1, 2) for form in ("look-ahead", "lockstep")
    ]
    assert divisions(1, Degrees((1,), (1,))) == [
        Division(PLAIN, "shared", 0, 1, 1),
        Division(LOCKSTEP, "shared", 1, 1, 1),
    ]


def test_degrees_that_shapes_allow():
    """The demo draft has two query heads, the target eight: no more ranks than that can share them."""
    config = WorkerGroupConfig()
    shapes = [config.sources.draft.config, config.sources.target.config]
    found = Degrees.of(config, 16)
    assert [max(found.draft), max(found.target)] == [shape.num_heads for shape in shapes]
    assert found.draft[0] == found.target[0] == 1 and Degrees.of(config, 1) == Degrees((1,), (1,))


def test_one_request_with_a_draft_that_takes_most_gpus():
    """The target gains little from more than two GPUs, the draft much: 6 + 2."""
    slow_draft = times(draft={1: 3.0, 2: 1.7, 4: 1.0, 6: 0.7, 8: 0.66}, target={1: 9.0, 2: 6.0, 4: 5.6, 6: 5.5, 8: 5.4})
    assert best(slow_draft, 1, 0.9) == Division(LOOKAHEAD, "apart", 6, 2, 1)


def test_one_request_with_halves():
    """Both models gain from four GPUs: 4 + 4."""
    even = times(draft={1: 2.4, 2: 1.5, 4: 0.9, 6: 0.85, 8: 0.82}, target={1: 20.0, 2: 11.0, 4: 6.0, 6: 5.4, 8: 5.0})
    assert best(even, 1, 0.9) == Division(LOOKAHEAD, "apart", 4, 4, 1)


def test_many_requests_in_worker_groups():
    """Passes of many rows take time in proportion, so that eight groups share them; and without good drafts the target
    alone is faster."""
    even = times(draft={1: 0.4, 2: 0.4, 4: 0.4, 8: 0.4}, target={1: 8.0, 2: 7.5, 4: 7.2, 8: 7.0})
    assert best(even, 64) == Division(LOCKSTEP, "shared", 1, 1, 8)
    assert best(even, 4096, 0.3) == Division(PLAIN, "shared", 0, 1, 8)
    assert best(even, 1).groups == 1


def test_a_draft_whole_on_each_rank():
    """A small draft gains nothing from sums over ranks."""
    small = times(draft={1: 0.3, 2: 0.5, 4: 0.6, 8: 0.8}, target={1: 40.0, 2: 20.0, 4: 10.0, 8: 5.0})
    found = [each for each in divisions(8, EIGHT) if each.target == 8]
    ranked = rank_divisions(
        [each for each in found if each.form == LOCKSTEP], small, 1, AcceptanceCurve(0.8), TreeShapes(), CONTEXT
    )
    assert [speed.division.draft for speed in ranked] == [1, 8]


def test_times_are_those_of_each_model_s_degree():
    of = times(draft={1: 1.0, 2: 0.5, 4: 0.25}, target={1: 8.0, 2: 4.0, 4: 2.0})
    apart = of.latency(Division(LOOKAHEAD, "apart", 2, 4, 1))
    assert (apart.draft.at(1, 0), apart.target.at(1, 0), apart.round_overhead) == (0.5e-3, 2e-3, 4e-4)
    whole = of.latency(Division(LOCKSTEP, "shared", 1, 4, 1))
    assert (whole.draft.at(1, 0), whole.target.at(1, 0), whole.round_overhead) == (1e-3, 2e-3, 3e-4)
    assert of.knows(Division(LOCKSTEP, "shared", 1, 4, 1)) and of.knows(Division(PLAIN, "shared", 0, 4, 1))
    assert not of.knows(Division(LOOKAHEAD, "apart", 3, 4, 1)) and not of.knows(Division(PLAIN, "shared", 0, 3, 1))


def test_what_could_not_be_timed():
    """A draft on three GPUs, and both models together on two, did not run: plain decoding on two GPUs needs neither."""
    alike = LeftOut("exploded", "shared", 2, 2)
    of = replace(times(draft={1: 1.0, 2: 0.5}, target={1: 8.0, 2: 4.0}), left_out=(alike, LeftOut("no room", draft=3)))
    assert of.left_out_of(Division(LOCKSTEP, "shared", 2, 2, 4)) == alike
    assert str(alike) == "draft on 2 GPUs and target on 2 GPUs with placement shared (exploded)"
    for form in (LOOKAHEAD, LOCKSTEP):
        assert str(of.left_out_of(Division(form, "apart", 3, 1, 1))) == "draft on 3 GPUs (no room)"
        assert of.left_out_of(Division(form, "apart", 2, 2, 1)) is None
    assert of.left_out_of(Division(PLAIN, "shared", 0, 2, 1)) is None
    assert of.left_out_of(Division(LOCKSTEP, "shared", 1, 2, 1)) is None
    whole = replace(of, left_out=(alike, LeftOut("too large", target=2)))
    assert whole.left_out_of(Division(PLAIN, "shared", 0, 2, 1)).reason == "too large"
    assert whole.left_out_of(Division(LOCKSTEP, "shared", 2, 2, 1)).reason == "too large", "it rules out more"
    assert DegreeTimes.of_record(json.loads(json.dumps(of.record()))) == of


def test_a_group_serves_its_share_of_the_requests():
    of, setting = times(draft={1: 1.0}, target={1: 8.0}), TreeShape(8, 1, 5)
    group = Division(LOCKSTEP, "shared", 1, 1, 2)
    among = TreeShapes((setting.particles,), (1,), (setting.block,))
    speed = best_setting(group, of.latency(group), 5, AcceptanceCurve(0.8), among, CONTEXT)
    assert speed.seconds == pytest.approx(
        5 * of.of_draft[1].at(24, 3 * CONTEXT) + of.of_target[1].target.at(3 * 8 * 6, 3 * CONTEXT) + 3e-4
    )
    assert speed.total == pytest.approx(5 * speed.per_request)


def test_lockstep_with_the_models_apart():
    """With several requests each model works on one half of them while the other model works on the other half."""
    of, among = times(draft={1: 1.0}, target={1: 4.0}), TreeShapes((2,), (1,), (5,))
    draft, target = of.of_draft[1], of.of_target[1].target
    division = Division(LOCKSTEP, "apart", 1, 1, 1)
    one, five = (best_setting(division, of.latency(division), n, AcceptanceCurve(0.8), among, 100) for n in (1, 5))
    assert one.seconds == pytest.approx(5 * draft.at(2, 100) + target.at(2 * 6, 100) + 4e-4)
    drafting, scoring = 5 * draft.at(3 * 2, 300), target.at(3 * 2 * 6, 300)
    assert drafting > scoring and five.seconds == pytest.approx(2 * drafting + 4e-4)
