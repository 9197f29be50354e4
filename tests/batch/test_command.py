"""`smcserve batch` where it needs no cluster: mistakes that are found before anything starts, and inputs with no lines
left to do."""

from __future__ import annotations

import fcntl
import subprocess
import sys

import pytest

from services.launch.config import WorkerGroupConfig
from smc.api.engine_config import EngineConfig
from tests.batch.asking import answer_file, chat, write_lines


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.setattr("services.launch.cluster.connect", lambda address: pytest.fail("a cluster was asked for"))


@pytest.fixture
def files(tmp_path):
    return write_lines(tmp_path / "in.jsonl", [chat("a"), chat("b")]), tmp_path / "out.jsonl"


def finish(source, output) -> None:
    pair = WorkerGroupConfig(engine=EngineConfig(micro_batches=2)).serving_pair()
    answer_file(pair, source, output, fingerprint=pair.fingerprint())


def test_all_done(smcserve, files):
    finish(*files)
    before = files[1].read_bytes()
    ran = smcserve("batch", *files)
    assert ran.code == 0 and ran.out == "" and "2 of 2 lines done, 2 by earlier runs, 0 failed; answers in" in ran.err
    assert files[1].read_bytes() == before


def test_all_done_but_one_failed(smcserve, files):
    write_lines(files[0], [chat("a"), chat("b", n=0)])
    finish(*files)
    ran = smcserve("batch", *files)
    assert ran.code == 1 and "2 of 2 lines done, 2 by earlier runs, 1 failed" in ran.err


def test_an_empty_file(smcserve, files):
    files[0].write_text("\n")
    assert smcserve("batch", *files).code == 0 and files[1].read_bytes() == b""


def test_output_locked_by_another_run(smcserve, files):
    """A run whose output is locked by another run ends with exit code 2."""
    with files[1].open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ran = smcserve("batch", *files)
    assert ran.code == 2 and "is being written by another run" in ran.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.jsonl", "out.jsonl"), "nowhere.jsonl is not a file; give a file of requests"),
        (("in.jsonl", "nowhere/out.jsonl"), "cannot write nowhere/out.jsonl: its directory does not exist"),
        (("in.jsonl", "."), "it is not a regular file"),
        (("in.jsonl", "in.jsonl"), "in.jsonl is the input; give another output file"),
        (("in.jsonl", "out.jsonl", "-c", 0), "concurrency=0; allowed: >= 1"),
        (("in.jsonl", "out.jsonl", "--target-tp", 5), "target_tp=5"),
        (("in.jsonl", "out.jsonl", "--worker-groups", 0), "worker_groups=0; allowed: >= 1"),
        (("in.jsonl", "out.jsonl", "--part-lines", 0), "part_lines=0; allowed: >= 1"),
        (("in.jsonl", "out.jsonl", "--overwrite", "--retry-failed"), "allowed: one of them"),
        (("in.jsonl", "out.jsonl", "--output-format", "parquet"), "output_format has no effect on one file"),
        (("in.jsonl", "out/", "--output-format", "csv"), "output_format='csv'; allowed: jsonl, parquet"),
        (
            ("in.jsonl", "out.jsonl", "--worker-groups", 2, "--trace", "trace.json"),
            "trace is given with worker_groups=2; allowed: worker_groups 1, or no trace",
        ),
        (("in.jsonl", "notes.txt/"), "cannot write notes.txt/: it is a file; needed: a directory"),
        (("in.jsonl", "./"), "./ is the input's directory, or inside it; give another output directory"),
        ((".", "out"), "out is the input's directory, or inside it; give another output directory"),
        (("s3://in/a", "s3://in/a/b"), "s3://in/a/b is the input's directory, or inside it"),
        (("ftp://in/a", "out/"), "ftp://in/a: "),
        (("empty", "out/"), "empty holds no lines; needed: files whose names end with .jsonl or .parquet"),
        (("in.jsonl",), "OUT"),
        (("twice.jsonl", "out.jsonl"), "lines 1 and 2 have the same custom_id; every line needs one of its own"),
        (("in.jsonl", "notes.txt"), "notes.txt: line 1 is not an answer of this command"),
    ],
)
def test_mistakes(smcserve, files, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "twice.jsonl", [chat("a"), chat("a", "other")])
    (tmp_path / "notes.txt").write_text("mine\n")
    (tmp_path / "empty").mkdir()
    ran = smcserve("batch", *arguments)
    assert (ran.code, ran.out) == (2, "") and message in ran.err
    assert (tmp_path / "notes.txt").read_text() == "mine\n"


def test_a_directory_that_is_done(smcserve, files, tmp_path):
    files[0].write_text("")
    ran = smcserve("batch", files[0], f"{tmp_path}/out/", "--metrics-port", 0)
    assert ran.code == 0 and "0 of 0 lines done, 0 failed; answers in" in ran.err, ran.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["_smcserve.json"]
    assert "metrics on 127.0.0.1:" in ran.err


def test_an_output_that_ray_will_delete_is_warned_of(smcserve, files, tmp_path):
    inside = tmp_path / "working_dir_files" / "pkg"
    inside.mkdir(parents=True)
    files[0].write_text("")
    assert "Ray deletes" in smcserve("batch", files[0], inside / "out.jsonl").err
    assert "Ray deletes" not in smcserve("batch", *files).err


def test_a_run_to_one_file_needs_no_extra():
    """Without the extra `batch`, pyarrow and pandas are not installed; Ray is imported only once the input is known to
    be valid."""
    script = "import sys, services.batch.run; print(*{'ray', 'pyarrow', 'pandas', 'torch'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert ran.stdout.split() == []
