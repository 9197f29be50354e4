"""Coupled drafting in whole engines (`smc.algorithm.coupling`): a draft equal to its target is always right, additional
rows do not lower the number of confirmed tokens, and the exponent adapts to the pair."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from smc import demo
from smc.api.engine_config import EngineConfig
from smc.demo.problems import generate
from smc.local_engine import ModelPair, local_engine
from smc.scheduler.speculation import WIDE_TOKENS, Acceptance
from tests.pairwise import one_of
from tests.scheduler.harness import answers, request
from tests.scheduler.pairs import tiny_pair

FORMS = {
    "lockstep": EngineConfig(form="lockstep", block=4, drafting="always"),
    "one branch": EngineConfig(block=4, branches=1, drafting="always"),
    "four branches": EngineConfig(block=4, branches=4, drafting="always"),
}
TOKENS = 30


@pytest.fixture(scope="module")
def shipped() -> ModelPair:
    return ModelPair.load(demo.TARGET, demo.DRAFT)


def counted_ranks(monkeypatch) -> list[float]:
    """Return a list of the ranks that the draft gives to the target's tokens, which grows as they are counted."""
    ranks, count_rank = [], Acceptance.count_rank
    monkeypatch.setattr(Acceptance, "count_rank", lambda *given: [ranks.append(given[1]), count_rank(*given)])
    return ranks


def misses(ranks: list[float], tokens: int) -> int:
    """Return how often the target's token is none of the draft's first ones."""
    return sum(rank >= tokens for rank in ranks)


@pytest.mark.parametrize(
    ("form", "temperature"),
    [
        *(("lockstep", 0.0), ("four branches", 1.0)),
        *one_of(("one branch", 0.0), ("lockstep", 1.0)),
    ],
)
def test_a_draft_that_is_the_target_is_always_right(form, temperature, monkeypatch):
    """Every round confirms as much as it can: K + 1 tokens in lockstep, K in look-ahead. With noise (temperature > 0)
    the exponent starts above 1, so a few rounds may miss."""
    config, pair = FORMS[form], tiny_pair()
    pair = replace(pair, draft=pair.target)
    ranks = counted_ranks(monkeypatch)
    engine = local_engine(pair, config)
    sizes = (1, 2, 8)
    requests = [
        request(
            [2, 1, 0],
            f"{n} {seed}",
            method="exact",
            particles=n,
            temperature=temperature,
            seed=seed,
            max_tokens=TOKENS,
            ignore_eos=True,
        )
        for n in sizes
        for seed in range(2)
    ]
    found = answers(engine, requests)
    # The target's token is also the draft's first choice: always at temperature 0, nearly always otherwise.
    assert len(ranks) > 2 and misses(ranks, 1) <= 8 * temperature and not misses(ranks, WIDE_TOKENS)
    for n in sizes:
        for seed in range(2):
            statistics = found[f"{n} {seed}"].statistics
            slack, least = 4 * (temperature > 0), (TOKENS - 1) / (config.block + (not config.lookahead))
            assert statistics.misses <= slack and statistics.rounds <= math.ceil(least) + config.lookahead + slack


@pytest.mark.slow
@pytest.mark.parametrize("form", ["four branches"])
def test_more_rows_confirm_no_fewer_tokens(form, shipped):
    """On average over several prompts, at temperature 0, where no noise tells the draft which token the target will
    draw."""
    pair, config = shipped, FORMS[form]
    prompts = [pair.tokenizer.encode(problem.question) for problem in generate(3, 4, "test")]
    requests = [
        request(prompt, f"{i} {n}", method="exact", particles=n, temperature=0.0, max_tokens=18)
        for i, prompt in enumerate(prompts)
        for n in (1, 2, 8)
    ]
    found = answers(local_engine(pair, config), requests)
    means = []
    for n in (1, 2, 8):
        of_n = [found[f"{i} {n}"] for i in range(len(prompts))]
        means.append(sum(len(one.tokens) - 1 for one in of_n) / sum(one.statistics.rounds for one in of_n))
    assert means == sorted(means) and means[-1] > means[0] + 0.1


@pytest.mark.slow
def test_the_exponent_follows_the_pair(shipped, monkeypatch):
    """The shipped draft is less certain than its target, at temperature 2 far less, so the exponent rises above 1."""
    pair, ranks = shipped, counted_ranks(monkeypatch)
    engine = local_engine(pair, FORMS["lockstep"])
    prompts = [pair.tokenizer.encode(problem.question) for problem in generate(4, 5, "test")]
    requests = [
        request(prompt, f"{i}", method="exact", particles=4, temperature=2.0, seed=i, max_tokens=25)
        for i, prompt in enumerate(prompts)
    ]
    found = answers(engine, requests)
    assert found["4"].statistics.draft_exponent > 1.3
    assert misses(ranks, 1) > misses(ranks, WIDE_TOKENS) > 0
    assert answers(engine, [request(prompts[0], method="target", max_tokens=2)])["r"].statistics.draft_exponent == 0
