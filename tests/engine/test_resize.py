"""Populations that become smaller or larger on the way are still properly weighted."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from smc.engine.engine import Engine
from smc.engine.group import Group
from smc.engine.local import local_engine
from smc.engine.request import Answer
from smc.engine.starts import shrink_saved
from smc.runtime.config import EngineConfig
from smc.runtime.sides import Parts
from tests.engine.harness import FORMS, Padding, assert_empty, config_id, request, running
from tests.engine.lives import pair
from tests.engine.pairs import exact_law, tiny_pair

PROMPT, LENGTH, EOS = (0, 1, 2), 6, 3
MANY, FEW = 6, 2
COUNT = 1500
FORM = {
    "lockstep": EngineConfig(form="lockstep", block=1, max_slots=1536),
    "lookahead": EngineConfig(block=1, branches=2, max_slots=1536),
}


def down(engine: Engine, group: Group) -> None:
    if group.rounds == 1 and group.count == MANY:
        engine.resize(group.id, FEW)


def up(engine: Engine, group: Group) -> None:
    if group.rounds == 0 and group.count == MANY:
        engine.resize(group.id, FEW)
    if group.rounds and group.count == FEW and group.wanted is None:
        engine.resize(group.id, MANY - 1)


def saved(engine: Engine, group: Group) -> None:
    if group.rounds == 1 and group.count == MANY:
        engine._preempt(group)
        shrink_saved(group, FEW)


def resized(form: str, change: Callable[[Engine, Group], None], ahead: bool, monkeypatch) -> list[Answer]:
    if ahead:
        monkeypatch.setattr("smc.engine.local.parts_for", lambda _device: Parts(stages=Padding))
    engine, found = local_engine(tiny_pair(), FORM[form]), []
    for seed in range(COUNT):
        law = {"ess_threshold": 0.3, "resampling": ("systematic", "multinomial", "ssp")[seed % 3]}
        engine.submit(request(PROMPT, str(seed), particles=MANY, min_particles=FEW, seed=seed, max_tokens=LENGTH, **law))
    while not engine.idle:
        found += [output.answer for output in engine.step() if output.answer]
        for group in running(engine):
            if group.wanted is None:
                change(engine, group)
    assert_empty(engine)
    return found


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("change", [down, up, saved])
@pytest.mark.parametrize("form", FORM)
def test_evidence_is_unbiased(form, change, ahead, monkeypatch):
    """E[Z-hat] = 1, and weighted by it the answer that is drawn has the target's law: here the mass of answers that end early, and by
    their second token. Twelve cases of three means at 4.5 standard errors: one false alarm in about 4,000 choices of seeds."""
    law = exact_law(tiny_pair().target, PROMPT, LENGTH, EOS)
    found = resized(form, change, ahead, monkeypatch)
    left = {a.statistics.particles_left for a in found}
    assert left == ({FEW, MANY - 1} if change is up else {FEW, MANY})
    for holds in (lambda tokens: True, lambda tokens: len(tokens) < LENGTH, lambda tokens: tokens[1:2] == (1,)):
        values = [math.exp(a.statistics.log_z) * holds(a.tokens) for a in found]
        mean = sum(values) / COUNT
        error = (sum((x - mean) ** 2 for x in values) / COUNT**2) ** 0.5
        assert abs(mean - sum(p for tokens, p in law.items() if holds(tokens))) < 4.5 * error
        assert error < 0.05, "the test has no power"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("config", FORMS, ids=config_id)
def test_the_next_round_has_the_particles_that_were_asked_for(config, ahead, monkeypatch):
    """From then on the models run as many, slots that are no longer needed are free, and of those that are only wanted none is answered."""
    if ahead:
        monkeypatch.setattr("smc.engine.local.parts_for", lambda _device: Parts(stages=Padding))
    engine = local_engine(pair(), config)
    engine.submit(request(particles=8, min_particles=2, seed=1, max_tokens=110, ignore_eos=True))
    while not running(engine) or not running(engine)[0].rounds:
        engine.step()
    (group,), particles = running(engine), []
    for wanted in (3, 3, 7, 2, 8):
        engine.resize("r", wanted)
        for _ in range(3):
            engine.step()
        alive_S = engine.pair.sides["target"]._scorer.alive_S
        particles.append((group.count, len(group.slots), int(alive_S[group.slots].sum()), engine.config.max_slots - engine.slots.num_free))
        assert len(set(group.particles.tolist())) == len(group.slots)
    assert particles == [(n, n, n, n) for n in (3, 3, 7, 2, 8)]
    engine.resize("r", 4)
    assert engine.abort("r")
    engine.step()
    assert_empty(engine)


@pytest.mark.parametrize("end", ["preempted", "cut off"])
def test_particles_that_are_wanted_are_none_yet(end, monkeypatch):
    """Between the word that there shall be more and the round that makes them, only those that exist are saved or answered."""
    now = [0.0]
    engine = local_engine(tiny_pair(), FORMS[0], clock=lambda: now[0])
    engine.submit(request(particles=6, min_particles=2, seed=1, max_tokens=30, ignore_eos=True, time_budget=1.0))
    for _ in range(3):
        engine.step()
    engine.resize("r", 2)
    engine.step()
    (group,) = running(engine)
    weights = engine.slots.logw_S[group.slots].copy()
    engine.resize("r", 6)
    if end == "preempted":
        engine._preempt(group)
        assert group.saved["logw_S"].tolist() == weights.tolist() and len(group.particles) == group.count == 2
    before = group.log_z
    now[0] = 2.0
    answer = engine.step()[-1].answer
    assert answer.statistics.log_z == pytest.approx(before + math.log(sum(math.exp(w) for w in weights) / 2))
    assert answer.statistics.particles_left == 2
    assert_empty(engine)
