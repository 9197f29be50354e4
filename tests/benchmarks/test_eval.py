"""`smcserve eval` and `demo` on a few problems: their output, and that an interrupted run resumes."""

from __future__ import annotations

import json
import re
import sys
from functools import partial

import pytest
from rich.console import Console
from rich.measure import Measurement

import benchmarks.quality
from benchmarks.quality import DecodingSetting, QualityRow, Terms
from benchmarks.reports import quality
from benchmarks.reports.quality import quality_table
from smc.demo.problems import Accuracy

TINY = (
    "eval",
    "--problems",
    1,
    "--speed-problems",
    1,
    "--only",
    "alone",
    "--only",
    "exact N=2",
    "--only",
    "distinct lockstep N=2 K=4",
)
SIZES = ("-n", 2, "-k", 4, "-f", 1)
NAMES = [
    "target alone",
    "draft alone",
    "exact look-ahead N=2 K=4 F=1",
    "exact lockstep N=2 K=4",
    "distinct lockstep N=2 K=4",
]


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    """Shorten answers and the warm-up; the format of the output depends on neither."""
    monkeypatch.setattr(quality, "Terms", partial(Terms, max_tokens=16))
    monkeypatch.setattr(benchmarks.quality, "WARM_UP_PROBLEMS", 1)


def test_files_and_table(smcserve, tmp_path):
    outputs = [tmp_path / name for name in ("quality.json", "quality.md", "quality.png")]
    ran = smcserve(*TINY, *SIZES, "--json", outputs[0], "--markdown", outputs[1], "--picture", outputs[2])
    assert ran.code == 0 and "target alone" in ran.out and "distinct lockstep" in ran.out and "indep" not in ran.out
    assert re.search(r"about \d+ (s|min) for all", ran.err)
    record = json.loads(outputs[0].read_text())
    assert [row["name"] for row in record["rows"]] == NAMES
    assert [row["population"] for row in record["rows"]] == [None, None, None, None, "distinct"]
    assert record["rows"][2]["hit_share"] > 0.2
    for row in record["rows"][2:4]:  # the target's own answers, most of them too short to be right
        assert [row[name] for name in ("correct", "tokens")] == [
            record["rows"][0][name] for name in ("correct", "tokens")
        ]
        assert row["mean_logp"] == pytest.approx(record["rows"][0]["mean_logp"], abs=1e-5)
    assert (
        record["conditions"]["problems"] == 1
        and record["conditions"]["temperature"] == 1
        and len(record["conditions"]["weights_sha256"]["target"]) == 64
    )
    for row in record["rows"]:
        assert row["count"] == 1 and row["interval_95"][0] <= row["accuracy"] <= row["interval_95"][1]
        assert row["tokens_per_second"] > 0 and row["batch_tokens_per_second"] > 0
    lines = [line for line in outputs[1].read_text().splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 5 and len({line.count("|") for line in lines}) == 1
    assert outputs[2].read_bytes().startswith(b"\x89PNG")


def test_resume_measures_only_what_is_missing(smcserve, tmp_path, monkeypatch):
    measured = []
    original = quality.measure
    monkeypatch.setattr(
        quality, "measure", lambda pair, setting, *rest: measured.append(setting.name) or original(pair, setting, *rest)
    )
    run = ("eval", "--problems", 2, "--speed-problems", 0, "--json", tmp_path / "q.json", "--resume")
    assert smcserve(*run, "--only", "draft").code == 0
    again = smcserve(*run, "--only", "draft", "--only", "target")
    assert "1 of 2 settings are in" in again.err
    assert measured == ["draft alone", "target alone"]
    assert "target alone" in again.out and "draft alone" in again.out
    other = smcserve(*run, "--only", "target", "--seed", 9)
    assert other.code == 2 and "seed was 0 and is now 9" in other.err


@pytest.mark.slow
def test_what_has_been_answered_before_is_only_timed(smcserve, tmp_path, monkeypatch):
    solved, timed = tmp_path / "solved.json", tmp_path / "timed.json"
    only = ("--only", "exact lockstep N=2", "--only", "target")
    assert smcserve("eval", "--problems", 1, "--speed-problems", 0, *SIZES, *only, "--json", solved).code == 0
    monkeypatch.delattr(quality, "measure")
    run = ("eval", "--problems", 1, "--speed-problems", 1, *SIZES, *only, "--accuracy-from", solved)
    ran = smcserve(*run, "--json", timed)
    assert ran.code == 0 and "answers of the small pair, float32 on" in ran.out
    for before, row in zip(json.loads(solved.read_text())["rows"], json.loads(timed.read_text())["rows"]):
        assert row["tokens_per_second"] > 0 and row["batch_tokens_per_second"] is None
        assert all(
            row[name] == before[name] for name in ("name", "correct", "count", "rounds", "mean_logp", "hit_share")
        )
    other = smcserve(*run, "--seed", 1)
    assert other.code == 2 and "cannot be taken for --accuracy-from: seed was 0 and is now 1" in other.err
    assert "leaves nothing to be measured" in smcserve(*run, "--speed-problems", 0).err
    again = smcserve(*run[:-2], "--json", timed, "--resume")
    assert again.code == 2 and "cannot be resumed: answers was ['float32 on" in again.err
    in_fp8 = solved.read_text().replace('"dtype": "float32"', '"dtype": "fp8"')
    solved.write_text(in_fp8)
    assert "dtype was 'fp8' and is now 'float32', and FP8 and int4 solve other problems" in smcserve(*run).err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--problems", 0), "--problems 0; allowed: >= 1"),
        (("--only", "beam"), "--only 'beam' leaves no setting; there are: target alone"),
        (("--particles", 65), "particles=65; allowed: 1..64"),
        (("--block", 33), "block=33; allowed: 1..32"),
        (("--resume",), "--resume has no effect without --json"),
        (("--speed-problems", 0, "--picture", "x.png"), "--speed-problems 0"),
        (("--markdown", "/nowhere/x.md"), "its directory does not exist"),
        (("--ess-threshold", 2), "ess_threshold=2.0; allowed"),
        (
            ("--ess-threshold", 1, "--only", "exact"),
            "--ess-threshold 1 has no effect without settings of independent particles",
        ),
        (("--temperature", 0, "--only", "distinct"), "--only 'distinct' leaves no setting; there are: target alone"),
        (("--temperature", -1), "temperature=-1.0; allowed"),
        (("--only", "alone N=1"), "--only 'alone N=1' leaves no setting"),
    ],
)
def test_mistakes_are_found_before_the_work(smcserve, arguments, message):
    ran = smcserve("eval", *arguments)
    assert (ran.code, ran.out) == (2, "") and message in ran.err


@pytest.mark.parametrize("command", [("eval", "--picture", "x.png"), ("timeline", "/dev/null", "x.png")])
def test_a_picture_is_refused_at_once_where_none_can_be_drawn(smcserve, monkeypatch, command):
    """The images of the service have no matplotlib."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = smcserve(*command)
    assert (ran.code, ran.out) == (2, "") and "pip install 'smcserve[plots]'" in ran.err


def test_the_table_fits_a_terminal():
    settings = [
        DecodingSetting.plain("target"),
        *(DecodingSetting.lockstep(kind, 32, 8) for kind in ("exact", "distinct", "independent")),
    ]
    measured = {
        "rounds": 9.5,
        "resamples": 2.0,
        "mean_ess_share": 0.5,
        "collapses": 0,
        "hit_share": 1.0,
        "mean_logp": -0.25,
    }
    rows = [
        QualityRow(setting, Accuracy(999, 999), 61.5, 12345.0, **measured, tokens_per_second=1234.0)
        for setting in settings
    ]
    console = Console(width=200)
    assert Measurement.get(console, console.options, quality_table(rows)).maximum <= 80


def test_a_record_of_an_earlier_version_is_refused(smcserve, tmp_path):
    path = tmp_path / "q.json"
    path.write_text('{"conditions": {}, "rows": [{"name": "lockstep N=8 K=8", "method": "smc"}]}')
    assert (
        "cannot be resumed: it is of an earlier version of smcserve eval"
        in smcserve(*TINY, "--json", path, "--resume").err
    )


def test_a_file_in_the_way_is_not_overwritten(smcserve, tmp_path):
    path = tmp_path / "q.json"
    path.write_text("{}")
    assert "exists already; use --resume" in smcserve(*TINY, "--json", path).err
    assert "is not a record of smcserve eval" in smcserve(*TINY, "--json", path, "--resume").err
    assert path.read_text() == "{}"


@pytest.mark.slow
def test_demo(smcserve, monkeypatch):
    monkeypatch.setattr("services.cli.demo.MAX_ANSWER", 24)
    ran = smcserve("demo", "--problems", 1)
    assert ran.code == 0
    assert "Question 3 of 3" in ran.out and ("✓ right" in ran.out or "✗ wrong" in ran.out)
    assert all(
        name in ran.out
        for name in (
            "target alone",
            "draft alone",
            "exact lockstep N=4 K=5",
            "distinct look-ahead N=8 K=5 F=4",
            "smcserve eval",
        )
    )
    assert "target's passes" in ran.out and "tokens confirmed a round" in ran.out
