"""Requests and their times: reproducible from the seed, with the given shares and lengths; files of prompts and
traces."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from loadtest.distributions import LengthDistribution, Mixture
from loadtest.settings import LoadSettings
from loadtest.workload import Workload, read_prompts, read_trace
from services.client import Message
from smc.demo.problems import generate
from tests.loadtest.made import MODEL


def plan(**settings):
    return list(Workload(LoadSettings.of({"rate": 100.0, "requests": 1000}, settings), MODEL).plan())


@pytest.mark.parametrize(
    ("word", "mean", "std", "low", "high"),
    [
        ("7", 7, 0, 7, 7),
        ("uniform:10-20", 15, 10**0.5, 10, 20),
        ("normal:100,10", 100, 10, 40, 160),
        ("lognormal:100,0.1", 100.5, 10.08, 50, 200),
        ("normal:1,1", 1.384, 0.634, 1, 9),
    ],
)
def test_lengths(word, mean, std, low, high):
    rng = np.random.default_rng(1)
    drawn = np.array([LengthDistribution.read(word, "--x").draw(rng) for _ in range(4000)])
    assert drawn.mean() == pytest.approx(mean, abs=5 * std / 4000**0.5 + 0.05)
    assert drawn.std() == pytest.approx(std, rel=0.1)
    assert low <= drawn.min() and drawn.max() <= high
    assert str(LengthDistribution.read(word, "--x")) == word


@pytest.mark.parametrize(
    "word",
    ["0", "x", "uniform:5", "uniform:9-3", "normal:5", "normal:5,-1", "zipf:1,2", "uniform:1-2-3", "lognormal:nan,1"],
)
def test_lengths_that_cannot_be(word):
    with pytest.raises(ValueError, match=r"--x .*; allowed: COUNT, uniform:LOW-HIGH"):
        LengthDistribution.read(word, "--x")


def test_mix():
    mix, rng = Mixture.read("4:1,8:3", "--particles"), np.random.default_rng(1)
    counts = Counter(mix.draw(rng) for _ in range(4000))
    assert set(counts) == {"4", "8"} and counts["8"] / 4000 == pytest.approx(0.75, abs=5 * 0.433 / 4000**0.5)
    assert str(mix) == "4:0.25,8:0.75" and str(Mixture.read("smc", "--method")) == "smc"
    with pytest.raises(ValueError, match=r"--particles '4:0'; allowed: VALUE or VALUE:WEIGHT"):
        Mixture.read("4:0", "--particles")


def test_the_same_seed_asks_the_same():
    settings = {"particles": "4,8", "cancel_share": 0.3, "cancel_after": 0.1, "output_length": "uniform:1-99"}
    assert plan(seed=5, **settings) == plan(seed=5, **settings) != plan(seed=6, **settings)


def test_at_another_rate_the_same_is_asked_at_other_times():
    slow, fast = plan(seed=5, particles="4,8"), plan(seed=5, particles="4,8", rate=200.0)
    assert [replace(request, at=0.0) for request in slow] == [replace(request, at=0.0) for request in fast]
    assert slow[-1].at == pytest.approx(2 * fast[-1].at)


def test_each_kind_of_arrivals():
    gaps = np.diff([request.at for request in plan(arrivals="gamma", burstiness=0.25)])
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.25)
    assert np.diff([request.at for request in plan(arrivals="constant")]) == pytest.approx(0.01)
    ramp = [
        request.at
        for request in plan(arrivals="ramp", rate=10.0, rate_end=100.0, warm_up=5.0, duration=10.0, requests=9999)
    ]
    level, first, last = (sum(begin <= at < begin + 5 for at in ramp) for begin in (0, 5, 10))
    assert level == pytest.approx(50, abs=5 * 50**0.5) and max(ramp) < 15
    assert first == pytest.approx(162.5, abs=5 * 162.5**0.5) and last == pytest.approx(387.5, abs=5 * 387.5**0.5)


def test_every_request_has_a_seed_of_its_own():
    assert len({request.sampling["seed"] for request in plan()}) == 1000


def test_shares():
    settings = {
        "method": "smc:0.5,exact:0.3,target:0.2",
        "particles": "4",
        "cancel_share": 0.2,
        "cancel_after_tokens": 3,
        "slow_share": 0.1,
    }
    requests = plan(slow_pause=0.5, **settings)
    error = 5 * 0.4 / 1000**0.5
    assert sum(r.sampling["method"] == "target" for r in requests) / 1000 == pytest.approx(0.2, abs=error)
    assert sum(r.cancel_after_tokens == 3 for r in requests) / 1000 == pytest.approx(0.2, abs=error)
    assert sum(r.pause == 0.5 for r in requests) / 1000 == pytest.approx(0.1, abs=error)
    assert not any(r.pause and r.cancel_after_tokens for r in requests)
    assert all(("particles" in r.sampling) == (r.sampling["method"] != "target") for r in requests)
    assert all(r.ordinary == (not r.pause and r.cancel_after_tokens is None) for r in requests)


def test_the_warm_up_is_not_counted():
    requests = plan(warm_up=1.0, duration=2.0)
    assert all(request.counted == (request.at >= 1.0) for request in requests)
    assert requests[-1].at < 3.0 and 60 < sum(not request.counted for request in requests) < 150
    assert sum(request.counted for request in plan(warm_up=1.0)) == 1000


def test_default_prompts_are_the_demo_problems():
    questions = [problem.question for problem in generate(0, 256, "test")]
    requests = plan(requests=300)
    assert [r.prompt for r in requests] == [[Message("user", questions[index % 256])] for index in range(300)]
    plain = Workload(LoadSettings(rate=1.0, requests=1), replace(MODEL, has_chat_template=False))
    assert next(plain.plan()).prompt == questions[0]


def test_random_prompts_fit_and_do_not_end():
    prompts = [request.prompt for request in plan(prompt_length="uniform:300-900")]
    assert min(map(len, prompts)) < 350 and max(map(len, prompts)) == MODEL.max_context - 1
    tokens = {token for prompt in prompts for token in prompt}
    assert tokens == set(range(MODEL.vocab_size)) - set(MODEL.eos_token_ids)


def test_prompts_from_a_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "one"},
        {"prompt": [3, 4], "max_tokens": 5},
        {"messages": [{"role": "user", "content": "three"}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    requests = plan(prompts=path, output_length="9", requests=4)
    assert [r.prompt for r in requests] == ["one", [3, 4], [Message("user", "three")], "one"]
    assert [r.sampling["max_tokens"] for r in requests] == [9, 5, 9, 9]


def test_a_trace(tmp_path):
    """Both formats are equivalent; lines may be in any order; settings fill in the values that a line omits."""
    lines = [{"time": 1.5, "prompt": "b", "max_tokens": 3}, {"time": 0.5, "prompt_tokens": 20}, {"time": 4}]
    jsonl, table = tmp_path / "trace.jsonl", tmp_path / "trace.csv"
    jsonl.write_text("\n".join(map(json.dumps, lines)))
    table.write_text("time,prompt,prompt_tokens,max_tokens\n1.5,b,,3\n0.5,,20,\n4,,,\n")
    assert read_trace(jsonl) == read_trace(table)
    settings = LoadSettings.of({}, {"arrivals": "trace", "trace": jsonl, "warm_up": 1.0, "output_length": "7"})
    requests = list(Workload(settings, MODEL).plan())
    assert [(r.at, r.counted, r.sampling["max_tokens"]) for r in requests] == [
        (0.5, False, 7),
        (1.5, True, 3),
        (4.0, True, 7),
    ]
    assert len(requests[0].prompt) == 20 and requests[1].prompt == "b" and isinstance(requests[2].prompt[0], Message)
    assert len(list(Workload(replace(settings, duration=2.0), MODEL).plan())) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"time": 1, "max_token": 3}', "line 1: max_token is not known; allowed: time, prompt"),
        ('{"prompt": "x"}', "line 1: time=None; allowed: seconds since the start, from 0"),
        ('{"time": -1}', "time=-1"),
        ('{"time": 1, "max_tokens": 0}', "max_tokens=0; allowed: a whole number from 1"),
        ('{"time": 1, "prompt": "x", "prompt_tokens": 3}', "more than one of"),
        ('{"time": 1, "prompt": []}', "allowed: text, or a list of token ids"),
        ('{"time": 1, "messages": ["x"]}', "allowed: a list of objects with role and content"),
        ("[1]", "is not a JSON object"),
        ("{", "give one JSON object a line"),
        ("", "is empty; give at least one line"),
    ],
)
def test_traces_that_cannot_be(tmp_path, line, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=message):
        read_trace(path)


def test_tables_and_prompts_that_cannot_be(tmp_path):
    path = tmp_path / "trace.csv"
    for text, message in (("time\n1,2\n", "a different number of cells"), ("time\nsoon\n", "time is in seconds")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_trace(path)
    path.write_text('{"max_tokens": 3}')
    with pytest.raises(ValueError, match="entry 1 has neither prompt nor messages"):
        read_prompts(path)
