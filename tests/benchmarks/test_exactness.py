"""The measurement of exact answers beside others."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks.exactness import company_requests, main
from smc import demo
from smc.api.request import Request
from smc.api.sampling_params import Method
from smc.model.tokenizer import Tokenizer


def test_tokens_a_round_leave_out_what_no_round_makes(capsys):
    """Of an answer of two tokens, a round makes one; of an answer of one token, none."""
    options = ["company", "--problems", "2", "--form", "lockstep", "-n", "1", "--in-flight", "1", "--max-tokens"]
    assert main([*options, "2"]) == {"lockstep, N=1, 1 in flight": 2}
    assert "1.00 tokens a round" in capsys.readouterr().out
    main([*options, "1"])
    assert "tokens a round" not in capsys.readouterr().out


def test_equality_counts_them_likewise(capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.exactness.MAX_ANSWER", 2)
    main(["equality", "--problems", "2", "--form", "lockstep"])
    assert "2 answers, 0 different, 1.00 tokens a round" in capsys.readouterr().out


def test_parts_of_the_problems_are_those_of_the_whole():
    """Files first, then word problems, each with the same prompt, temperature and seed in every part."""
    files, tokenizer = ["benchmarks/number_questions.jsonl"], Tokenizer.load(demo.TARGET)

    def asked(first: int, problems: int) -> list[Request]:
        given = Namespace(first=first, problems=problems, prompts_file=files, max_tokens=4)
        return company_requests(given, tokenizer, Method.EXACT)

    whole = asked(0, 50)
    assert whole == [*asked(0, 20), *asked(20, 30)]
    assert len({request.prompt for request in whole}) == 50


@pytest.mark.slow
def test_two_processes_share_both_models():
    options = ["company", "--target-tp", "2", "--problems", "2", "--max-tokens", "8"]
    found = main([*options, "--form", "lockstep", "-n", "4", "--in-flight", "2"])
    assert found == {"target, 2 in flight": 2, "lockstep, N=4, 2 in flight": 2}


def test_two_processes_refuse_look_ahead(capsys):
    with pytest.raises(SystemExit):
        main(["company", "--target-tp", "2"])
    assert "--form lockstep" in capsys.readouterr().err
