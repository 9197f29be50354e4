"""`smcserve eval --problems FILE` and `bench --prompts-file FILE`: formats, checks, and refused files."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import benchmarks
from benchmarks import own_problems
from benchmarks.load import ClosedLoop
from benchmarks.own_record import OwnAnswer, OwnRecord, OwnRow
from benchmarks.problem_file import FileProblem, read_problems
from benchmarks.reports import own
from benchmarks.reports.own import draw, finding, markdown, parts
from smc import demo
from smc.executor.worker import ModelWorker
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


@pytest.fixture
def run_eval(smcserve, tmp_path):
    """Run `smcserve eval` with a record. Returns the run, and the rows by problems, temperature and setting."""
    record = tmp_path / "found.json"

    def run(*arguments):
        ran = smcserve("eval", *arguments, "--json", record)
        rows = json.loads(record.read_text())["rows"] if record.exists() else []
        return ran, {(row["problems"], row["temperature"], row["decoding"]): row for row in rows}

    return run


@pytest.mark.slow
def test_eval_of_a_file(run_eval, file, tmp_path):
    ran, rows = run_eval("--problems", file(OURS, GSM8K, MT_BENCH), "--max-tokens", 40)
    assert ran.code == 0 and "exact lockstep N=8 K=5" in ran.out and "accepted by depth" in ran.out
    exact, target = (rows["problems", 1, name] for name in ("exact lockstep N=8 K=5", "target alone"))
    assert (target["count"], target["graded"]) == (3, 2)
    conditions = json.loads((tmp_path / "found.json").read_text())["conditions"]
    assert (conditions["target"], conditions["draft"]) == (demo.TARGET.name, demo.DRAFT.name)
    assert "Exact decoding by walk gives the target's own answers" in ran.out and "SMC draws other" in ran.out
    assert [answer["text"] for answer in exact["answers"]] == [answer["text"] for answer in target["answers"]]
    assert exact["mean_logp"] == pytest.approx(target["mean_logp"], abs=1e-4) and exact["tokens_a_round"] > 1.5
    assert len(exact["accepted_by_depth"]) == 5 and rows["problems", 1, "distinct lockstep N=8 K=5"]["log_evidence"] < 1
    assert all(row["tokens_per_second"] > 0 for row in rows.values())


def test_answers_that_are_cut_count_apart(run_eval, file):
    """An answer of 3 tokens is no wrong answer: it did not come to an end."""
    chosen = ("--only", "exact lockstep", "-n", 2, "-k", 4)
    ran, rows = run_eval("--problems", file(OURS, GSM8K), "--max-tokens", 3, *chosen)
    row = rows["problems", 1, "exact lockstep N=2 K=4"]
    assert ran.code == 0 and (row["count"], row["graded"], row["cut"]) == (2, 0, 2)


SIZES = ("--max-tokens", 12, "-n", 2, "-k", 4)


def test_rows_come_in_the_order_of_importance_from_one_engine(run_eval, file, monkeypatch, tmp_path):
    engines = []
    original = own_problems.local_engine
    monkeypatch.setattr(own_problems, "local_engine", lambda *given: engines.append(given) or original(*given))
    order = ("--only", "distinct lockstep N=4", "--only", "draft", "--only", "lockstep N=2", "-n", 4)
    files = ("--problems", file(MT_BENCH), "--problems", 2)
    outputs = ("--markdown", tmp_path / "found.md", "--picture", tmp_path / "found.png")
    temperatures = ("--temperature", 0.7, "--temperature", 0)
    ran, rows = run_eval(*files, *temperatures, *SIZES, *order, "--max-rows", 4, *outputs)
    names = ["target alone", "distinct lockstep N=4 K=4", "draft alone"]
    names += [f"{kind} lockstep N=2 K=4" for kind in ("exact", "rejection", "distinct", "independent")]
    assert ran.code == 0 and len(engines) == 1
    measured = [(name, 0.7, each) for each in names for name in ("problems", "word_problems")]
    greedy = [each for each in names if "distinct" not in each and "independent" not in each]
    assert list(rows) == [*measured, *((name, 0, each) for each in greedy for name in ("problems", "word_problems"))]
    in_flight = {each: rows["word_problems", 0.7, each]["in_flight"] for each in names}
    assert in_flight == dict(zip(names, (2, 1, 2, 2, 2, 2, 2)))
    table = (tmp_path / "found.md").read_text()
    assert table.count("| target alone |") == 4 and "**word_problems**, 2 problems, temperature 0.7" in table
    assert "no answer could be graded" in ran.err and not (tmp_path / "found.png").exists()


def test_power_and_constraint_have_rows_of_their_own(run_eval, file):
    more = ("--alpha", 2, "--regex", "[0-9]{2}", "--constraint-scope", "answer")
    given = ("--problems", file(OURS), *SIZES, "--only", "draft", "--only", "independent lockstep")
    _, before = run_eval(*given)
    ran, rows = run_eval(*given, *more, "--resume")
    assert ran.code == 0 and len(rows) == 6 and {key: rows[key] for key in before} == before
    name = "problems matching [0-9]{2}"
    constrained = [rows[name, 1, each] for each in ("target alone", "draft alone")]
    constrained.append(rows[name, 1, "independent lockstep N=2 K=4 alpha=2 scope=answer"])
    assert all(re.fullmatch("[0-9]{2}", row["answers"][0]["text"]) for row in constrained)
    ran, _ = run_eval(*given, "--regex", "[a-z]", "--resume")
    assert "problems matching [a-z]: 1 problems" in ran.out and "problems matching [a-z], T = 1" in ran.err


def test_records_measured_at_the_same_time_are_joined(run_eval, file, tmp_path, capsys):
    paths = []
    for only, lines in (("draft", [OURS, GSM8K]), ("exact lockstep", [OURS, GSM8K]), ("draft", [OURS])):
        ran, _ = run_eval("--problems", file(*lines), *SIZES, "--only", only)
        assert ran.code == 0
        paths.append((tmp_path / "found.json").rename(tmp_path / f"{len(paths)}.json"))
    own.main([str(path) for path in paths[:2]])
    printed = capsys.readouterr().out
    assert "target alone" in printed and "draft alone" in printed and "exact lockstep N=2 K=4" in printed
    assert "near ties" in printed and "bit for bit" not in printed
    record = OwnRecord.joined(paths[:2])
    record.conditions["numerics"] = "invariant"
    own.print_report(record, ["target", "exact"])
    printed = capsys.readouterr().out
    assert "near ties" not in printed and "bit for bit" in printed
    with pytest.raises(ValueError, match=r"2\.json cannot be joined to .*0\.json: it has problems problems"):
        OwnRecord.joined([paths[0], paths[2]])
    changed = json.loads(paths[1].read_text())
    changed["rows"][0]["answers"][1]["tokens_sha256"] = "0"
    paths[1].write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="the target's answers to problems differ"):
        OwnRecord.joined(paths[:2])


def test_an_order_of_sums_that_has_no_effect_is_refused(run_eval, file):
    ran, _ = run_eval("--problems", file(OURS), *SIZES, "--numerics", "invariant")
    assert ran.code == 2 and "numerics='invariant' has no effect with device='cpu'" in ran.err


def test_an_own_run_resumes(run_eval, file):
    given = ("--problems", file(OURS, GSM8K), *SIZES)
    _, before = run_eval(*given, "--only", "draft")
    ran, rows = run_eval(*given, "--only", "draft", "--only", "exact lockstep", "--resume")
    assert ran.code == 0 and "2 rows are in" in ran.err and "exact lockstep N=2 K=4" in ran.out
    assert len(rows) == 3 and {key: rows[key] for key in before} == before
    ran, _ = run_eval(*given, "--only", "draft", "--seed", 3, "--resume")
    assert ran.code == 2 and "cannot be resumed: seed was 0 and is now 3" in ran.err
    pair = ("--target", demo.TARGET, "--draft", demo.DRAFT)
    ran, rows = run_eval("--problems", 1, *pair, *SIZES, "--only", "draft", "--resume")
    assert ran.code == 0 and len(rows) == 5  # further problems in the same record
    for other in ([OURS], [OURS | {"check": "exact", "answer": "42"}, GSM8K]):
        ran, _ = run_eval("--problems", file(*other), *SIZES, "--only", "draft", "--resume")
        assert ran.code == 2 and "cannot be resumed: problems problems was" in ran.err
    ran, after = run_eval(*given, "--only", "draft")
    assert ran.code == 2 and "exists already; use --resume to continue it" in ran.err and after == rows


def test_other_weights_of_the_same_name_do_not_resume(run_eval, file, tmp_path):
    places = [tmp_path / name / demo.TARGET.name for name in ("before", "after")]
    for place in places:
        shutil.copytree(demo.TARGET, place)
    weights = places[1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    given = ("--problems", file(OURS), *SIZES, "--only", "draft", "--draft", demo.DRAFT, "--target")
    ran, rows = run_eval(*given, places[0])
    assert ran.code == 0 and rows
    ran, after = run_eval(*given, places[1], "--resume")
    assert ran.code == 2 and "target_weights was" in ran.err and after == rows


def test_a_file_may_have_the_name_of_a_condition(tmp_path):
    conditions = {"seed": 0, "problems": {"seed": "a hash"}}
    record = OwnRecord.open(tmp_path / "found.json", conditions, resume=False)
    record.add(row_of(True))
    with pytest.raises(ValueError, match="seed was 0 and is now 1"):
        OwnRecord.open(record.path, conditions | {"seed": 1}, resume=True)


def test_the_time_limit_ends_a_run_with_what_it_has(run_eval, file, monkeypatch):
    given = ("--problems", file(OURS, GSM8K), *SIZES, "--only", "draft", "--only", "exact lockstep")
    ran, rows = run_eval(*given, "--time-limit", 1e-3)
    assert ran.code == 1 and not rows and "the time limit ended the measurement: 0 of 3 rows are new" in ran.err
    # Only the measurement's own clock leaps after some steps: other threads read the clock, too.
    clock, now = iter([0.0] * 9), time.monotonic()
    leaping = {"monotonic": lambda: now + next(clock, 99.0), "perf_counter": time.perf_counter}
    monkeypatch.setattr(own_problems, "time", SimpleNamespace(**leaping))
    ran, rows = run_eval(*given, "--time-limit", 5)
    assert ran.code == 1 and 0 < len(rows) < 3 and "target alone" in ran.out
    monkeypatch.undo()


class FailingDraft(ClosedLoop):
    """Answers of the draft alone end in an error."""

    def __init__(self, engine, requests, concurrency):
        self.fails = requests[0].params.method == "draft"
        super().__init__(engine, requests, concurrency)

    def step(self):
        return [
            replace(output, answer=replace(output.answer, error="it broke"))
            if self.fails and output.answer is not None
            else output
            for output in super().step()
        ]


def test_a_failed_answer_costs_its_row_alone(run_eval, file, monkeypatch):
    monkeypatch.setattr(own_problems, "ClosedLoop", FailingDraft)
    given = ("--problems", file(OURS, GSM8K), *SIZES, "--only", "draft", "--only", "exact lockstep")
    ran, rows = run_eval(*given)
    assert ran.code == 1 and "problems, T = 1, draft alone, problem" in ran.err and "it broke" in ran.err
    assert [key[2] for key in rows] == ["target alone", "exact lockstep N=2 K=4"]


def test_no_timed_round_has_prompts(run_eval, file, monkeypatch):
    """Requests that end are replaced, whose prompts run beside the others' rounds: here half a second each."""
    slow, run_prompts, timed = 0.5, ModelWorker.run_prompts, []

    def run_slowly(worker, batch):
        time.sleep(slow)
        return run_prompts(worker, batch)

    def speed(answers, in_flight, spans):
        timed.extend(spans)

    monkeypatch.setattr(ModelWorker, "run_prompts", run_slowly)
    monkeypatch.setattr(own_problems, "_speed", speed)
    given = ("--problems", file(OURS, GSM8K, MT_BENCH, OURS), "--max-tokens", 24, "-k", 4)
    ran, _ = run_eval(*given, "--only", "draft", "--concurrency", 2)
    assert ran.code == 0 and timed and max(timed) < slow


def answers(*solved: bool | None) -> tuple[OwnAnswer, ...]:
    return tuple(OwnAnswer("", 3, str(i), grade is None, grade, -1.5, None) for i, grade in enumerate(solved))


def row_of(*solved: bool | None) -> OwnRow:
    return OwnRow("problems", 1.0, "draft alone", 1, None, (), None, 1.0, answers(*solved))


def test_the_difference_from_the_target_is_taken_problem_by_problem():
    target, other = row_of(True, True, True, False, None), row_of(True, False, False, True, True)
    difference = other.difference_from(target)
    assert (difference.problems, difference.mean) == (4, pytest.approx(-1 / 4))
    spread = 1.96 * (((1 + 2 + 1) / 6 - 1 / 36) / 6) ** 0.5
    assert (difference.low, difference.high) == pytest.approx((-1 / 6 - spread, -1 / 6 + spread))
    few = target.difference_from(target)
    assert few.mean == 0 and few.high == -few.low > 0.2  # four equal grades are no proof
    assert row_of(None).difference_from(row_of(True)) is None and row_of(None).accuracy is None
    assert OwnRow.from_dict(json.loads(json.dumps(other.as_dict()))) == other
    assert other.mean_logp == pytest.approx(-0.5) and other.log_evidence is None and other.same_as(target) == 1


def test_words_say_what_a_comparison_shows():
    target = replace(row_of(*[True] * 20, *[False] * 20), decoding="target alone")
    worse, close = row_of(*[False] * 40), row_of(*[True] * 19, *[False] * 21)
    same = replace(target, decoding="exact lockstep N=8 K=5")
    assert finding(same, target) == "exact lockstep N=8 K=5: every answer is the target's own."
    other = [replace(each, tokens_sha256="x") for each in worse.answers]
    assert "solves fewer problems than the target (-50.0 points" in finding(replace(worse, answers=other), target)
    other = [replace(each, tokens_sha256="x") for each in close.answers]
    assert "show no difference from the target (-2.5 points" in finding(replace(close, answers=other), target)


def test_words_say_who_is_near_the_target():
    """Of 4,000 problems one setting loses 50: -1.6 to -0.9 points. Another solves 500 more, so it is not near."""
    assert own.MARGINS == (1, 3)

    def named(name: str, *solved: bool) -> OwnRow:
        return replace(row_of(*solved), decoding=name)

    target = named("target alone", *[True, False] * 2000)
    close = named("close", *[False] * 100, *[True, False] * 1950)
    far = named("far", *[True] * 1000, *[True, False] * 1500)
    assert close.difference_from(target).low == pytest.approx(-0.016, abs=1e-4)
    assert own.margins([target, close, far]) == [
        "by the whole 95% interval, no more than 1 below the target: far; nor above it: none",
        "by the whole 95% interval, no more than 3 below the target: close, far; nor above it: close",
    ]
    assert own.margins([close]) == own.margins([target]) == []
    assert own.margins([target, named("cut", *[None] * 4000)]) == []


def test_answers_to_all_files_are_compared_together():
    def rows(problems: str, *solved: bool) -> list[OwnRow]:
        row = replace(row_of(*solved), problems=problems)
        return [replace(row, decoding="target alone"), row]

    free = replace(row_of(None), problems="chat", decoding="target alone")
    record = OwnRecord(None, {"problems": {"a": "", "b": "", "chat": ""}}, [*rows("b", True), *rows("a", False), free])
    found = {name: part for name, _, part in parts(record)}
    assert list(found) == ["b", "a", "chat", "all files"]
    both = found["all files"]
    assert [row.decoding for row in both] == ["target alone", "draft alone"]
    more = [replace(free, problems="a", decoding=f"exact lockstep N={n} K=5") for n in (16, 4)]
    (*_, (_, _, sorted_rows)) = parts(OwnRecord(None, {"problems": {}}, [*rows("a", True), *more]))
    assert [row.decoding[-7:] for row in sorted_rows[2:]] == ["N=4 K=5", "=16 K=5"]
    assert all([answer.solved for answer in row.answers] == [False, True] for row in both)
    assert "all files" in markdown(record)


def test_a_picture_of_a_record(tmp_path):
    row = row_of(True, False, None)
    rows = [row, replace(row, decoding="target alone"), replace(row, temperature=0.7)]
    record = OwnRecord(None, {"seed": 0, "problems": {}}, rows)
    draw(record, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    draw(OwnRecord(None, {"problems": {}}, [row_of(None)]), tmp_path / "y.png")
    assert not (tmp_path / "y.png").exists()


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
    assert "T = 1, exact lockstep N=2 K=4: " in ran.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--problems", "nowhere.jsonl"), "nowhere.jsonl is not a file"),
        (("--speed-problems", 3), "--speed-problems 3 has no effect with problems or a pair of your own"),
        (("--problems", "problems.jsonl"), "two times problems of the name problems"),
        (("--alpha", 2, "--only", "exact"), "--alpha 2.0 has no effect without settings of SMC"),
        (("--max-rows", 0), "--max-rows 0; allowed: >= 1"),
        (("--time-limit", 0), "--time-limit 0; allowed: > 0"),
        (("--temperature", -1), "temperature=-1.0; allowed"),
        (("--resume",), "--resume has no effect without --json"),
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


def test_options_that_are_for_files(smcserve):
    assert "--max-tokens 5 has no effect without --problems FILE" in smcserve("eval", "--max-tokens", 5).err
    assert "--regex a has no effect without --problems FILE" in smcserve("eval", "--regex", "a").err
    assert "allowed: once, unless" in smcserve("eval", "--temperature", 1, "--temperature", 0.5).err


@pytest.mark.slow
def test_bench_with_prompts_of_a_file(smcserve, file):
    ran = smcserve("bench", "--prompts-file", file(OURS), "--rounds", 2, "-k", 4, "-f", 1, "--concurrency", 2)
    assert ran.code == 0 and "distinct lockstep" in ran.out
    ran = smcserve("bench", "--prompts-file", file("{"))
    assert ran.code == 2 and "line 1: this is not JSON" in ran.err
    ran = smcserve("bench", "--prompts-file", file(OURS), "--prompts")
    assert ran.code == 2 and "has no effect with --prompts" in ran.err
