"""From any beginning of an output the next run makes the same file, without decoding a line that is already in it."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from services.batch import runner
from services.batch.lines import RequestReader
from services.batch.output_file import rest, written
from services.batch.runner import BatchRunner, Limit
from tests.batch.asking import PRINT, answer_file, answer_of, chat, completion, write_lines


@pytest.fixture(autouse=True)
def clock_stands_still(monkeypatch):
    monkeypatch.setattr(runner.time, "time", lambda: 1234.5)


@pytest.fixture
def source(tmp_path):
    documents = [chat(f"q{i}", f"{i} + {i}?") for i in range(9)]
    documents[2:2] = ["", "not json", chat("wrong", n=0), completion("mine", seed=3), chat("ünï", "ü")]
    return write_lines(tmp_path / "in.jsonl", documents)


def done_by(calls: list[str]):
    async def decode(request):
        calls.append(request.request_id)
        return answer_of(request)

    return decode


def test_any_beginning_becomes_the_same_file(pair, source, tmp_path):
    """An output that is cut at, next to or between line ends is completed to the same file, and only missing lines are
    decoded."""
    answer_file(pair, source, tmp_path / "whole.jsonl")
    whole = (tmp_path / "whole.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    ends = [sum(map(len, lines[:i])) for i in range(len(lines) + 1)]
    cuts = {
        *ends,
        *(end - 1 for end in ends[1:]),
        *(end + 1 for end in ends[:-1]),
        *random.Random(0).sample(range(len(whole)), 40),
    }
    for cut in sorted(cuts):
        output, calls = tmp_path / "out.jsonl", []
        output.write_bytes(whole[:cut])
        before = answer_file(pair, source, output, done_by(calls))
        assert output.read_bytes() == whole, cut
        kept = sum(end <= cut for end in ends[1:])
        assert before.done == kept and before.total == len(lines) == 13
        refused = sum(b'"error": null' not in line for line in lines[kept:])
        assert len(calls) == len(set(calls)) == 13 - kept - refused


def test_failed_lines_of_earlier_runs_count(pair, source, tmp_path):
    answer_file(pair, source, tmp_path / "out.jsonl")
    again = answer_file(pair, source, tmp_path / "out.jsonl")
    assert (again.total, again.done, again.failed) == (13, 13, 2)


def test_failed_lines_are_done_again_and_answers_stay(pair, source, tmp_path):
    """Failed lines are done again in their order, before the lines that have not been done; answers are kept."""
    output, calls = tmp_path / "out.jsonl", []
    answer_file(pair, source, output)
    before = output.read_bytes().splitlines(keepends=True)
    records = [json.loads(line) for line in before[:9]]
    records[6] |= {"response": None, "error": {"code": "unavailable", "message": "lost"}}
    requests, again = RequestReader(pair, 0), []
    runner = BatchRunner(pair, requests, done_by(calls), PRINT, Limit(4))
    lines = rest(source, 2, earlier=records)
    asyncio.run(runner.run(lines, lambda record, is_new: again.append((record, is_new))))
    assert [written(record) for record, _ in again] == before[2:]
    failed = [index for index, record in enumerate(records) if record["error"] is not None]
    assert [is_new for _, is_new in again] == [index in failed or index >= 9 for index in range(2, 13)]
    assert len(calls) == 5


def test_lines_may_be_added_at_the_end(pair, source, tmp_path):
    answer_file(pair, source, tmp_path / "out.jsonl")
    before = (tmp_path / "out.jsonl").read_bytes()
    with source.open("a") as file:
        file.write(write_lines(tmp_path / "more", [chat("new")]).read_text())
    assert answer_file(pair, source, tmp_path / "out.jsonl").done == 13
    assert (tmp_path / "out.jsonl").read_bytes().startswith(before) and b'"new"' in (
        tmp_path / "out.jsonl"
    ).read_bytes()


def edited(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (
            lambda text: edited(text, '"q1"', '"q01"'),
            {},
            "answer 2 has custom_id='q1', but line 2 of the input has 'q01'",
        ),
        (lambda text: edited(text, "1 + 1?", "1 + 2?"), {}, "answer 2 does not belong to line 2 as it is now"),
        (lambda text: edited(text, '"n": 0', '"n": 1'), {}, "answer 4 does not belong to line 5 as it is now"),
        (lambda text: edited(text, "not json", "no json"), {}, "answer 3 does not belong to line 4 as it is now"),
        (lambda text: text.split("\n", 1)[1], {}, "answer 1 has custom_id='q0', but line 1 of the input has 'q1'"),
        (lambda text: text.rsplit("\n", 2)[0], {}, "has more lines than"),
        (lambda text: text, {"seed": 1}, "answer 1 was made with another seed"),
        (
            lambda text: text,
            {"fingerprint": "smc_2"},
            "answer 1 was made with other models, another --dtype or other settings",
        ),
    ],
)
def test_answers_to_something_else_are_refused_and_left_alone(pair, source, tmp_path, change, settings, message):
    output, calls = tmp_path / "out.jsonl", []
    answer_file(pair, source, output)
    before = output.read_bytes()
    source.write_text(change(source.read_text()))
    with pytest.raises(ValueError, match=message) as caught:
        answer_file(pair, source, output, done_by(calls), **settings)
    assert "give another output file, or --overwrite to start from the beginning" in str(caught.value)
    assert output.read_bytes() == before and calls == []
    answer_file(pair, source, output, done_by(calls), overwrite=True, **settings)
    assert calls


def test_two_lines_of_one_name_are_refused(pair, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [chat("a"), chat("b"), "", chat("c", n=2), chat("b")])
    with pytest.raises(ValueError, match="lines 2 and 5 have the same custom_id"):
        answer_file(pair, source, tmp_path / "out.jsonl")
