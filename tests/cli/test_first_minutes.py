"""What somebody who tries the project for the first time reads in its first minutes."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from loadtest.report import figures
from services.backend import StartProgress
from smc import demo
from smc.model.tokenizer import Tokenizer
from smc.terminal import number
from tests.cli.test_pipes import COMMAND, piped
from tests.loadtest.made import made_run, record

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [(-0.004, "+.2f", "0.00"), (0.004, "+.2f", "0.00"), (-0.006, "+.2f", "-0.01"), (0.3, "+.3f", "+0.300")],
)
def test_zero_has_no_sign(value, form, text):
    assert number(value, form) == text


def test_the_demo_explains_its_words_before_it_uses_them(smcserve, monkeypatch):
    monkeypatch.setattr("services.cli.demo.MAX_ANSWER", 8)
    out = smcserve("demo", "--problems", 0).out
    words, _, rest = out.partition("Question 1 of 3")
    for word in ("N: ", "K: ", "F: ", "exact: ", "distinct: ", "lockstep: ", "look-ahead: "):
        assert word in " ".join(words.split())
    assert "distinct lockstep N=8 K=5" in rest


def test_goodput_says_of_what_it_is_a_share():
    """Ten are sent, of which one is cancelled as planned: the share is of the others."""
    answered = [record(at, (at + 0.1,), (1,), index=at) for at in range(9)]
    run = made_run([*answered, record(9, code="CANCELLED", cancelled=True, index=9)], goodput="ttft:1000")
    named = dict(figures(run))
    assert named["requests"].startswith("10 sent, 9 answered, 1 cancelled by us")
    assert re.search(r": 9 of 9 requests whose clients wait and read at full speed \(100\.0%\)$", named["goodput"])


def test_the_start_says_that_it_times_the_models():
    text = str(StartProgress("prepare", {"draft": 100, "target": 100}))
    assert "timing" in text and "about 20 s" in text
    assert "37% of the warm-up done" in str(StartProgress("prepare", {"draft": 100, "target": 100}, 37))


def test_the_file_of_requests_that_the_readme_names_is_there():
    (name,) = re.findall(r"`smcserve batch (\S+) answers\.jsonl`", README)
    lines = (ROOT / name).read_text().splitlines()
    assert len(lines) >= 3 and len({json.loads(line)["custom_id"] for line in lines}) == len(lines)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_the_readmes_line_of_a_batch_works(tmp_path):
    """In a process of its own: this one may be connected to the cluster that other tests share."""
    (name,) = re.findall(r"`smcserve batch (\S+) answers\.jsonl`", README)
    ran = piped(*COMMAND, "batch", ROOT / name, tmp_path / "answers.jsonl")
    assert ran.returncode == 0, ran.stderr
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert all(answer["error"] is None and answer["response"]["status_code"] == 200 for answer in answers)
    assert [len(answer["response"]["body"]["choices"]) for answer in answers] == [1, 1, 2]


def test_the_readme_says_which_roles_the_demo_models_know():
    conversation = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ValueError, match="know the roles user and assistant only"):
        Tokenizer.load(demo.TARGET).chat(conversation)
    assert "knows the roles `user` and `assistant` only: a `system` message is refused" in " ".join(README.split())


def test_make_says_what_it_sets_up_and_how_long_that_takes():
    shown = subprocess.run(["make", "-n", "-B", "install"], cwd=ROOT, capture_output=True, text=True).stdout
    assert re.search(r"echo \"Setting up .* minute", shown)
    assert "uv pip install -q" not in shown, "uv's lines are the progress"
