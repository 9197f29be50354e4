"""Missing GPUs are reported before Ray is started, with the numbers available and needed."""

from __future__ import annotations

import pytest
import torch

from services.launch.config import WorkerGroupConfig, check_gpus

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


def test_a_cluster_elsewhere_is_not_this_machine(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    check_gpus(WorkerGroupConfig(device="cuda"), "10.0.0.1:6379")
