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

from services.batch.lines import RequestReader
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.demo.problems import generate
from smc.local_engine import ModelPair, local_engine
from tests.batch.asking import chat, line, read_records, write_lines
from tests.batch.running import Cluster

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow]

KINDS = [
    {"particles": 8, "max_tokens": 50},
    {"particles": 4, "max_tokens": 70, "ess_threshold": 1.0, "ignore_eos": True},
    {"method": "target", "max_tokens": 60, "temperature": 0},
    {"particles": 3, "max_tokens": 40, "stop": ["####"], "seed": 7},
]
ENGINE = {"block": 5, "branches": 2}
OPTIONS = ("-k", 5, "-f", 2, "--max-slots", 16, "--seed", 3)


@pytest.fixture(scope="module")
def asked() -> list[dict]:
    """20 lines, two of which have no answer."""
    lines = [
        chat(f"q{i}", problem.question, **KINDS[i % len(KINDS)]) for i, problem in enumerate(generate(5, 20, "test"))
    ]
    lines[5] = chat("wrong", n=0)
    lines[9] = chat("too long", max_tokens=100_000)
    return lines


@pytest.fixture(scope="module")
def expected(pair, asked) -> list[tuple]:
    """What an engine in this process answers."""
    requests, wanted = RequestReader(pair, 3), {}
    for number, document in enumerate(asked, 1):
        if document["custom_id"].startswith("q"):
            wanted[document["custom_id"]] = requests.build(line(document, number))[0]
    engine = local_engine(ModelPair.load(demo.TARGET, demo.DRAFT), EngineConfig(**ENGINE, max_slots=16))
    answers = {output.answer.request_id: output.answer for output in engine.run(wanted.values()) if output.answer}
    found = {custom_id: answers[request.request_id] for custom_id, request in wanted.items()}
    return [_essence(each["custom_id"], found.get(each["custom_id"])) for each in asked]


def _essence(custom_id: str, answer) -> tuple:
    if answer is None:
        return custom_id, "invalid"
    return custom_id, answer.text, len(answer.tokens), answer.finish_reason.value, answer.seed


def essence(record: dict) -> tuple:
    if record["error"] is not None:
        return record["custom_id"], record["error"]["code"]
    body = record["response"]["body"]
    text, count = body["choices"][0]["message"]["content"], body["usage"]["completion_tokens"]
    return (
        record["custom_id"],
        text,
        count,
        body["choices"][0]["smc"]["finish_reason"],
        body["choices"][0]["smc"]["seed"],
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    _, said = process.communicate(timeout=90)
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
    cluster.until(lambda: lines_in(output) >= 3, 60, "no progress")
    assert jobs.stop_job("first")  # what `ray job stop` does
    cluster.until_empty()
    cluster.until(lambda: jobs.get_job_status("first").is_terminal(), 10, "the job did not stop")
    assert jobs.get_job_status("first") == "STOPPED"
    by_the_job = whole_lines(output)
    assert 3 <= by_the_job.count(b"\n") < len(asked)

    def begin() -> subprocess.Popen:
        done = lines_in(output)
        process = cluster.start_batch(source, output, *OPTIONS)
        cluster.until(lambda: lines_in(output) > done or process.poll() is not None, 60, "no progress")
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
