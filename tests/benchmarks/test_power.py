"""The table of powers and potentials, for problems from a file."""

from __future__ import annotations

import json

import pytest

from benchmarks.power import PowerProblems, ProblemSource, Ways, rows_of, text_of
from smc import demo
from smc.demo.problems import generate
from smc.local_engine import ModelPair


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return ModelPair.load(demo.TARGET, demo.DRAFT)


@pytest.mark.slow
def test_problems_of_a_file_are_solved_in_every_way(pair, tmp_path):
    (problem,) = generate(1, 1, "test")
    path = tmp_path / "problems.jsonl"
    line = {"prompt": problem.question, "answer": str(problem.result), "check": "number"}
    path.write_text(json.dumps(line) + "\n" + json.dumps(line | {"answer": "-1"}) + "\n")
    source = ProblemSource((demo.TARGET, demo.DRAFT), path, 9, demo.MAX_ANSWER)
    ways = Ways(1.0, 1, particles=(2,), alphas=(2.0,), populations=("distinct",))
    table = PowerProblems(pair, source.problems(pair, 1), source.tokens, ways)
    table.measure()
    rows = {row.name: row for row in rows_of(table.found)}
    assert list(rows) == [
        "one answer",
        "likeliest of 2",
        "commonest of 2",
        "temperature 0.5",
        "alpha 1, distinct, N = 2",
        "alpha 2, distinct, N = 2",
        "checker, distinct, N = 2",
    ]
    # The target solves the first problem at this temperature; no method solves the second.
    assert rows["one answer"].solved == rows["temperature 0.5"].solved == 0.5
    assert rows["alpha 2, distinct, N = 2"].passes < rows["one answer"].passes
    assert "| one answer | 50 ± 35 |" in text_of([*rows.values()])


def test_a_line_without_an_answer_is_refused(pair, tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "How many?"}\n')
    with pytest.raises(ValueError, match="line 1: there is no answer; every line needs one"):
        ProblemSource((demo.TARGET, demo.DRAFT), path, 9, 20).problems(pair, 1)
