"""Costs decide what is drafted: on made-up curves, as a pure function, and in an engine."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest

from smc.engine.acceptance import WIDTH_GAIN, Acceptance, tokens_a_round
from smc.engine.drafting import MARGIN, CostsDecide, Forecast
from smc.engine.local import local_engine
from smc.engine.policy import Beside, Tree
from smc.engine.request import Request, SamplingParams
from smc.runtime.config import EngineConfig
from tests.engine.harness import answers, assert_empty, running
from tests.engine.lives import pair

EASY, HARD, HOPELESS = 0.021, 0.07, 8.0
"""Hazards: the shipped pair at temperatures 1 and 2; a draft that is never right."""
CONFIGS = [EngineConfig(block=8, max_slots=4096), EngineConfig(form="lockstep", block=8, max_slots=4096)]


@dataclass(frozen=True)
class Made:
    """Seconds that fall below no floor: that of reading weights, about an 8B target and a 1B draft on a large GPU each."""

    round_overhead: float = 0.6e-3
    draft: tuple[float, float] = (0.9e-3, 4e-6)
    target: tuple[float, float] = (4.2e-3, 35e-6)

    def draft_step(self, rows: int) -> float:
        return self.draft[0] + self.draft[1] * max(0, rows - 64)

    def target_pass(self, positions: int) -> float:
        return self.target[0] + self.target[1] * max(0, positions - 64)


MADE, NOBODY = Made(), Beside()


def settled(config: EngineConfig, hazards: list[float], beside: Beside = NOBODY, costs: Made = MADE, rows: int = 8) -> list[int]:
    """Rows after which nothing changes any more, from `rows` each."""
    policy, now = CostsDecide(config), [rows] * len(hazards)
    for _ in range(3):
        changed = policy.change([Tree(8, hazard, count) for hazard, count in zip(hazards, now)], [], beside, costs)
        if changed is None:
            return now
        now = list(changed)
    raise AssertionError("it does not settle")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.form)
def test_one_request_has_the_whole_tree_and_a_crowd_none(config):
    found = [settled(config, [EASY] * count) for count in (1, 2, 4, 8, 16, 64, 256)]
    totals = [sum(rows) / len(rows) for rows in found]
    assert totals[0] == 8 and totals[-1] == 0 and totals == sorted(totals, reverse=True)
    assert any(0 < rows < 8 for rows in totals)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.form)
def test_what_is_hard_to_guess_is_given_up_earlier(config):
    def last(hazard: float) -> int:
        return max((count for count in (1, 2, 4, 8, 16, 32, 64, 128) if any(settled(config, [hazard] * count))), default=0)

    assert last(EASY) > last(HARD) > last(HOPELESS) == 0


def test_rows_go_to_those_who_make_most_of_them():
    rows = settled(CONFIGS[0], [EASY] * 2 + [4 * HARD] * 2)
    assert 0 < max(rows[:2]) < min(rows[2:])


def test_a_draft_that_costs_more_than_it_brings_is_not_asked():
    slow = Made(draft=(9e-3, 0.0))
    assert settled(CONFIGS[0], [EASY], costs=slow) == [0] and settled(CONFIGS[0], [EASY], costs=slow, rows=0) == [0]


def test_beside_rounds_of_the_target_alone_nothing_is_drafted():
    """They take their time anyway: one more row in them costs nothing, and brings as many tokens."""
    assert settled(CONFIGS[0], [EASY] * 2) == [8, 8]
    assert settled(CONFIGS[0], [EASY] * 2, Beside(target=4)) == [0, 0]
    assert settled(CONFIGS[0], [EASY] * 2, Beside(pair=2, pair_rows=16)) != [0, 0]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.form)
def test_no_choice_is_slower_than_plain_decoding_and_none_is_flapping(config):
    """By its own forecast, over random requests; and however estimates waver by a few per cent, it settles."""
    rng = random.Random(0)
    forecast = Forecast(config, costs := Made())
    for _ in range(30):
        hazards = [rng.choice((EASY, HARD, HOPELESS)) * rng.uniform(0.5, 2) for _ in range(rng.choice((1, 3, 10, 50, 200)))]
        beside = Beside(pair=(extra := rng.choice((0, 0, 3))), pair_rows=8 * extra, target=rng.choice((0, 0, 2)))
        rows, trees = settled(config, hazards, beside), [Tree(8, hazard) for hazard in hazards]
        speed = forecast.speed(trees, rows, beside)
        assert speed >= forecast.speed(trees, [0] * len(trees), beside)
        assert MARGIN * max(speed, 1e-9) >= forecast.speed(trees, [rng.randint(1, 8) for _ in trees], beside)
        policy, changes = CostsDecide(config), 0
        for _ in range(20):
            wavering = [Tree(8, hazard * rng.uniform(0.97, 1.03), count) for hazard, count in zip(hazards, rows)]
            if (changed := policy.change(wavering, [], beside, costs)) is not None:
                rows, changes = list(changed), changes + 1
        assert changes <= 1


def test_rows_ahead_are_drafted_where_they_cost_nothing():
    """A draft that is waited for drafts no more than it must; one that waits for the target may."""
    config = EngineConfig(block=5, branches=4, max_slots=256)
    policy, drafts_long = CostsDecide(config), Made(draft=(0.9e-3, 20e-6))
    assert [policy.branches(places, MADE) for places in (1, 8, 64)] == [4, 4, 4]
    assert [policy.branches(places, drafts_long) for places in (1, 8, 32, 64)] == [4, 4, 1, 1]
    assert policy.branches(64, None) == 4
    crowd = [Tree(8, EASY, 1)] * 32
    lean, mixed = (Forecast(config, drafts_long).speed(crowd, [1] * 32, beside) for beside in (NOBODY, Beside(pair=1, pair_rows=1)))
    assert lean > 1.1 * mixed


def test_one_that_arrives_begins_as_suits_those_that_run():
    policy, costs = CostsDecide(CONFIGS[0]), Made()
    assert policy.begin(Tree(8, EASY), [], Beside(), costs) == 8
    assert policy.begin(Tree(8, EASY), [Tree(8, EASY, 0)] * 128, Beside(), costs) == 0
    assert policy.begin(Tree(8, EASY), [Tree(8, EASY, 2)] * 16, Beside(), costs) > 0
    assert policy.begin(Tree(8, EASY), [], Beside(), None) is None and policy.change([Tree(8, EASY, 0)], [], Beside(), None) is None


def test_those_that_wait_for_slots_alone_get_them():
    """Of 16 slots, two requests may have all as long as nobody waits."""
    policy, trees, waiting = CostsDecide(EngineConfig(block=8, max_slots=16)), [Tree(8, EASY, 8)] * 2, [Tree(8, EASY)] * 14
    assert policy.change(trees, [], Beside(), MADE) is None
    assert policy.change(trees, waiting[:2], Beside(), MADE) == [4, 4]
    assert policy.change(trees, waiting, Beside(), MADE) == [1, 1]
    assert policy.change(trees, waiting, Beside(target=4, slots=4), MADE) == [0, 0]


def test_a_crowd_runs_at_once_where_each_could_have_all_slots():
    """Eight slots and twelve requests of eight rows: eight run side by side. Without costs they would run one after another."""
    engine = local_engine(pair(), EngineConfig(block=3, max_slots=8))
    engine.costs = Made(round_overhead=0.0, target=(4e-3, 5e-4))
    for i in range(12):
        engine.submit(Request(str(i), (0, 1, 2), SamplingParams(method="exact", seed=i, max_tokens=30, ignore_eos=True)))
    beside, found = [], {}
    while not engine.idle:
        found |= {output.answer.request_id: output.answer for output in engine.step() if output.answer}
        beside.append(len(running(engine)))
    assert_empty(engine)
    assert max(beside) == 8 and len(beside) < 200
    plain = [Request(name, (0, 1, 2), SamplingParams(method="target", seed=int(name), max_tokens=30, ignore_eos=True)) for name in found]
    assert all(found[name].tokens == one.tokens for name, one in answers(engine, plain).items())


@pytest.mark.parametrize("lookahead", [True, False])
def test_tokens_a_round_are_those_of_the_chain_of_hits_and_misses(lookahead):
    """Against a simulation of 10,000 rounds, which hang together: within ten standard errors of as many that do not."""
    rng, block = np.random.default_rng(1), 5
    for hazard, rows in ((0.3, 1), (0.3, 4), (2.0, 8), (0.01, 8)):
        found = []
        whole = True
        for _ in range(10_000):
            tries = block if whole or not lookahead else 1
            right = rng.random(tries) > hazard / rows**WIDTH_GAIN
            first = tries if right.all() else int(right.argmin())
            found.append(min(first + 1, tries) if lookahead else first + 1)
            whole = bool(right.all())
        (mean,) = tokens_a_round(np.array([hazard]), np.array([[rows]]), block, lookahead)[0]
        assert mean == pytest.approx(np.mean(found), abs=5 * np.std(found) / 50 + 1e-3)


def test_a_hazard_is_found_whatever_the_rows_were():
    """Of 0.2: by rounds of trees of 1 to 8 rows. It begins at what is known of others."""
    rng = random.Random(2)
    acceptance = Acceptance(0.999)
    assert acceptance.hazard(0.7) == 0.7
    for _ in range(4000):
        rows = rng.choice((1, 2, 8))
        first = next((i for i in range(6) if rng.random() < 0.2 / rows**WIDTH_GAIN), 6)
        acceptance.count(min(first + 1, 6), first < 6, rows)
    assert acceptance.hazard() == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize("form", ["lockstep", "lookahead"])
def test_an_engine_follows_its_costs(form):
    """One request has a tree. Among many the target decodes alone, and when these are gone the draft is back; answers stay the same."""
    config = EngineConfig(form=form, block=3, max_slots=256)
    engine = local_engine(pair(), config)
    # The tiny pair is often wrong: drafting is worth it where it is nearly free.
    engine.costs = Made(round_overhead=0.0, draft=(1e-5, 0.0), target=(4e-3, 5e-4))
    law = {"method": "exact", "ignore_eos": True}
    crowd = [Request(str(i), (0, 1, i % 3), SamplingParams(seed=i, max_tokens=40, **law)) for i in range(30)]
    engine.submit(Request("long", (0, 1, 2), SamplingParams(seed=99, max_tokens=120, **law)))
    found, alone, step = {}, [], 0
    while not engine.idle:
        step += 1
        for one in crowd if step == 12 else ():
            engine.submit(one)
        found |= {output.answer.request_id: output.answer for output in engine.step() if output.answer}
        alone += [group.alone for group in running(engine) if group.id == "long"]
    assert_empty(engine)
    assert not alone[0] and any(alone) and not alone[-1] and sum(one != other for one, other in pairwise(alone)) == 2
    law = {"method": "target", "max_tokens": 40, "ignore_eos": True}
    plain = [replace(one, params=SamplingParams(seed=one.params.seed, **law)) for one in crowd]
    assert all(found[name].tokens == one.tokens for name, one in answers(engine, plain).items())


def test_a_crowd_after_a_crowd_is_asked_about_at_once():
    """What was changed for others, who are gone, is nothing to wait for."""
    engine = local_engine(pair(), EngineConfig(block=3, max_slots=256))
    engine.costs = Made(round_overhead=0.0, draft=(1e-5, 0.0), target=(4e-3, 5e-4))
    for wave in range(3):
        for i in range(30):
            params = SamplingParams(method="exact", ignore_eos=True, seed=i, max_tokens=100)
            engine.submit(Request(f"{wave} {i}", (0, 1, i % 3), params))
        for _ in range(5):
            engine.step()
        assert len(running(engine)) == 30 and all(group.alone for group in running(engine)), wave
        for group in running(engine):
            engine.abort(group.id)
    engine.step()
    assert_empty(engine)
