"""`smcserve check`: what it says of a pair that fits and of one that does not."""

from __future__ import annotations

import json

from tests.model.tiny import save_byte_level, save_tiny


def test_demo_pair_is_ok(smcserve):
    ran = smcserve("check")
    assert ran.code == 0 and "ok: 512 shared token ids, contexts up to 512 tokens" in ran.out
    for cell in ("llama", "5.64 M", "10.76 MiB", "0.75 MiB"):
        assert cell in ran.out


def test_demo_pair_as_json(smcserve):
    report = json.loads(smcserve("check", "--json").out)
    assert report["ok"] is True and report["problems"] == []
    assert report["target"]["parameters"] > 10 * report["draft"]["parameters"]


def test_a_pair_that_does_not_fit(smcserve, tmp_path):
    target = save_byte_level(save_tiny(tmp_path / "target", vocab_size=304))
    draft = save_byte_level(save_tiny(tmp_path / "draft", vocab_size=304), words=("extra",))
    ran = smcserve("check", "--target", target, "--draft", draft)
    assert ran.code == 1 and "problem: target and draft have different vocabularies" in ran.out
    missing = smcserve("check", "--target", target, "--draft", tmp_path / "none", "--json")
    report = json.loads(missing.out)
    assert missing.code == 1 and report["ok"] is False and report["draft"] is None


def test_one_directory_alone(smcserve):
    ran = smcserve("check", "--target", "x")
    assert ran.code == 2 and "--target is given without --draft" in ran.err


def test_of_an_empty_directory_the_problem_is_all_there_is_to_say(smcserve, tmp_path):
    ran = smcserve("check", "--target", tmp_path, "--draft", tmp_path)
    assert ran.code == 1 and "refused" not in ran.out
    assert ran.out.splitlines()[3].startswith("problem: target: ")
