"""Simulated rounds of a GPU beside the scheduler's own time."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import host_rounds
from benchmarks.host_rounds import main
from benchmarks.traces import save
from tests.benchmarks.test_policy import library

pytestmark = pytest.mark.xdist_group("policy")  # whose process has made the traces
LATENCY = Path(__file__).parents[2] / "benchmarks/latencies/h200_8b_0.5b.json"


@pytest.mark.slow
def test_the_slower_of_host_and_gpu_limits(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(host_rounds, "FIRST_STEPS", 20)
    save(library(), tmp_path / "traces.npz")
    files = ["--traces", str(tmp_path / "traces.npz"), "--latency", str(LATENCY)]
    fast, slow = main([*files, "--host", "0.01", "50", "--requests", "4", "--steps", "40", "--slots", "8"])
    # A round of the GPU takes about 9 ms, prompts 6.4 ms for each pass.
    assert fast.host_seconds < 0.05 * fast.seconds
    assert 0.006 < (fast.seconds - 0.0064 * fast.passes) / fast.steps < 0.012
    assert slow.host_seconds > 0.9 * slow.seconds
    assert (fast.tokens, fast.answers) == (slow.tokens, slow.answers)
    assert fast.tokens / fast.steps == pytest.approx(4 * 3, rel=0.5)
    assert "host x 50: 4 requests:" in capsys.readouterr().out
