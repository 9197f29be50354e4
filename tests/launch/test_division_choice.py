"""The division that `serve --gpus` starts: measured, forecast or estimated, and always with the options that are
given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.reports.advise import store_measurement
from services.launch.config import WorkerGroupConfig
from services.launch.division import Degrees, Division, DivisionSpeed, LeftOut, divisions, rank_divisions
from services.launch.division_choice import (
    DivisionMeasurement,
    choose_division,
    describe,
    measurement_file,
    stored_measurement,
    weights_fit,
)
from smc.calibration.forecast import LOCKSTEP, LOOKAHEAD, PLAIN, AcceptanceCurve, TreeShape, TreeShapes
from tests.launch.test_division import CONTEXT, times

DEGREES = Degrees.of(WorkerGroupConfig(load="random", target=Path("llama-70b"), draft=Path("llama-1b")), 8)
SLOW_DRAFT = times(
    draft=dict(zip(range(1, 9), (3.0, 1.7, 1.3, 1.0, 0.8, 0.7, 0.68, 0.66))),
    target=dict(zip(range(1, 9), (9.0, 6.0, 5.8, 5.6, 5.55, 5.5, 5.45, 5.4))),
)
"""Times by which one request is fastest on 6 + 2."""
MEASURED = DivisionMeasurement(SLOW_DRAFT, AcceptanceCurve(0.9), CONTEXT)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def config() -> WorkerGroupConfig:
    return WorkerGroupConfig(load="random", target=Path("llama-70b"), draft=Path("llama-1b"), device="cuda")


def test_what_was_measured_is_applied(config):
    """The times of each degree decide, with the number of requests that are expected."""
    store_measurement(config, MEASURED)
    one = choose_division(config, 8, 1, {})
    assert (one.best.division.draft, one.best.division.target, one.best.division.groups) == (6, 2, 1)
    setting = one.best.setting
    assert one.options() == {
        "placement": "apart",
        "form": "lookahead",
        "draft_tp": 6,
        "target_tp": 2,
        "worker_groups": 1,
        "block": setting.block,
        "branches": setting.branches,
    }
    assert f"8 GPUs for 1 request at a time: look-ahead 6 + 2 (N={setting.particles}, K={setting.block}" in str(one)
    assert "forecast from times that `bench --advise` measured" in str(one)
    assert f"before {one.beaten[0].division.name} (" in str(one)
    many = choose_division(config, 8, 64, {})
    assert many.best.division.groups > 1 and many.best.per_request > 0
    few = choose_division(config, 2, 1, {})
    assert few.best.division.gpus <= 2


def test_what_ran_decides_before_what_was_forecast(config):
    ranked = rank_divisions(
        divisions(8, DEGREES), SLOW_DRAFT, 1, AcceptanceCurve(0.9), TreeShapes(), CONTEXT, may_be_alone=False
    )
    second = replace(ranked[1], measured=500.0)
    store_measurement(config, replace(MEASURED, runs=(replace(ranked[0], measured=300.0), second)))
    found = choose_division(config, 8, 1, {})
    assert (found.best, found.beaten[0].measured) == (second, 300.0)
    assert "as `bench --advise` measured it" in str(found)
    # Another number of requests did not run.
    assert choose_division(config, 8, 2, {}).best.measured is None


def test_runs_that_failed_do_not_count(config):
    ranked = rank_divisions(divisions(8, DEGREES), SLOW_DRAFT, 1, AcceptanceCurve(0.9), TreeShapes(), CONTEXT)
    store_measurement(config, replace(MEASURED, runs=(replace(ranked[1], measured=0.0),)))
    best = choose_division(config, 8, 1, {}).best
    assert (best.division, best.measured) == (ranked[0].division, None)


def test_times_of_fewer_gpus_do_not_rule_out_larger_degrees(config):
    """What was measured on two GPUs says nothing about TP 8."""
    few = times(draft={1: 3.0, 2: 1.7}, target={1: 9.0, 2: 6.0})
    store_measurement(config, replace(MEASURED, times=few))
    found = choose_division(config, 8, 1, {})
    assert found.best.division.target > 2
    assert "estimated from the models' shapes, as not all divisions of 8 GPUs are measured" in str(found)
    assert choose_division(config, 2, 1, {}).is_measured


def test_what_could_not_be_timed_is_not_chosen(config):
    """Times of the other divisions are used all the same, and the reason is said. If nothing else has the given
    options, the shapes decide."""
    four = times(draft={1: 3.0, 2: 1.7, 4: 1.0}, target={2: 6.0, 3: 5.8, 4: 5.6})
    left_out = (
        LeftOut("its weights do not fit", target=1),
        LeftOut("exploded", draft=3),
        LeftOut("no start", "shared", 4, 4),
    )
    store_measurement(config, replace(MEASURED, times=replace(four, left_out=left_out)))
    found = choose_division(config, 4, 1, {})
    of_all = [speed.division for speed in (found.best, *found.beaten)]
    assert found.is_measured and not any(each.covers(division) for each in left_out for division in of_all)
    assert Division(LOCKSTEP, "shared", 1, 4, 1) in of_all and Division(LOOKAHEAD, "apart", 1, 3, 1) in of_all
    assert str(found).endswith(
        "`bench --advise` measured; it could not time: target on 1 GPU (its weights do not fit), draft on 3 GPUs "
        "(exploded), draft on 4 GPUs and target on 4 GPUs with placement shared (no start)"
    )
    given = choose_division(config, 4, 1, {"target_tp": 1})
    assert given.best.division.target == 1 and not given.is_measured
    assert "as no division with these options could be timed" in str(given)
    assert str(given).endswith("it could not time: target on 1 GPU (its weights do not fit)")
    # Eight GPUs have degrees that nothing is known about.
    assert not choose_division(config, 8, 1, {}).is_measured


def test_at_least_one_worker_group(config):
    with pytest.raises(ValueError, match=r"worker_groups=0; allowed: 'auto', or 1 and more"):
        choose_division(config, 2, 1, {"worker_groups": 0})


def test_the_target_alone_is_started_with_a_draft_beside_it(config):
    """Plain decoding that ran fastest is a shared placement in which nothing is drafted."""
    plain = DivisionSpeed(Division(PLAIN, "shared", 0, 1, 8), 64, None, 1.0, 1e-3, 900.0)
    store_measurement(config, replace(MEASURED, runs=(plain,)))
    found = choose_division(config, 8, 64, {})
    expected = {"placement": "shared", "form": "lockstep", "draft_tp": 1, "target_tp": 1, "worker_groups": 8}
    assert found.options() == expected
    assert describe(found.best) == "8 x lockstep (target alone)" and found.best.measured == 900.0


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize(
    "given",
    [
        {"placement": "shared"},
        {"placement": "apart", "target_tp": 4},
        {"draft_tp": 2},
        {"form": "lockstep"},
        {"form": "lookahead", "worker_groups": 2},
        {"placement": "apart", "form": "lockstep"},
        {"worker_groups": "auto", "target_tp": 2},
        {"block": 3, "branches": 2},
    ],
)
def test_given_options_are_kept(config, given, measured):
    if measured:
        store_measurement(config, MEASURED)
    for requests in (1, 64):
        found = choose_division(config, 8, requests, given)
        division, options = found.best.division, found.options()
        assert {name: options[name] for name in given if name in options and given[name] != "auto"} == {
            name: value for name, value in given.items() if name in options and value != "auto"
        }
        assert division.gpus <= 8 and (division.form == LOOKAHEAD) <= (division.placement == "apart")
        if "form" in given:
            assert division.form == {"lockstep": LOCKSTEP, "lookahead": LOOKAHEAD}[given["form"]]


def test_without_a_measurement_the_shapes_decide(config):
    """Nothing is said about N, F and K."""
    found = choose_division(config, 4, 1, {})
    assert found.options().keys() == {"placement", "form", "draft_tp", "target_tp", "worker_groups"}
    assert found.best.division.target >= 2, "a 70B target is far slower on one GPU than on more"
    assert "estimated from the models' shapes, as nothing is measured for this pair on this machine" in str(found)
    assert "`smcserve bench --advise --device cuda --gpus 4` measures it" in str(found)


def test_weights_must_fit(config):
    """70B in bfloat16 are 131 GiB: more than two GPUs of 80 GiB hold with room for anything else."""
    gpu = 80 << 30
    found = choose_division(config, 8, 64, {}, gpu)
    assert found.best.division.target >= 3
    fits = weights_fit(config, gpu)
    assert fits(Division(LOOKAHEAD, "apart", 1, 3, 1)) and not fits(Division(LOOKAHEAD, "apart", 1, 2, 1))
    in_fp8 = replace(config, target_dtype="fp8")
    assert weights_fit(in_fp8, gpu)(Division(LOCKSTEP, "shared", 1, 2, 1))
    with pytest.raises(ValueError, match=r"gpus=2: the weights take more than 80% of a GPU's 80 GiB in every division"):
        choose_division(config, 2, 1, {}, gpu)


@pytest.mark.parametrize(
    "given",
    [{"placement": "apart", "target_tp": 8}, {"placement": "shared", "form": "lookahead"}, {"worker_groups": 9}],
)
def test_options_that_no_division_has(config, given):
    name, value = list(given.items())[-1]
    with pytest.raises(
        ValueError, match=rf"gpus=8 with .*{name}={value!r}.*: no division of 8 GPUs; allowed: target_tp"
    ):
        choose_division(config, 8, 1, given)


def test_a_measurement_is_that_of_one_pair(config):
    """Other weights, types or models have files of their own; a broken file is left out."""
    assert stored_measurement(config) is None
    path = store_measurement(
        config,
        replace(
            MEASURED,
            runs=(DivisionSpeed(Division(LOOKAHEAD, "apart", 6, 2, 1), 1, TreeShape(8, 4, 5), 3.5, 0.01, 320.0),),
        ),
    )
    assert path == measurement_file(config) and stored_measurement(config).runs[0].setting == TreeShape(8, 4, 5)
    assert stored_measurement(config) == DivisionMeasurement.from_json(path.read_text())
    for other in (replace(config, target_dtype="fp8"), replace(config, draft=Path("llama-3b"))):
        assert stored_measurement(other) is None
    path.write_text("{")
    assert stored_measurement(config) is None
