"""The command on a real cluster, with one worker group and with several, over files and a stand-in for S3: the engine's
own answers, whatever is killed or stopped on the way, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from ray.job_submission import JobSubmissionClient
from ray.util.state import list_placement_groups

from services.batch.storage import Store, records_of
from tests.batch.asking import OPTIONS, essence, read_records, write_lines
from tests.batch.running import Cluster
from tests.batch.s3 import BUCKET

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow, pytest.mark.timeout(1800)]

TWO = (*OPTIONS, "--gangs", 2, "--part-lines", 2)


def finish(process: subprocess.Popen) -> tuple[int, str]:
    _, said = process.communicate(timeout=300)
    return process.returncode, said


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def whole_lines(path: Path) -> bytes:
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def test_disturbed_runs_make_the_file_of_an_undisturbed_one(cluster: Cluster, asked, expected, tmp_path):
    """The first run is a job that `ray job stop` stops; the second has two worker groups, whose parts it appends in
    order, and loses a rank. Between them they do every line once."""
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

    done = lines_in(output)
    broken = cluster.start_batch(source, output, *TWO)
    cluster.until(lambda: lines_in(output) > done or broken.poll() is not None, 300, "no progress")
    assert broken.poll() is None, broken.communicate()
    victim = next(pid for pid, name in cluster.ranks().items() if " rank " in name)
    os.kill(victim, signal.SIGKILL)
    code, said = finish(broken)
    assert code == 1 and "20 of 20 lines done" in said and "by earlier runs, 2 failed" in said, said
    cluster.until_empty()

    assert [essence(record) for record in read_records(output)] == expected
    assert output.read_bytes().startswith(by_the_job), "what was there has been done again"
    assert not list(tmp_path.glob("out.jsonl.*")), "files of the run stay"


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
    assert time.monotonic() - begin < 40
    cluster.until_empty()


def until_some_parts(cluster: Cluster, sink: Store, count: int, process: subprocess.Popen | None = None) -> None:
    def are_there() -> bool:
        assert process is None or process.poll() is None, process.communicate()
        return len(sink.files()) >= count

    cluster.until(are_there, 500, "no progress")


def test_a_job_over_s3_that_is_killed_and_loses_a_worker_group(cluster: Cluster, asked, expected, tmp_path):
    """The first run is killed with SIGKILL, the second loses a worker group's process; between them they do every line,
    and what the first had written stays."""
    source, sink = (Store.of(f"s3://{BUCKET}/{name}/") for name in ("in", "out"))
    for name, lines in (("a.jsonl", asked[:12]), ("more/b.jsonl", asked[12:])):
        source.write(name, write_lines(tmp_path / "lines", lines).read_bytes())
    arguments = (f"s3://{BUCKET}/in/", f"s3://{BUCKET}/out/", *TWO)

    killed = cluster.start_batch(*arguments)
    until_some_parts(cluster, sink, 2, killed)
    killed.kill()
    killed.communicate()
    cluster.until_empty()
    before = {name: sink.read(name) for name in sink.files()}
    assert 2 <= len(before) < 10

    command = ("smcserve", "batch", *arguments)
    submitted = cluster.submit("--no-wait", "--submission-id", "again", "--", *command, directory=tmp_path)
    assert submitted.returncode == 0, submitted.stderr + submitted.stdout
    until_some_parts(cluster, sink, len(before) + 1)
    os.kill(next(iter(cluster.actors("MapWorker"))), signal.SIGKILL)
    jobs = JobSubmissionClient(cluster.dashboard)
    cluster.until(lambda: jobs.get_job_status("again").is_terminal(), 600, "the job did not end")
    log = jobs.get_job_logs("again")
    assert jobs.get_job_status("again") == "FAILED", "two lines have no answer"
    assert "20 of 20 lines done" in log and "2 failed" in log and "a worker group is ready after" in log, log
    cluster.until_empty()

    names = sink.files()
    assert {name: sink.read(name) for name in before} == before, "what was there has been done again"
    records = [record for name in names for record in records_of(sink.read(name), "jsonl")]
    assert list(map(essence, records)) == expected
