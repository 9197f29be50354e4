"""What rounds miss is counted, and from the counts the miss rates, the gain of rows, and the tokens of a round are
forecast. `test_tree_policy.py` has what is chosen by them."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter

import numpy as np
import pytest

from smc.scheduler.decode import MEMORY
from smc.scheduler.methods import TreeFacts
from smc.scheduler.speculation import (
    BLOCK,
    FALLS,
    PRIOR_MISS_RATE,
    ROWS_FALLS,
    WIDTH_GAIN,
    Acceptance,
    Miss,
    MissRates,
    tokens_a_round,
)


def test_depths_that_are_no_use_are_learnt_one_by_one():
    """Miss rates are estimated for each depth."""
    rng, acceptance = random.Random(4), Acceptance(0.999)
    found = (0.1, 0.5, 0.9)
    for _ in range(4000):
        rows = rng.choice((1, 4))
        first = next((i for i, rate in enumerate(found) if rng.random() < rate / rows**WIDTH_GAIN), 3)
        acceptance.count(min(first + 1, 3), first < 3, rows)
    assert acceptance.rates(False).token == pytest.approx(found, rel=0.15)
    deep = Acceptance(0.9)
    for _ in range(100):
        deep.count(1, True, 1)
    (first,) = deep.rates(False).token
    assert first == pytest.approx(0.72, abs=0.05)


def test_miss_rates_are_estimated_for_any_tree_size():
    """A miss rate of 0.2 is estimated from rounds of trees of 1 to 8 rows."""
    rng, acceptance = random.Random(2), Acceptance(0.999)
    assert acceptance.rates(False).token == (PRIOR_MISS_RATE,)
    for _ in range(4000):
        rows = rng.choice((1, 2, 8))
        first = next((i for i in range(6) if rng.random() < 0.2 / rows**WIDTH_GAIN), 6)
        acceptance.count(min(first + 1, 6), first < 6, rows)
    assert acceptance.rates(False).token == pytest.approx([0.2] * 6, rel=0.2)


def test_rates_of_outcomes_are_estimated_for_any_tree_and_block():
    rng, falls, acceptance = random.Random(3), FALLS[True], Acceptance(0.999)
    given = {Miss.RESTART: 0.5, Miss.WHOLE: 0.1, Miss.PART: 0.8}
    for _ in range(9000):
        kind, rows, branches = rng.choice(list(given)), rng.choice((1, 4)), rng.choice((1, 2, 8))
        block = BLOCK if kind is Miss.RESTART else rng.choice((2, 4, 7))
        missed = rng.random() < given[kind] * falls[kind].share(WIDTH_GAIN, rows, branches, block)
        acceptance.count(0, False, rows, branches, block, outcome=(kind, missed))
    found = acceptance.rates(True)
    assert {kind: getattr(found, kind) for kind in given} == pytest.approx(given, rel=0.15)


@pytest.mark.parametrize("ahead", [False, True])
def test_equal_rounds_of_many_requests_are_counted_together(ahead):
    """64 requests a round: the rates are those of counting each round by itself, up to the order of the rounds."""
    rng, one_by_one, together = random.Random(5), Acceptance(MEMORY), Acceptance(MEMORY)
    for _ in range(60):
        counter = Counter[TreeFacts]()
        for _ in range(64):
            hit, restarts = rng.random() < 0.6, ahead and rng.random() < 0.2
            confirmed = 1 if restarts else next((i for i in range(1, 4) if rng.random() < 0.3), 4)
            facts = TreeFacts(confirmed, 2, hit, restarts, False, 3, 4 if ahead else 1, ahead)
            facts.add_to(one_by_one)
            counter[facts] += 1
        for facts, times in counter.items():
            facts.add_to(together, times)
    found, expected = together.rates(ahead), one_by_one.rates(ahead)
    assert found.token == pytest.approx(expected.token, rel=0.1)
    for kind in ("restart", "whole", "part"):
        assert getattr(found, kind) == pytest.approx(getattr(expected, kind), rel=0.1)


def test_a_request_is_easier_or_harder_than_all_others():
    """A request's rates are those of all requests times a factor for tokens, and one for outcomes: few rounds tell."""
    known, asked = MissRates((0.1, 0.3, 0.2), 0.1, 0.05, 0.6), Acceptance(0.97)
    assert asked.rates_among(known, True) == known
    for number in range(60):
        asked.count(2, number % 5 == 0, 1)
        asked.count_outcome(Miss.PART, number % 10 < 9, 1, 1)
    found = asked.rates_among(known, True)
    # Of two tokens, .4 were expected to be missing and .2 were.
    ratio = found.token[0] / 0.1
    assert 0.45 < ratio < 0.75 and found.token == pytest.approx([ratio * rate for rate in known.token])
    more = found.part / 0.6
    assert 1.2 < more < 1.5 and found.whole == pytest.approx(0.05 * more)


def ranked(first: float, wide: float, draws: int = 4000, memory: float = 0.999, seed: int = 2) -> Acceptance:
    """Acceptance counts after `draws` draws: `first` is the share that was not the draft's first choice, `wide` the
    share that was not among its first four."""
    rng, acceptance = random.Random(seed), Acceptance(memory)
    for _ in range(draws):
        draw = rng.random()
        acceptance.count_rank(4 if draw < wide else 1 if draw < first else 0)
    return acceptance


def test_what_more_rows_bring_is_learnt_from_ranks():
    assert Acceptance(0.9).gain() == pytest.approx(WIDTH_GAIN)
    real = ranked(0.57, 0.27)
    assert real.gain() == pytest.approx(math.log(0.57 / 0.27) / math.log(8), abs=0.03)
    # Trees of eight rows miss .27 of the tokens: so one row is known to miss more without having been tried.
    for number in range(1000):
        real.count(1, number % 100 < 27, 8)
    assert real.rates(False).token[0] == pytest.approx(0.27 * 8 ** (ROWS_FALLS.rows * real.gain()), abs=0.03)
    assert ranked(0.5, 0.5).gain() == pytest.approx(0.0, abs=0.02)
    real.fade(0.0)
    assert real.gain() == pytest.approx(WIDTH_GAIN)


def test_few_rounds_do_not_decide_what_more_rows_bring():
    """A good draft: one draw in a hundred is none of its first four tokens, which are three of the last 333 rounds. In
    30 times 30 gains the standard deviations are 0.05 to 0.07; if ranks are forgotten like rounds, 0.10 to 0.17."""
    gains = [ranked(0.1, 0.01, 6000, MEMORY, seed).gain() for seed in range(30)]
    assert statistics.mean(gains) == pytest.approx(math.log(10) / math.log(8), abs=0.06)
    assert statistics.stdev(gains) < 0.08


@pytest.mark.parametrize(("lookahead", "redrafted"), [(True, 0), (True, 1), (True, 3), (False, 0)])
def test_tokens_a_round_are_those_of_the_chain_of_hits_and_misses(lookahead, redrafted):
    """Compared with a simulation of 10,000 dependent rounds: the formula must be within ten standard errors of as many
    independent rounds."""
    rng, falls = np.random.default_rng(1), FALLS[lookahead]
    for token, part, rows, branches, block in ((0.3, 0.9, 1, 1, 5), (0.3, 0.5, 4, 2, 5), (2.0, 0.7, 8, 4, 3)):
        given = MissRates((token,), restart=0.4, whole=0.2, part=part, again=(0.5,))
        rates = dict(zip(Miss, (token, 0.5, 0.4, 0.2, part)))

        def missed(miss: Miss, size: int) -> float:
            return min(rates[miss] * falls[miss].share(given.gain, rows, branches, size), 1.0)  # noqa: B023

        found, after_miss = [], []
        restarts = False
        for _ in range(10_000):
            of_round, size = (Miss.AGAIN, redrafted + 1) if restarts else (Miss.TOKEN, block)
            right = rng.random(size) > missed(of_round, size)
            accepted = size if right.all() else int(right.argmin())
            if not lookahead:
                found.append(accepted + 1)
                continue
            confirmed = min(accepted + 1, size)
            kind = Miss.RESTART if size == 1 else Miss.WHOLE if confirmed == size else Miss.PART
            after_miss.append(restarts)
            restarts = bool(rng.random() < missed(kind, size))
            found.append(confirmed)
        forecast = tokens_a_round([given], np.array([[rows]]), branches, block, lookahead, (redrafted,))
        assert forecast.tokens[0, 0, -1, 0] == pytest.approx(np.mean(found), abs=5 * np.std(found) / 50 + 1e-3)
        if lookahead:
            assert forecast.restarts[0, 0, -1, 0] == pytest.approx(np.mean(after_miss), abs=0.05)
