"""Missing GPUs are reported before Ray is started, with the numbers available and needed."""

from __future__ import annotations

import pytest
import torch

from services.cli.service_options import placed, worker_group_config
from services.launch.config import WorkerGroupConfig, check_gpus
from smc.api.engine_config import EngineConfig

NEEDED = "--device cuda needs {}: --target-tp {} and --draft-tp {}, one for each process"


@pytest.fixture
def no_start(monkeypatch):
    def connect(address: str | None) -> None:
        raise AssertionError("Ray was started before GPUs were counted")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("services.launch.cluster.connect", connect)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("command", ["serve", "batch"])
def test_no_gpu_is_said_before_anything_starts(smcserve, no_start, tmp_path, command):
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n')
    given = (lines, tmp_path / "out.jsonl") if command == "batch" else ("--port", 0, "--no-http")
    ran = smcserve(command, *given, "--device", "cuda", "--target-tp", 2)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "this machine has no GPUs" in ran.err and NEEDED.format(3, 2, 1) in ran.err


@pytest.mark.parametrize(("count", "enough"), [(0, False), (1, False), (2, False), (3, True), (8, True)])
def test_fewer_than_asked(monkeypatch, count, enough):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    config = WorkerGroupConfig(device="cuda", target_tp=2)
    if enough:
        check_gpus(config, None)
    else:
        with pytest.raises(ValueError, match=f"this machine has {count or 'no'} GPUs?.*; {NEEDED.format(3, 2, 1)}"):
            check_gpus(config, None)


@pytest.mark.parametrize(
    ("count", "given", "placement"),
    [
        (0, {}, "apart"),
        (1, {}, "shared"),
        (2, {}, "apart"),
        (2, {"target_tp": 2}, "shared"),
        (2, {"target_tp": 2, "draft_tp": 2}, "shared"),
        (3, {"target_tp": 3, "draft_tp": 2}, "apart"),
        (3, {"target_tp": 2}, "apart"),
        (2, {"worker_groups": "2"}, "shared"),
        (3, {"worker_groups": 2}, "shared"),
        (4, {"worker_groups": 2}, "apart"),
        (1, {"worker_groups": "auto"}, "shared"),
        (8, {"worker_groups": "auto"}, "apart"),
        (1, {"form": "lockstep"}, "shared"),
        (1, {"form": "lookahead"}, "apart"),
        (1, {"placement": "apart"}, "apart"),
        (4, {"placement": "shared"}, "shared"),
        (1, {"ray_address": "10.0.0.1:6379"}, "apart"),
        (1, {"device": "cpu"}, "apart"),
    ],
)
def test_both_models_share_gpus_that_are_too_few(monkeypatch, count, given, placement):
    """Unless the options say otherwise, or another host may have more. One process then works on one micro-batch, in
    lockstep."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    chosen = placed({"device": "cuda", **given})
    assert chosen["placement"] == placement
    if chosen.get("draft_tp", 1) in (1, chosen.get("target_tp", 1)):
        engine = worker_group_config(chosen).engine
        assert (engine.form == "lockstep") == (placement == "shared" or given.get("form") == "lockstep")
        assert engine.micro_batches == 1


def test_gpus_of_shared_ranks(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    lockstep = EngineConfig(form="lockstep")
    check_gpus(WorkerGroupConfig(device="cuda", placement="shared", engine=lockstep), None)
    two = WorkerGroupConfig(device="cuda", placement="shared", target_tp=2, draft_tp=2, engine=lockstep)
    needed = "--device cuda with --placement shared needs 2: --target-tp 2, one for each process"
    with pytest.raises(ValueError, match=f"this machine has 1 GPU.*; {needed}"):
        check_gpus(two, None)
    four = WorkerGroupConfig(device="cuda", placement="shared", worker_groups=4, engine=lockstep)
    needed = "shared needs 1: --target-tp 1, one for each process, for each of 4 worker groups; --worker-groups 1 fits"
    with pytest.raises(ValueError, match=f"this machine has 1 GPU.*{needed}"):
        check_gpus(four, None)
    apart = WorkerGroupConfig(device="cuda", engine=lockstep)
    with pytest.raises(ValueError, match=f"{NEEDED.format(2, 1, 1)}; --placement shared needs 1"):
        check_gpus(apart, None)


def test_a_cluster_elsewhere_is_not_this_machine(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    check_gpus(WorkerGroupConfig(device="cuda"), "10.0.0.1:6379")


def test_gpus_are_divided(smcserve, tmp_path, monkeypatch):
    """The configuration that would be served names the division; options that are given are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ran = smcserve("serve", "--device", "cuda", "--gpus", 2, "--placement", "apart", "--print-config")
    lines = ran.out.splitlines()
    assert ran.code == 0 and {"placement: apart", "draft-tp: 1", "target-tp: 1"} <= {*lines}
    shared = smcserve(
        "serve", "--device", "cuda", "--gpus", 2, "--placement", "shared", "--target-tp", 2, "--print-config"
    )
    assert {"placement: shared", "target-tp: 2", "form: lockstep"} <= {*shared.out.splitlines()}
    for groups, number in ((("--worker-groups", 2), 2), (("--worker-groups", "auto"), 4), ((), 4)):
        given = ("--placement", "shared", "--target-tp", 1, *groups)
        several = smcserve("serve", "--device", "cuda", "--gpus", 4, "--concurrency", 64, *given, "--print-config")
        assert {f"worker-groups: {number}", "placement: shared"} <= {*several.out.splitlines()}
    traced = smcserve("serve", "--device", "cuda", "--gpus", 4, "--trace", tmp_path / "t.json", "--print-config")
    assert "worker-groups: 1" in traced.out.splitlines()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpus", 0, "--device", "cuda"), "gpus=0; allowed: >= 1"),
        (("--gpus", 2), "gpus=2 has no effect with device='cpu'; give device='cuda'"),
        (("--gpus", 2, "--device", "cuda", "--concurrency", 0), "concurrency=0; allowed: >= 1"),
        (("--concurrency", 4), "concurrency=4 has no effect without gpus; leave it out"),
        (
            ("--gpus", 2, "--device", "cuda", "--target-tp", 3),
            "no division of 2 GPUs; allowed: target_tp 1, 2 and draft_tp 1, 2",
        ),
    ],
)
def test_divisions_that_cannot_be(smcserve, no_start, options, message):
    ran = smcserve("serve", "--port", 0, "--no-http", *options)
    assert ran.code == 2 and message in ran.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_a_division_needs_its_gpus(smcserve, no_start):
    ran = smcserve("serve", "--port", 0, "--no-http", "--device", "cuda", "--gpus", 4)
    assert ran.code == 2 and "this machine has no GPUs" in ran.err
