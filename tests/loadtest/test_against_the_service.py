"""The whole of it: the command starts the service, loads it, finds nothing wrong, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow]

ROOT = Path(__file__).parents[2]
SHORTER = (
    "--duration",
    "2",
    "--warm-up",
    "0.5",
    "--settle",
    "2",
    "--rate",
    "4",
    "--deadline",
    "120",
    "--goodput",
    "e2el:120000",
)


def test_smoke(tmp_path):
    """The profile as it is, for a shorter time; its objective is such that only a broken service misses it."""
    files = ("--json", str(tmp_path / "run.json"), "--picture", str(tmp_path / "run.png"))
    command = [
        sys.executable,
        "-m",
        "loadtest",
        "--profile",
        "smoke",
        "--serve",
        *SHORTER,
        *files,
        "--",
        "--max-slots",
        "32",
    ]
    ran, family = _run(command, tmp_path / "output")
    output = (tmp_path / "output").read_text()
    assert ran == 0, output
    assert "The objective was met" in output
    written = json.loads((tmp_path / "run.json").read_text())
    ours = written["smcserve"]
    assert written["num_prompts"] == written["completed"] + ours["cancelled"] > 0 == written["failed"]
    assert {check["name"]: check["passed"] for check in ours["checks"]} == {
        **dict.fromkeys(("errors", "no worker was lost", "objective", "after the run", "KV pages leaked"), True)
    }
    assert ours["after"]["metrics"]['smc_kv_pages_leaked{group="target"}'] == 0
    assert ours["after"]["metrics"]["smc_slots_free"] == 32
    assert {"gateway", "coordinator", "draft rank 0", "target rank 0", "ray"} == set(ours["after"]["held"])
    assert (tmp_path / "run.png").stat().st_size > 10_000
    assert len(family) >= 6  # the service, its three actors and Ray's own
    assert not [
        process for process in psutil.wait_procs(family, timeout=10)[1] if process.status() != psutil.STATUS_ZOMBIE
    ]


def _run(command: list[str], output: Path) -> tuple[int, set[psutil.Process]]:
    """Its exit code, and every process that was seen to descend from it."""
    family: set[psutil.Process] = set()
    with output.open("w") as out:
        running = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=os.environ | {"COLUMNS": "300"})
    try:
        end = time.monotonic() + 240
        while running.poll() is None:
            assert time.monotonic() < end, output.read_text()
            with contextlib.suppress(psutil.NoSuchProcess):
                family |= set(psutil.Process(running.pid).children(recursive=True))
            time.sleep(0.3)
    finally:
        running.terminate()  # it stops what it has started
    return running.wait(60), family
