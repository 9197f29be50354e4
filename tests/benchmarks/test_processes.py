"""Worker groups for measurements, without Ray: they serve one engine after another, report errors, and leave no process
behind."""

from __future__ import annotations

import json
import math
import os
import signal
import time
import traceback
from contextlib import closing
from dataclasses import replace
from itertools import groupby

import psutil
import pytest

from benchmarks import processes as processes_module
from benchmarks.backends import Mode
from benchmarks.load import problem_load, random_load
from benchmarks.processes import ProcessBackend, RankProcesses, placed, see_only
from benchmarks.reports.speed import WIDE, SpeedPlan, in_turn, measure_speed
from benchmarks.speed import ModeTimer, Speed, TimedRounds, median_length, unattended
from services.launch.config import WorkerGroupConfig, WorkerGroupError
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import Method, SamplingParams
from smc.local_engine import ModelPair, local_engine
from smc.scheduler.speculation import LatencyCurve, LatencyModel, ModelLatency
from smc.scheduler.stats import LANES
from tests.scheduler.harness import answers

pytestmark = pytest.mark.xdist_group("ray")
CONFIG = WorkerGroupConfig(start_timeout=60.0, link_timeout=20.0)


def pids(processes: RankProcesses) -> list[int]:
    return [rank._process.pid for rank in processes._ranks.values()]


def test_one_engine_after_another_over_the_same_models_until_a_rank_dies():
    """The error names the rank that died, and the other rank ends as well."""
    demo_pair = ModelPair.load(demo.TARGET, demo.DRAFT)
    asked = [
        Request(str(i), tuple(range(5, 12 + i)), SamplingParams(method="smc", particles=4, seed=i, max_tokens=12))
        for i in range(3)
    ]
    lockstep = EngineConfig(form="lockstep", block=3, micro_batches=2, max_slots=16)
    with RankProcesses(replace(CONFIG, link="grpc")) as processes:
        ranks = pids(processes)
        for engine in (EngineConfig(block=4, branches=2, max_slots=16), lockstep):
            expected = answers(local_engine(demo_pair, engine), asked)
            with processes.engine(engine) as remote:
                found = {o.request_id: o.answer for o in remote.engine.run(asked) if o.answer}
                assert {i: a.tokens for i, a in found.items()} == {i: a.tokens for i, a in expected.items()}
            assert all(map(psutil.pid_exists, ranks))
        with pytest.raises(WorkerGroupError, match="target0 died"), processes.engine(lockstep) as remote:
            remote.engine.submit(
                replace(asked[0], params=SamplingParams(method="smc", particles=4, seed=1, max_tokens=50))
            )
            remote.engine.step()
            (target,) = [rank for rank in processes._ranks.values() if rank.name == "target0"]
            os.kill(target._process.pid, signal.SIGKILL)
            while not remote.engine.idle:
                remote.engine.step()
    assert not any(map(psutil.pid_exists, ranks))


@pytest.mark.parametrize("degrees", [(1, 1), pytest.param((1, 2), marks=pytest.mark.slow), (2, 2)])
def test_ranks_that_hold_both_models(degrees):
    """Every rank has its share of the target, and of the draft or the whole draft."""
    lockstep = EngineConfig(form="lockstep", block=3, max_slots=16)
    params = SamplingParams(method="exact", particles=3, temperature=0.7, seed=3, max_tokens=12)
    asked = [Request(str(i), tuple(range(5, 12 + i)), params) for i in range(3)]
    expected = answers(local_engine(ModelPair.load(demo.TARGET, demo.DRAFT), lockstep), asked)
    mode = Mode("lockstep", Method.EXACT, lockstep, 3, degrees, shared=True)
    assert mode.gpus == degrees[1]
    with closing(ProcessBackend(CONFIG)) as machine:
        with machine.engine(mode, lockstep) as engine:
            found = {out.request_id: out.answer for out in engine.run(asked) if out.answer}
        ranks = pids(machine._processes[1])
        assert len(ranks) == degrees[1]
        with machine.engine(replace(mode, name="plain"), lockstep):
            assert pids(machine._processes[1]) == ranks, "the weights are loaded once"
    assert {i: answer.tokens for i, answer in found.items()} == {i: answer.tokens for i, answer in expected.items()}
    assert not any(map(psutil.pid_exists, ranks))


@pytest.mark.slow
def test_a_rank_that_cannot_load_says_so_at_once():
    """The message names the rank and its error. The traceback is the exception's cause, and appears whenever the error
    is printed or logged."""
    begin = time.monotonic()
    failed = pytest.raises(WorkerGroupError, match=r"(draft|target)0: \w+Error: .*(CUDA|cuda)")
    with RankProcesses(replace(CONFIG, device="cuda")) as processes, failed as found, processes.engine(EngineConfig()):
        pass
    assert time.monotonic() - begin < 45
    shown = "".join(traceback.format_exception(found.value))
    assert "in load_rank" in shown and "in load_rank" not in str(found.value)


@pytest.mark.slow
def test_speed_of_models_in_processes_of_their_own():
    """The same modes as in a benchmark on GPUs, on CPUs; the weights are loaded once."""
    modes = [
        Mode("plain", Method.TARGET, EngineConfig(block=4), 1, (0, 1)),
        Mode("lookahead", Method.SMC, EngineConfig(block=4, smc_block=3, branches=2), 4, (1, 1)),
        Mode("lockstep-apart", Method.EXACT, EngineConfig(form="lockstep", block=3), 4, (1, 1)),
    ]
    told = []
    with closing(ProcessBackend(CONFIG)) as machine:
        load = random_load(machine.tokenizer, 2, 16)
        timer, problems = ModeTimer(machine, told.append), problem_load(machine.tokenizer, 2)
        loads = [replace(load, distribution={"top_p": 0.9}), problems]
        (plain,), ahead, lockstep = (
            list(timer.run(mode, given, 3)) for mode, given in zip(modes, (loads[:1], loads[::-1], loads))
        )
        rows = [plain, ahead[1], *lockstep]
        slow_draft, fast = ModelLatency(LatencyCurve(((1, 1.0),))), ModelLatency(LatencyCurve(((1, 1e-3),)))
        latency = LatencyModel(slow_draft, fast, fast, 0.0)
        (alone,) = ModeTimer(machine, latency=lambda mode: latency).run(modes[2], [problems], 3)
        with pytest.raises(ValueError, match="top_p=2"):
            list(ModeTimer(machine).run(modes[0], [replace(load, distribution={"top_p": 2})], 3))
    assert len(told) == 15 and all(turn.end > turn.begin for turn in told)
    assert [row.gpus for row in rows] == [1, 2, 2, 2] and [row.decoding for row in rows] == [
        "target",
        "distinct",
        "exact",
        "exact",
    ]
    # For problems, tokens of a tree are confirmed; for random prompts hardly any.
    assert rows[3].tokens > 2 and 20 < rows[3].context < 200 and (rows[3].rows, rows[3].alone) == (4, 0)
    assert alone.alone == 1 and alone.tokens <= 3 and alone.draft == 0
    assert ahead[0].prompts == problems.name and ahead[0].context == rows[3].context
    assert [row.tokens for row in rows[:2]] == [4, 3] and 1 <= rows[2].tokens <= 4
    for row in rows:
        assert math.isclose(row.total, 2 * row.per_request)
        assert row.round > 0 and row.target > 0 and 0 <= row.idle < 1 and 0 < row.floor < 1
        assert (row.draft > 0) == (row.mode != "plain")
        assert 0 <= row.link < row.round
    assert rows[0].select == 0 and rows[1].select > 0


@pytest.mark.parametrize(
    ("degrees", "apart", "gpus", "draft", "target"),
    [
        ((1, 1), (1, 1), 2, [0], [1]),
        ((0, 1), (1, 1), 2, [0], [1]),  # plain decoding in the processes of look-ahead
        ((0, 1), (1, 1), 1, [0], [0]),  # with a single GPU these processes do not exist
        ((1, 3), (1, 3), 4, [0], [1, 2, 3]),
        ((0, 4), (1, 3), 4, [0], [0, 1, 2, 3]),
        ((0, 2), (1, 1), 2, [0], [0, 1]),
        ((2, 2), (2, 2), None, [0, 1], [2, 3]),
    ],
)
def test_which_gpu_each_rank_is_on(degrees, apart, gpus, draft, target):
    assert placed(degrees, apart, gpus) == {"draft": draft, "target": target}


@pytest.mark.parametrize(("given", "gpu", "seen"), [(None, 2, "2"), ("4,7", 1, "7"), ("GPU-a", 0, "GPU-a")])
def test_a_rank_sees_one_of_the_gpus_that_were_given(monkeypatch, given, gpu, seen):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    see_only(gpu)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize(("given", "shown"), [("0", 1), ("", 0)])
def test_a_gpu_that_was_not_given_is_refused(monkeypatch, given, shown):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    with pytest.raises(
        ValueError, match=f"GPU number 1 is asked for, but CUDA_VISIBLE_DEVICES='{given}' shows {shown}"
    ):
        see_only(1)


def test_time_in_which_nobody_works_is_counted_once():
    """Two timed rounds of 100 ns. Draft and target overlap, then 10 ns are idle. Whatever begins with the last round is
    ignored."""
    rounds = [
        {"draft": (at, at + 60), "target": (at + 20, at + 80), "select": (at + 85, at + 95)}
        for at in (1000, 1100, 1200)
    ]
    assert math.isclose(unattended(rounds), 1e-9 * 2 * (5 + 5))
    apart = TimedRounds(work=[*rounds, *rounds], runs=[0] * len(rounds) + [1] * len(rounds))
    assert math.isclose(apart.link, 1e-9 * (5 + 5))
    assert unattended(rounds[:1]) == 0.0
    assert math.isclose(median_length(rounds, "select"), 1e-8) and median_length(rounds, "remap") == 0.0


@pytest.mark.parametrize(("degrees", "gpus"), [((1, 1), 2), ((1, 1), 1), ((1, 3), 4), ((2, 2), 4), ((2, 1), 8)])
def test_what_the_same_processes_run_is_run_in_a_row(degrees, gpus):
    plan = SpeedPlan(
        degrees, ("plain", WIDE, "lockstep", "lookahead", "lockstep-apart"), (2, 4), (8,), (2,), (16, 24), (1, 2), 2, {}
    )
    rows = list(plan.rows(gpus))
    # K is that of every method: by default SMC and rejection have another one than walks.
    assert all(mode.config.fixed_block == mode.config.block == 8 for mode, *_ in rows if mode.method is Method.SMC)
    turns = in_turn(rows)
    assert [turn for _, turn in sorted(turns, key=lambda each: each[0])] == rows
    places = [placed(mode.degrees, degrees, gpus) for _, (mode, *_) in turns if mode.name != "lockstep"]
    assert len(list(groupby(places))) == len({json.dumps(place) for place in places})


@pytest.mark.slow
def test_processes_are_started_no_more_often_than_targets_are_split(monkeypatch):
    """Processes are reused for all modes with the same split of the target, for any order of modes and number of loads.
    The results keep the requested order."""
    started = []

    class Counted(RankProcesses):
        def __init__(self, config: WorkerGroupConfig, gpus: dict[str, list[int]] | None = None) -> None:
            started.append((config.draft_tp, config.target_tp))
            super().__init__(config, gpus)

    monkeypatch.setattr(processes_module, "RankProcesses", Counted)
    plan = SpeedPlan((1, 1), ("plain-tp", "lookahead"), (2,), (3,), (2,), (16, 24), (1,), 2, {})
    kept = []
    with closing(ProcessBackend(CONFIG)) as machine:
        rows = measure_speed(
            plan, machine, 2, None, lambda found: kept.append([(row.context, row.mode) for row in found])
        )
    asked = [(context, mode) for context in (16, 24) for mode in plan.modes]
    assert sorted(started) == [(1, 1), (1, 2)] and [(row.context, row.mode) for row in rows] == kept[-1] == asked
    assert [len(found) for found in kept] == [1, 2, 3, 4] and all(
        found == sorted(found, key=asked.index) for found in kept
    )


@pytest.mark.slow
def test_a_trace_of_timed_rounds(tmp_path, smcserve):
    """Every span is in the lane of the process that did the work."""
    plan, path = SpeedPlan((1, 1), ("lookahead",), (2,), (3,), (2,), (16,), (1,), 3, {}, True), tmp_path / "trace.json"
    kept: list[Speed] = []
    with closing(ProcessBackend(replace(CONFIG, link="grpc"))) as machine:
        (row,) = measure_speed(plan, machine, 2, path, kept.extend)
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    done = {
        (LANES["draft"], "draft"),
        (LANES["target"], "target"),
        (LANES["target"], "select"),
        (LANES["target"], "remap"),
    }
    assert done <= {(event["tid"], event["name"]) for event in events}
    assert row.mode == "lookahead" and len(events) > 12 and kept == [row]
    ran = smcserve("timeline", path, tmp_path / "picture.png")
    assert ran.code == 0 and (tmp_path / "picture.png").stat().st_size > 5000
    assert [line.split()[0] for line in ran.out.splitlines()] == ["draft", "coordinator", "target"]
