"""The measurement of a service with several worker groups, on the demo pair."""

from __future__ import annotations

import pytest

from benchmarks.worker_groups import main

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow, pytest.mark.timeout(600)]


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
