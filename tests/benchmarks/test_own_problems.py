"""`smcserve eval --problems FILE` and `bench --prompts-file FILE`: formats, checks, and refused files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmarks
from benchmarks.problem_file import FileProblem, read_problems
from smc import demo
from smc.model.tokenizer import Tokenizer

STORY = "Mia has 12 apples. She buys 30 more. How many now?"
OURS = {"prompt": STORY, "answer": 42}
GSM8K = {"question": "Tom has 5 pens. He loses 2. How many now?", "answer": "5 - 2 = <<5-2=3>>3\n#### 3"}
MESSAGES = [{"role": "user", "content": STORY}]
BATCH = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": MESSAGES}}
MT_BENCH = {"question_id": 81, "category": "writing", "turns": [STORY, "And if two more?"]}


@pytest.fixture
def file(tmp_path):
    def write(*lines) -> str:
        path = tmp_path / "problems.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


def test_public_formats_are_read_as_they_are(file):
    found = read_problems(file(OURS, "", GSM8K, BATCH, MT_BENCH, {**BATCH, "body": {"prompt": "x", "max_tokens": 3}}))
    assert found == [
        FileProblem(1, STORY, "42", "number"),
        FileProblem(3, GSM8K["question"], "3", "number"),
        FileProblem(4, tuple(MESSAGES)),
        FileProblem(5, STORY),
        FileProblem(6, "x"),
    ]
    tokenizer = Tokenizer.load(demo.TARGET)
    assert found[0].tokens(tokenizer, False) == found[2].tokens(tokenizer, False) == tokenizer.chat(MESSAGES)
    assert found[0].tokens(tokenizer, True) == tokenizer.encode(STORY)


def test_choices_stand_below_the_prompt(file):
    (found,) = read_problems(file({"prompt": "Which?", "choices": ["red", "blue"], "answer": "B"}))
    assert found == FileProblem(1, "Which?\nA. red\nB. blue", "B", "choice")


@pytest.mark.parametrize(
    ("check", "answer", "right", "wrong"),
    [
        ("exact", "a b", (" a  b\n",), ("a b c", "A b")),
        ("number", "1200", ("so 1,200.", "#### 1200 apples, 3", "1200.0"), ("120", "none", "1200 or 3")),
        ("number", "-2.5", ("it is -2.5",), ("2.5",)),
        ("regex", r"^\d+$", ("17",), ("17 a",)),
        ("choice", "B", ("B", "(B)", "The answer is B.", "A is wrong, so B", "I think\nB."), ("A", "b", "B or C")),
    ],
)
def test_checks(check, answer, right, wrong):
    problem = FileProblem(1, "x", answer, check)
    assert [problem.grade(text) for text in (*right, *wrong)] == [True] * len(right) + [False] * len(wrong)
    assert FileProblem(1, "x").grade("y") is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "this is not JSON"),
        ("[1]", "this is [1]; allowed: a JSON object with one of prompt"),
        ({"text": "x"}, "the object has text; allowed: exactly one of prompt"),
        ({"prompt": "x", "turns": ["y"]}, "the object has prompt and turns"),
        ({"prompt": ""}, "prompt=''; allowed: a string that is not empty"),
        ({"prompt": "x", "temperature": 1}, "temperature is not a field of such a line; allowed: prompt"),
        (
            {"prompt": "x", "check": "fuzzy", "answer": "y"},
            "check='fuzzy'; allowed: exact, number, regex, choice, python",
        ),
        ({"prompt": "x", "check": "exact"}, "check='exact' is given without answer"),
        ({"prompt": "x", "check": "number", "answer": "ten"}, "answer='ten'; allowed: a number"),
        ({"prompt": "x", "check": "regex", "answer": "("}, "answer='(' is no regular expression"),
        ({"prompt": "x", "check": "python", "answer": "assert ("}, "answer='assert (' is no Python code"),
        ({"prompt": "x", "choices": ["a", "b"], "answer": "b"}, "answer='b'; allowed: a capital letter"),
        ({"prompt": "x", "choices": ["a"]}, "choices=['a']; allowed: a list of 2 to 26 strings"),
        ({"messages": [{"role": "user"}]}, "allowed: a list of objects with role and content"),
        ({"question": "x", "answer": "3"}, "answer='3'; allowed: a text that ends in '#### ' and a number"),
        ({"turns": []}, "turns=[]; allowed: a list of strings"),
        ({**BATCH, "body": {}}, "body={}; allowed: an object with messages"),
    ],
)
def test_a_mistake_names_its_line(file, line, message):
    path = file(OURS, line)
    with pytest.raises(ValueError) as error:
        read_problems(path)
    assert f"{path}, line 2: " in str(error.value) and message in str(error.value)


@pytest.mark.slow
def test_eval_of_a_file(smcserve, file, tmp_path):
    written = tmp_path / "found.json"
    ran = smcserve("eval", "--problems", file(OURS, GSM8K, MT_BENCH), "--max-tokens", 40, "--json", written)
    assert ran.code == 0 and "exact lockstep N=8 K=5" in ran.out and "accepted by depth" in ran.out
    record = json.loads(written.read_text())
    rows = {row["decoding"]: row for row in record["rows"]}
    exact, target = rows["exact lockstep N=8 K=5"], rows["target alone"]
    assert (target["problems"], target["graded"]) == (3, 2) and target["same_as_target"] is None
    assert "Exact decoding by walk gives the target's own answers" in ran.out and "SMC draws other" in ran.out
    assert exact["same_as_target"] == 1 and exact["correct"] == target["correct"]
    assert exact["mean_logp"] == pytest.approx(target["mean_logp"], abs=1e-4) and exact["tokens_a_round"] > 1.5
    assert len(exact["accepted_by_depth"]) == 5 and rows["distinct lockstep N=8 K=5"]["log_evidence"] < 0.5
    assert [each["line"] for each in record["problems"]] == [1, 2, 3]
    assert set(record["problems"][0]["answers"]) == set(rows)


def test_answers_that_are_cut_count_apart(smcserve, file, tmp_path):
    """An answer of 3 tokens is no wrong answer: it did not come to an end."""
    written = tmp_path / "found.json"
    chosen = ("--only", "exact lockstep", "-n", 2, "-k", 4)
    ran = smcserve("eval", "--problems", file(OURS, GSM8K), "--max-tokens", 3, *chosen, "--json", written)
    (row,) = json.loads(written.read_text())["rows"]
    assert ran.code == 0 and (row["problems"], row["graded"], row["cut"]) == (2, 0, 2)


@pytest.mark.parametrize("name", ["chat_prompts", "code_prompts", "number_questions"])
def test_the_files_that_are_shipped(name):
    problems = read_problems(Path(benchmarks.__file__).parent / f"{name}.jsonl")
    assert len(problems) >= 20
    assert all((problem.answer is not None) == (name == "number_questions") for problem in problems)


def test_a_file_without_answers(smcserve, file):
    pair = ("--target", demo.TARGET, "--draft", demo.DRAFT)
    chosen = ("--only", "exact lockstep", "-n", 2, "-k", 4)
    ran = smcserve("eval", *pair, "--problems", file(BATCH), "--max-tokens", 20, *chosen)
    assert ran.code == 0 and "has no answers" in ran.out and "100%" in ran.out and "N=2 K=4" in ran.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--problems", "nowhere.jsonl"), "nowhere.jsonl is not a file"),
        (("--markdown", "x.md"), "--markdown x.md has no effect with --problems FILE"),
        (("--max-tokens", 600), "line 1: the prompt has"),
        (("--max-tokens", 0), "max_tokens=0; allowed"),
        (("--target", "x"), "--target is given without --draft"),
        (("--json", "/nowhere/x.json"), "its directory does not exist"),
        (("--ess-threshold", 0.5), "has no effect without settings of independent particles"),
    ],
)
def test_eval_refuses(smcserve, file, arguments, message):
    ran = smcserve("eval", "--problems", file(OURS), *arguments)
    assert (ran.code, ran.out) == (2, "") and message in ran.err


def test_max_tokens_is_for_files(smcserve):
    assert "--max-tokens 5 has no effect without --problems FILE" in smcserve("eval", "--max-tokens", 5).err


@pytest.mark.slow
def test_bench_with_prompts_of_a_file(smcserve, file):
    ran = smcserve("bench", "--prompts-file", file(OURS), "--rounds", 2, "-k", 4, "-f", 1, "--concurrency", 2)
    assert ran.code == 0 and "distinct lockstep" in ran.out
    ran = smcserve("bench", "--prompts-file", file("{"))
    assert ran.code == 2 and "line 1: this is not JSON" in ran.err
    ran = smcserve("bench", "--prompts-file", file(OURS), "--prompts")
    assert ran.code == 2 and "has no effect with --prompts" in ran.err
