"""Several worker groups on a real cluster: the engine's own answers, whatever is killed on the way, in a stand-in for S3
and in one file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from ray.job_submission import JobSubmissionClient

from services.batch.storage import Store, records_of
from tests.batch.asking import OPTIONS, essence, read_records, write_lines
from tests.batch.running import Cluster
from tests.batch.s3 import BUCKET, s3_server

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow, pytest.mark.timeout(1800)]

TWO = (*OPTIONS, "--gangs", 2, "--part-lines", 2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with s3_server() as settings, pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        cluster = Cluster(tmp_path_factory.mktemp("cluster"), **settings)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


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


def test_two_worker_groups_append_to_one_file_in_order(cluster: Cluster, asked, expected, tmp_path):
    source, output = write_lines(tmp_path / "in.jsonl", asked), tmp_path / "out.jsonl"
    process = cluster.start_batch(source, output, *TWO)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 1 and "20 of 20 lines done, 2 failed" in said, said
    assert list(map(essence, read_records(output))) == expected
    cluster.until_empty()

    lines = output.read_bytes().splitlines(keepends=True)
    failed = json.loads(lines[2]) | {"response": None, "error": {"code": "unavailable", "message": "lost"}}
    output.write_bytes(b"".join([*lines[:2], json.dumps(failed).encode() + b"\n", *lines[3:]]))
    process = cluster.start_batch(source, output, *OPTIONS, "--retry-failed")
    _, said = process.communicate(timeout=600)
    assert process.returncode == 1 and "20 of 20 lines done, 2 failed" in said, said
    again = output.read_bytes().splitlines(keepends=True)
    assert list(map(essence, read_records(output))) == expected and [*again[:2], *again[3:5]] == [
        *lines[:2],
        *lines[3:5],
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_models_that_do_not_start_end_the_run(cluster: Cluster, asked, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", asked)
    options = ("--gangs", 2, "--device", "cuda", "--start-timeout", 1)
    process = cluster.start_batch(source, f"{tmp_path}/out/", *options)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1 and "no host of the cluster has room for 1 x {'CPU': 1, 'GPU': 1}" in said, said
    cluster.until_empty()
