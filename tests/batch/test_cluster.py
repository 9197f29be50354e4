"""The command on a real cluster: the engine's own answers, whatever is killed or stopped on the way, and nothing left
behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from ray.job_submission import JobSubmissionClient
from ray.util.state import list_placement_groups

from tests.batch.asking import OPTIONS, essence, read_records, write_lines
from tests.batch.running import Cluster

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow, pytest.mark.timeout(1200)]


def finish(process: subprocess.Popen) -> tuple[int, str]:
    _, said = process.communicate(timeout=300)
    return process.returncode, said


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def whole_lines(path: Path) -> bytes:
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def test_disturbed_runs_make_the_file_of_an_undisturbed_one(cluster: Cluster, asked, expected, tmp_path):
    """The first run is a job that `ray job stop` stops, the second is killed, the third loses a rank; between them they
    do every line once."""
    source, output, jobs = (
        write_lines(tmp_path / "in.jsonl", asked),
        tmp_path / "out.jsonl",
        JobSubmissionClient(cluster.dashboard),
    )
    command = ("smcserve", "batch", source.name, output, *OPTIONS)
    submitted = cluster.submit(
        "--working-dir", ".", "--no-wait", "--submission-id", "first", "--", *command, directory=tmp_path
    )
    assert submitted.returncode == 0, submitted.stderr + submitted.stdout
    cluster.until(lambda: lines_in(output) >= 3, 300, "no progress")
    assert jobs.stop_job("first")  # what `ray job stop` does
    cluster.until_empty()
    cluster.until(lambda: jobs.get_job_status("first").is_terminal(), 10, "the job did not stop")
    assert jobs.get_job_status("first") == "STOPPED"
    by_the_job = whole_lines(output)
    assert 3 <= by_the_job.count(b"\n") < len(asked)

    def begin() -> subprocess.Popen:
        done = lines_in(output)
        process = cluster.start_batch(source, output, *OPTIONS)
        cluster.until(lambda: lines_in(output) > done or process.poll() is not None, 300, "no progress")
        assert process.poll() is None, process.communicate()
        return process

    killed = begin()
    killed.kill()
    killed.communicate()
    beginning = whole_lines(output)
    assert beginning.startswith(by_the_job), "what was there has been done again"
    cluster.until_empty()

    broken = begin()
    victim = next(pid for pid, name in cluster.ranks().items() if " rank " in name)
    os.kill(victim, signal.SIGKILL)
    code, said = finish(broken)
    assert (
        code == 1 and "20 of 20 lines done" in said and "by earlier runs, 2 failed" in said and "attempt 1 of 3" in said
    )
    cluster.until_empty()

    assert [essence(record) for record in read_records(output)] == expected
    assert output.read_bytes().startswith(beginning), "what was there has been done again"


def test_a_cluster_without_room(cluster: Cluster, asked, tmp_path):
    """The run waits for it as long as it is told to, or until a signal ends it."""
    source, no_room = write_lines(tmp_path / "in.jsonl", asked), ("--device", "cuda", "--start-timeout")
    patient = cluster.start_batch(source, tmp_path / "patient.jsonl", *no_room, 600)
    code, said = finish(cluster.start_batch(source, tmp_path / "out.jsonl", *no_room, 1))
    assert code == 1 and "no host of the cluster has room for 1 x {'CPU': 1, 'GPU': 1}" in said
    cluster.until(
        lambda: list_placement_groups(cluster.dashboard, filters=[("state", "=", "PENDING")]), 30, "nobody waits"
    )
    patient.terminate()
    begin = time.monotonic()
    code, said = finish(patient)
    assert code == 143 and "stopped by SIGTERM; run the same command again to resume" in said
    assert time.monotonic() - begin < 10
    cluster.until_empty()
