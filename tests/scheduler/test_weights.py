"""With one particle, Z-hat is exactly the product of p/q over the drafted tokens that are part of the answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from smc.api.engine_config import EngineConfig
from smc.api.request import FinishReason, Request
from smc.api.sampling_params import SamplingParams
from smc.local_engine import local_engine
from smc.stops import START, StopMachine, StopTables, TokenBytes, grow
from tests.pairwise import one_of
from tests.scheduler.harness import PaddingOps, answers, config_id
from tests.scheduler.pairs import LETTERS, next_log_probs, tiny_pair

PROMPT = (2, 1)
EOS = 3


def log_weight(tokens: tuple[int, ...], counted) -> float:
    pair, total = tiny_pair(), 0.0
    for i, token in enumerate(tokens):
        if counted(i):
            past = (*PROMPT, *tokens[:i])
            total += (next_log_probs(pair.target, past)[token] - next_log_probs(pair.draft, past)[token]).item()
    return total


@pytest.mark.parametrize(
    ("form", "block"),
    [("lockstep", 1), ("lookahead", 2), ("lockstep", 3), ("lookahead", 5)],
)
def test_only_existing_drafted_tokens_count(form, block):
    """Every `max_tokens` from 1 to 9: EOS before, at and after the limit, both in one block, and blocks that end
    exactly at the limit."""
    engine = local_engine(
        tiny_pair(), EngineConfig(form=form, block=block, branches=1 if form == "lookahead" else None)
    )
    requests = [
        Request(
            f"{cap}-{seed}",
            PROMPT,
            SamplingParams(method="smc", particles=1, ess_threshold=0, seed=seed, max_tokens=cap),
        )
        for cap in range(1, 10)
        for seed in range(4)
    ]
    found = answers(engine, requests)
    reasons = set()
    for r in requests:
        a = found[r.request_id]
        reasons.add((a.finish_reason, len(a.tokens) == r.params.max_tokens))
        assert EOS not in a.tokens[:-1], "a token after EOS"
        assert len(a.tokens) <= r.params.max_tokens
        assert (a.finish_reason is FinishReason.EOS) == (a.tokens[-1] == EOS)
        # The first token and, in lockstep, every bonus token are the target's own and carry no weight.
        drafted = (lambda i: i % (block + 1) != 0) if form == "lockstep" else (lambda i: i > 0)
        assert a.statistics.log_z == pytest.approx(log_weight(a.tokens, drafted), abs=2e-4)
    assert reasons == {(FinishReason.EOS, True), (FinishReason.EOS, False), (FinishReason.LENGTH, True)}


@pytest.mark.parametrize(("form", "block"), one_of(("lockstep", 5), ("lookahead", 5), ("lookahead", 1)))
def test_nothing_counts_after_a_stop_string(form, block):
    """Stop strings that end at any token of a block, in the first token, across blocks, and one inside another."""
    engine = local_engine(
        tiny_pair(), EngineConfig(form=form, block=block, branches=1 if form == "lookahead" else None)
    )
    settings = {"method": "smc", "particles": 1, "ess_threshold": 0, "max_tokens": 14, "ignore_eos": True}
    stops = [("b",), ("ab", "cab"), ("aa", "bacb"), ("acca",)]
    requests = [
        Request(f"{i}-{s}", PROMPT, SamplingParams(seed=s, stop=stop, **settings))
        for i, stop in enumerate(stops)
        for s in range(12)
    ]
    found, reasons = answers(engine, requests), set()
    for r in requests:
        a = found[r.request_id]
        text = "".join(LETTERS[t] if t != EOS else "" for t in a.tokens)
        complete = [n for n in range(len(text) + 1) if text[:n].endswith(r.params.stop)]
        reasons.add(a.finish_reason)
        if a.finish_reason is FinishReason.STOP_STRING:
            assert complete == [len(text)] and a.tokens[-1] != EOS, "it ends where the first string does"
            assert text.endswith(a.matched) and a.text == text.removesuffix(a.matched)
        else:
            assert not complete and len(a.tokens) == 14
        drafted = (lambda i: i % (block + 1) != 0) if form == "lockstep" else (lambda i: i > 0)
        assert a.statistics.log_z == pytest.approx(log_weight(a.tokens, drafted), abs=2e-4)
    assert reasons == {FinishReason.STOP_STRING, FinishReason.LENGTH}


@pytest.mark.parametrize(
    "tokens,room,length,ended",
    [
        ([0, 1, 2, 0], 9, 4, False),
        ([0, EOS, 2, 0], 9, 2, True),
        ([0, 1, 2, EOS], 9, 4, True),
        ([EOS, EOS, EOS, EOS], 9, 1, True),
        ([0, 1, 2, 0], 3, 3, True),
        ([0, 1, 2, 0], 4, 4, True),
        ([0, 1, EOS, 0], 3, 3, True),
        ([0, EOS, 2, 0], 3, 2, True),
        ([0, 1, 2, EOS], 3, 3, True),
        ([0, 1, 2, 0], 1, 1, True),
    ],
)
def test_end_of_a_block(tokens, room, length, ended):
    """EOS and the limit within a block of four tokens: whichever comes first ends the answer, and no token follows
    it."""
    tables = StopTables.allocate(2, 4, TokenBytes.of(tiny_pair().tokenizer), torch.device("cpu"))
    tables.set(1, StopMachine.of([EOS], []))
    one = torch.ones(1, dtype=torch.int64)
    growth = grow(tables, one, one * START, torch.tensor([tokens]), torch.tensor([room]))
    assert growth.count_A.tolist() == [length] and growth.ends_A.tolist() == [ended]


@pytest.mark.parametrize(
    "config",
    [EngineConfig(form="lockstep", block=3), EngineConfig(form="lookahead", block=3, branches=2)],
    ids=config_id,
)
def test_ignore_eos_runs_to_the_cap(config):
    requests = [
        Request(str(s), PROMPT, SamplingParams(method="smc", particles=2, seed=s, max_tokens=7, ignore_eos=True))
        for s in range(20)
    ]
    found = answers(local_engine(tiny_pair(), config), requests)
    assert all(len(a.tokens) == 7 and a.finish_reason is FinishReason.LENGTH for a in found.values())
    assert any(EOS in a.tokens for a in found.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [EngineConfig(block=8, branches=4, max_context=24)],
    ids=config_id,
)
def test_answers_that_fill_the_context(config, monkeypatch):
    """Prompt and answer together fill the context exactly, with a last block of any size, and rounds requested
    ahead."""
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: PaddingOps())
    engine = local_engine(tiny_pair(), config)
    for cap in (1, 2, 4, 5, 8, 9, 12, 16, 17, 23):
        asked = Request(
            "r",
            (0, 1, 2) * 7 + (0, 1, 2),
            SamplingParams(method="smc", particles=2, seed=cap, max_tokens=cap, ignore_eos=True),
        )
        asked = replace(asked, prompt=asked.prompt[: 24 - cap])
        assert len(answers(engine, [asked])["r"].tokens) == cap
