"""`smcserve check`: its report on pairs that fit and on pairs that do not."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from smc import demo, probe
from smc.api.request import Statistics, fit_of_answer
from smc.api.sampling_params import SamplingParams
from smc.calibration.latency import ONCE
from smc.local_engine import ModelPair
from smc.memory.kv_cache import KVPool
from smc.model.linear import INT4
from smc.model.loader import load_model, save_model
from smc.model.parallel import Shard
from tests.model.foreign import save_foreign_pair
from tests.model.int4 import to_int4
from tests.model.tiny import save_byte_level, save_sentencepiece, save_tiny


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
    draft = save_sentencepiece(save_tiny(tmp_path / "draft", vocab_size=304))
    ran = smcserve("check", "--target", target, "--draft", draft)
    assert ran.code == 1 and "problem: target and draft have different vocabularies" in ran.out
    missing = smcserve("check", "--target", target, "--draft", tmp_path / "none", "--json")
    report = json.loads(missing.out)
    assert missing.code == 1 and report["ok"] is False and report["draft"] is None


def test_a_pair_with_foreign_ids(smcserve, tmp_path):
    target, draft = save_foreign_pair(tmp_path)
    ran = smcserve("check", "--target", target, "--draft", draft)
    assert ran.code == 0 and "ok: 3 shared token ids" in ran.out
    assert "note: the draft does not propose 2 of the target's ids" in ran.out
    assert "3 (<x>; draft: <y>), 4 (<new>; draft: no token)" in ran.out
    assert "note: texts end at the target's end ids (2, 4), not at the draft's (2, 3)" in ran.out
    report = json.loads(smcserve("check", "--target", target, "--draft", draft, "--json").out)
    assert report["ok"] is True and report["shared_ids"] == 3
    assert report["foreign"] == [
        {"id": 3, "target": "<x>", "draft": "<y>"},
        {"id": 4, "target": "<new>", "draft": None},
    ]


def test_one_directory_alone(smcserve):
    ran = smcserve("check", "--target", "x")
    assert ran.code == 2 and "--target is given without --draft" in ran.err


def test_empty_directory_reports_only_the_problem(smcserve, tmp_path):
    ran = smcserve("check", "--target", tmp_path, "--draft", tmp_path)
    assert ran.code == 1 and "refused" not in ran.out
    assert ran.out.splitlines()[3].startswith("problem: target: ")


@pytest.fixture
def brief(monkeypatch, tmp_path):
    """A probe of few tokens, which times the smallest rounds only; measurements are kept in a temporary directory."""
    monkeypatch.setattr(probe, "TOKENS", 12)
    monkeypatch.setattr(probe, "PROMPTS", probe.PROMPTS[:2])
    monkeypatch.setattr("smc.local_engine.ONCE", replace(ONCE, seconds=0.0, crowd=1, context=40))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def mismatched(tmp_path):
    """A draft of the demo pair's shape and tokenizer with random weights."""
    shutil.copytree(demo.DRAFT, tmp_path / "mismatched")
    model = load_model(demo.DRAFT)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.normal_(std=0.05, generator=generator)
    save_model(model, tmp_path / "mismatched")
    return tmp_path / "mismatched"


def test_a_probe_of_the_demo_pair(smcserve, brief):
    ran = smcserve("check", "--probe")
    assert (
        ran.code == 0
        and "accepted by depth: " in ran.out
        and "expected speed, relative to the target alone: exact" in ran.out
    )
    assert "method=smc: 8 particles represent the target well enough" in ran.out
    found = json.loads(smcserve("check", "--probe", "-n", 2, "--temperature", 0.5, "--json").out)["probe"]
    assert found["particles"] == 2 and found["temperature"] == 0.5
    depths = found["accepted_by_depth"]
    assert depths == sorted(depths, reverse=True) and depths[0] > 0.6 and len(depths) == found["block"]
    assert 0 <= found["kl"] < 0.5 and found["overlap"] > 0.8 and found["log_evidence"] > -0.3
    assert found["tokens_a_round"] == pytest.approx(1 + sum(depths))


def test_a_probe_says_how_far_it_is(smcserve, brief, monkeypatch):
    """First figures come early, and further ones with each part. A long part says how many tokens it has."""
    monkeypatch.setattr(probe, "REPORT_SECONDS", 0.0)
    ran = smcserve("check", "--probe", "--json")
    lines = [re.fullmatch(r"\[ *[0-9.]+ s\] (.+)", line) for line in ran.err.splitlines()]
    said = [line[1] for line in lines if line]
    assert len(said) == len(lines) and said[0] == "loading both models"
    first = next(number for number, text in enumerate(said) if text.startswith("first look, "))
    assert re.match(r"first look, [1-8] answer tokens of the target: KL \d+\.\d\d nats a token, overlap", said[first])
    parts = ["first look", "all prompts", "exact decoding: ", "timing both models"]
    order = [next(number for number, text in enumerate(said) if text.startswith(part)) for part in parts]
    assert order == sorted(order)
    for part, most in (("target", 24), ("exact", 24), ("smc", 24)):
        assert any(re.fullmatch(rf"{part}: \d+ tokens of at most {most}", text) for text in said)
    assert json.loads(ran.out)["probe"]["tokens_a_round"] > 1


def test_seconds_bound_a_probe(smcserve, brief, monkeypatch):
    """Parts are cut, or left out, and the others are as they would be: the answers' first tokens are the same."""
    monkeypatch.setattr(probe, "SHARES", dict.fromkeys(probe.SHARES, 0.0))
    ran = smcserve("check", "--probe", "--seconds", 10, "--temperature", 2)
    assert ran.code == 0 and "accepted by depth: not measured, there was no time" in ran.out
    assert "SMC: not measured, there was no time" in ran.out and "exact unknown, smc unknown" in ran.out
    assert "Use method" not in ran.out and "timing both models" not in ran.err
    positions = int(re.search(r"probe: (\d+) answer tokens", ran.out)[1])
    assert 0 < positions <= 8
    assert "allowed with --probe: at least 10" in smcserve("check", "--probe", "--seconds", 1).err
    monkeypatch.setattr(probe, "SHARES", {"target": 0.0, "exact": 1.0, "smc": 1.0})
    found = json.loads(smcserve("check", "--probe", "--seconds", 59, "--json").out)["probe"]
    assert found["exact_speed"] is None and found["tokens_a_round"] > 1 and found["log_evidence"] is not None


@pytest.mark.slow
def test_a_probe_of_a_draft_that_does_not_know_the_text(smcserve, brief, mismatched):
    ran = smcserve("check", "--probe", "--target", demo.TARGET, "--draft", mismatched)
    assert ran.code == 0 and "Use method=target: the draft does not know this text" in ran.out
    assert "method=smc: 8 particles are too few for this draft and text" in ran.out


def test_generate_says_that_the_draft_does_not_know_the_text(smcserve, brief, mismatched):
    pair = ("--target", demo.TARGET, "--draft", mismatched, "--max-tokens", 24, "--seed", 1)
    ran = smcserve("generate", *pair, "--method", "smc", "Mia has 12 apples.")
    assert "warning: 8 particles are too few for this draft and text" in ran.err and "--method exact" in ran.err
    ran = smcserve("generate", "--method", "smc", "--seed", 1, "Mia has 12 apples. She buys 30 more. How many now?")
    assert "warning" not in ran.err


def test_words_about_an_answer():
    def exact(accepted: float, rounds: int, alone: int = 0) -> str | None:
        statistics = Statistics(8, rounds=rounds, alone_rounds=alone, accepted_per_round=1 + accepted)
        return fit_of_answer(SamplingParams(method="exact"), statistics, 40)

    assert "0.10 drafted tokens are accepted a round; --method target is as fast" in (exact(0.1, 10) or "")
    assert exact(0.3, 10) is None and exact(0.0, 3) is None and exact(0.0, 10, alone=8) is None
    smc = [
        fit_of_answer(SamplingParams(method="smc"), Statistics(8, rounds=5, log_z=log_z), 20) for log_z in (-20.0, -1.0)
    ]
    assert smc[0] is not None and "log Z is -1.00 a token" in smc[0] and smc[1] is None
    assert fit_of_answer(SamplingParams(method="target"), Statistics(1, rounds=20), 20) is None


@pytest.mark.parametrize("option", [("--particles", 4), ("--temperature", 0.5), ("--threads", 1), ("--seconds", 20)])
def test_options_of_a_probe_have_no_effect_without_it(smcserve, option):
    ran = smcserve("check", *option)
    assert ran.code == 2 and "have no effect without --probe" in ran.err
    assert "allowed with --probe: above 0" in smcserve("check", "--probe", "--temperature", 0).err


def test_quantisation_and_memory_of_ranks(smcserve, tmp_path):
    """Each rank holds its share of what is split and all of what is not; int4 counts the codes and their scales."""
    shape = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 128, "vocab_size": 304}
    for role in ("target", "draft"):
        save_byte_level(save_tiny(tmp_path / role, head_dim=32, **shape))
    to_int4(tmp_path / "target", "awq", 32, symmetric=False)
    ran = smcserve("check", "--target", tmp_path / "target", "--draft", tmp_path / "draft", "--json")
    target, draft = (json.loads(ran.out)[role] for role in ("target", "draft"))
    assert (target["weights"], target["gpu_dtype"]) == ("AWQ int4, groups of 32, zero points", "int4")
    assert (draft["weights"], draft["gpu_dtype"]) == ("float32", "bfloat16")
    for role, dtype in (("target", INT4), ("draft", torch.bfloat16)):
        for degree in (1, 2, 3, 4):
            model = load_model(tmp_path / role, dtype=dtype, shard=Shard(0, degree), reduce=Tensor.clone)
            held = sum(weight.nbytes for weight in model.parameters())
            report = json.loads(ran.out)[role]
            assert report["rank_bytes"][str(degree)] == held
            assert report["rank_token_bytes"][str(degree)] == KVPool.page_bytes(model.config, torch.bfloat16)
    assert target["rank_bytes"].keys() == {"1", "2", "3", "4"}
    assert target["rank_heads"]["3"] == [[2, 2], [1, 1], [1, 1]] and target["rank_heads"]["4"] == [[1, 1]] * 4
    shown = smcserve("check", "--target", tmp_path / "target", "--draft", tmp_path / "draft").out
    assert "a rank of 6" in shown and "no split" in shown and "AWQ int4" in shown
    assert "heads 1-2 / 1-2" in shown


class CutClock(probe.ProbeClock):
    """A clock by which a part begins in time, and its time has passed when it has begun."""

    def __init__(self, cut: str) -> None:
        super().__init__(3600.0)
        self._cut, self._has_begun = cut, False

    def over(self, part: str) -> bool:
        was, self._has_begun = self._has_begun, self._has_begun or part == self._cut
        return part == self._cut and was

    def left_of(self, part: str) -> float | None:
        return 1e-3 if part == self._cut else 3600.0


@pytest.mark.parametrize("part", ["exact", "smc"])
def test_a_part_that_was_cut_before_it_measured_anything_is_left_out(brief, part):
    """Nothing is said about a method from no round of it, and a part does not go on until it has tokens to show."""
    pair = ModelPair.load(demo.TARGET, demo.DRAFT)
    prompts = [pair.tokenizer.chat([{"role": "user", "content": text}]) for text in ("1 + 1?", "2 + 2?")]
    found = probe.probe_pair(pair, prompts, lambda: None, clock=CutClock(part))
    (words,) = found.recommendation
    if part == "exact":
        assert found.tokens_a_round is None and found.accepted_by_depth == () and words.startswith("method=smc")
    else:
        assert found.log_evidence is None and words.startswith("method=exact")
