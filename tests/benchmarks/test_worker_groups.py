"""The measurement of a service with several worker groups, on the demo pair."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.worker_groups import bodies, main


def test_no_load_is_faster_for_coming_later():
    """Prompts repeat within a load and from load to load. Requests with the same one share no prefix cache."""
    chats = [[{"role": "user", "content": question}] for question in ("Why?", "How?")]
    loads = [("target", "0"), ("exact", "1"), ("exact", "2")]
    asked = [body for load in loads for body in itertools.islice(bodies(chats, *load, {"max_tokens": 3}), 5)]
    assert len({(body["messages"][0]["content"], body["cache_salt"]) for body in asked}) == len(asked) == 15
    assert [(body["method"], body["seed"], body["max_tokens"]) for body in asked[4:6]] == [
        ("target", 4, 3),
        ("exact", 0, 3),
    ]


@pytest.mark.xdist_group("ray")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_worker_groups_and_a_kill(capsys):
    """Both worker groups work, and every stream finishes with its text although one of them is killed."""
    measured = ["--requests", "4", "--seconds", "3", "--warm-up", "1", "--max-tokens", "120", "--kill", "4"]
    found = main(["--groups", "2", *measured, "--", "--placement", "shared", "--max-slots", "32"])
    (speed,) = found["speeds"]
    assert speed["tokens_a_second"] > 10 and sum(speed["running"]) <= 4 and len(speed["running"]) == 2
    killed = found["kill"]
    assert (killed["streams"], killed["finished"], killed["equal"]) == (4, 4, 4) and killed["back"] < 300
    said = capsys.readouterr().out
    assert "worker group 1 killed under 4 streams" in said and "Tokens a second of the service" in said


def test_files_of_one_name_are_refused(capsys):
    """One of them would be measured in place of both."""
    with pytest.raises(SystemExit):
        main(["--groups", "1", "--prompts", "a/chats.jsonl", "--prompts", "b/chats.jsonl"])
    assert "allowed: files of different names" in capsys.readouterr().err
