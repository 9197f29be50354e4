"""`smcserve batch` on a real cluster, with one worker group and with several, over files and a stand-in for S3: it
gives the engine's own answers, whatever process is killed or stopped meanwhile, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from services.batch.pool import PARTS_AT_A_TIME
from services.batch.storage import Store, records_of
from tests.batch.asking import OPTIONS, essence, read_records, write_lines
from tests.batch.running import Cluster
from tests.batch.s3 import BUCKET

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow, pytest.mark.timeout(1800)]

TWO = ("--worker-groups", 2)
AHEAD = ("-f", 2)
SHARED = ("--form", "lockstep", "--placement", "shared")
"""Both models of a worker group in one process: fewer processes start."""


@pytest.fixture
def options(tmp_path) -> tuple:
    """Options of every run. Worker groups do not time their models at start, which would take longer than decoding a
    line."""
    config = tmp_path / "config.yaml"
    config.write_text("drafting: always\n")
    return (*OPTIONS, "--config", config)


def finish(process: subprocess.Popen) -> tuple[int, str]:
    _, said = process.communicate(timeout=300)
    return process.returncode, said


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def whole_lines(path: Path) -> bytes:
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def test_a_killed_run_and_another_make_the_file_of_one(cluster: Cluster, asked, expected, options, tmp_path):
    """A run with one worker group is killed with SIGKILL. A second run has two, and loses a rank of one of them, whose
    lines the other one answers. Together they do every line once and write the same output as an undisturbed run."""
    source, output = write_lines(tmp_path / "in.jsonl", asked), tmp_path / "out.jsonl"
    options += SHARED
    killed = cluster.start_batch(source, output, *options)
    cluster.until(lambda: lines_in(output) >= 3 or killed.poll() is not None, 300, "no progress")
    killed.kill()
    assert finish(killed)[0] == -signal.SIGKILL
    cluster.until_empty()
    by_the_first = whole_lines(output)
    assert 3 <= by_the_first.count(b"\n") < len(asked)

    second = cluster.start_batch(source, output, *options, *TWO)
    done = lines_in(output)
    cluster.until(lambda: lines_in(output) > done or second.poll() is not None, 300, "no progress")
    assert second.poll() is None, finish(second)
    os.kill(next(iter(cluster.actors("smcserve: worker group 1, shared rank 0"))), signal.SIGKILL)
    code, said = finish(second)
    assert code == 1 and "16 of 16 lines done" in said and "by earlier runs, 2 failed" in said, said
    cluster.until_empty()

    assert [essence(record) for record in read_records(output)] == expected["lockstep"]
    assert output.read_bytes().startswith(by_the_first), "what was there has been done again"
    assert not list(tmp_path.glob("out.jsonl.*")), "files of the run stay"


def test_a_cluster_without_room(cluster: Cluster, asked, tmp_path):
    """Without room on the cluster, a run waits until its start timeout, or until a signal ends it, as `ray job stop`
    sends one."""
    from ray.job_submission import JobSubmissionClient
    from ray.util.state import list_placement_groups

    source, no_room = write_lines(tmp_path / "in.jsonl", asked), ("--device", "cuda", "--start-timeout")
    jobs, command = (
        JobSubmissionClient(cluster.dashboard),
        ("smcserve", "batch", source.name, tmp_path / "patient.jsonl"),
    )
    jobs.submit_job(
        entrypoint=" ".join(map(str, (*command, *no_room, 600))),
        submission_id="patient",
        runtime_env={"working_dir": str(tmp_path)},
    )
    code, said = finish(cluster.start_batch(source, tmp_path / "out.jsonl", *no_room, 1))
    assert code == 1 and "no host of the cluster has room for 1 x {'CPU': 1, 'GPU': 1}" in said
    cluster.until(
        lambda: list_placement_groups(cluster.dashboard, filters=[("state", "=", "PENDING")]), 60, "nobody waits"
    )
    assert jobs.stop_job("patient")
    cluster.until(lambda: jobs.get_job_status("patient").is_terminal(), 40, "the job did not stop")
    assert jobs.get_job_status("patient") == "STOPPED"
    assert "stopped by SIGTERM; run the same command again to resume" in jobs.get_job_logs("patient")
    cluster.until_empty()


def test_a_run_over_s3_that_loses_a_worker_group(cluster: Cluster, asked, expected, options, tmp_path):
    """A run with two worker groups loses one. Another takes its place, unless the rest is done before, and the parts
    that were written stay. How an output in parts is resumed: tests/batch/test_parts.py."""
    source, sink = (Store.of(f"s3://{BUCKET}/{name}/") for name in ("in", "out"))
    for name, lines in (("a.jsonl", asked[:10]), ("more/b.jsonl", asked[10:])):
        source.write(name, write_lines(tmp_path / "lines", lines).read_bytes())
    arguments = (f"s3://{BUCKET}/in/", f"s3://{BUCKET}/out/", *options, *AHEAD, *TWO, "--part-lines", 3)
    run = cluster.start_batch(*arguments)
    cluster.until(lambda: sink.files() or run.poll() is not None, 300, "no progress")
    assert run.poll() is None, finish(run)
    os.kill(next(iter(cluster.actors("MapWorker"))), signal.SIGKILL)
    before = {name: sink.read(name) for name in sink.files()}
    code, said = finish(run)
    assert code == 1, "two lines have no answer"
    assert "16 of 16 lines done" in said and "2 failed" in said, said
    assert said.count("a worker group is ready after") in (2, 3), said
    cluster.until_empty()
    names = sink.files()
    again = [name for name in before if sink.read(name) != before[name]]
    assert len(again) <= PARTS_AT_A_TIME, f"{again}: more has been done again than one worker group had in hand"
    records = [record for name in names for record in records_of(sink.read(name), "jsonl")]
    assert list(map(essence, records)) == expected["ahead"]
