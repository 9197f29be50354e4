"""Populations that shrink or grow while they run remain properly weighted."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, FinishReason
from smc.api.sampling_params import POPULATIONS
from smc.local_engine import local_engine
from smc.scheduler.engine import Engine
from smc.scheduler.sequence_group import RequestState, SequenceGroup
from tests.pairwise import few
from tests.scheduler.harness import CASES, FORMS, PaddingOps, assert_empty, config_id, request, running
from tests.scheduler.pairs import exact_law, tiny_pair
from tests.scheduler.random_histories import pair

PROMPT, LENGTH, EOS = (0, 1, 2), 6, 3
MANY, FEW = 6, 2
COUNT = 180
FORM = {
    "lockstep": EngineConfig(form="lockstep", block=1, max_slots=1536, pages=40_000),
    "lookahead": EngineConfig(block=1, branches=2, max_slots=1536, pages=40_000),
}


def _name(value: object) -> str:
    return config_id(value) if isinstance(value, EngineConfig) else str(value)


def down(engine: Engine, group: SequenceGroup) -> None:
    if group.rounds == 1 and group.count == MANY:
        engine.resize(group.id, FEW)


def up(engine: Engine, group: SequenceGroup) -> None:
    if group.rounds == 0 and group.count == MANY:
        engine.resize(group.id, FEW)
    if group.rounds and group.count == FEW and group.next_rows is None:
        engine.resize(group.id, MANY - 1)


def evidence(group: SequenceGroup) -> float:
    """log Z-hat of a preempted request."""
    return group.log_z + group.rules.log_z(group.checkpoint["logw_S"], group.count)


def saved(engine: Engine, group: SequenceGroup) -> None:
    if group.rounds == 1 and group.count == MANY:
        engine.registry.preempt(group)
        before = evidence(group)
        group.shrink_checkpoint(FEW)
        if group.params.population == "independent":
            assert evidence(group) == pytest.approx(before), "what is drawn loses none of the evidence"


def resized(form: str, change: Callable[[Engine, SequenceGroup], None], ahead: bool, monkeypatch) -> list[Answer]:
    if ahead:
        monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: PaddingOps())
    engine, found = local_engine(tiny_pair(), FORM[form]), []
    for seed in range(COUNT):
        # Every fourth request has a distinct population.
        law = (
            {"ess_threshold": 0.3, "resampling": ("systematic", "multinomial", "ssp")[seed % 4]} if seed % 4 < 3 else {}
        )
        engine.submit(
            request(PROMPT, str(seed), particles=MANY, min_particles=FEW, seed=seed, max_tokens=LENGTH, **law)
        )
    while not engine.idle:
        found += [output.answer for output in engine.step() if output.answer]
        for group in running(engine):
            if group.next_rows is None:
                change(engine, group)
    assert_empty(engine)
    return found


@pytest.mark.parametrize(
    ("form", "change", "ahead"),
    [
        ("lockstep", up, True),
        *(
            pytest.param(form, change, ahead, marks=pytest.mark.slow)
            for form, change, ahead in (("lookahead", saved, True), ("lookahead", down, False))
        ),
    ],
)
def test_evidence_is_unbiased(form, change, ahead, monkeypatch):
    """E[Z-hat] = 1; and answers weighted by Z-hat follow the target's distribution: checked for the probability that an
    answer ends early, and that its second token is 1. Three cases of three means at 4.5 standard errors: one false
    alarm in about 16,000 choices of seeds."""
    law = exact_law(tiny_pair().target, PROMPT, LENGTH, EOS)
    found = resized(form, change, ahead, monkeypatch)
    left = {a.statistics.particles_left for a in found}
    assert {FEW} < left <= {FEW, MANY - 1} if change is up else {FEW} <= left <= {FEW, MANY}
    for holds in (lambda tokens: True, lambda tokens: len(tokens) < LENGTH, lambda tokens: tokens[1:2] == (1,)):
        values = [math.exp(a.statistics.log_z) * holds(a.tokens) for a in found]
        mean = sum(values) / COUNT
        error = (sum((x - mean) ** 2 for x in values) / COUNT**2) ** 0.5
        assert abs(mean - sum(p for tokens, p in law.items() if holds(tokens))) < 4.5 * error
        assert error < 0.08, "the test has no power"


@pytest.mark.parametrize(
    ("config", "population", "ahead"), few(product(CASES, POPULATIONS, (False, True)), together=1), ids=_name
)
def test_the_next_round_has_the_particles_that_were_asked_for(config, population, ahead, monkeypatch):
    """From the next round on the models run that number of particles and unneeded slots are free. An aborted request
    does not leave slots of a pending change behind."""
    if ahead:
        monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: PaddingOps())
    engine = local_engine(pair(), config)
    engine.submit(request(particles=8, population=population, min_particles=2, seed=1, max_tokens=110, ignore_eos=True))
    while not running(engine) or not running(engine)[0].rounds:
        engine.step()
    (group,), particles = running(engine), []
    for wanted in (3, 3, 7, 2, 8):
        engine.resize("r", wanted)
        for _ in range(3):
            engine.step()
        alive_S = engine.executor.runners["target"].state.alive_S
        alive = int(alive_S[group.slots].sum())
        if population == "distinct":  # particles of negligible weight are dropped
            alive = group.count if 0 < alive <= group.count else alive
        particles.append((group.count, len(group.slots), alive, engine.config.max_slots - engine.slots.num_free))
        assert len(set(group.particles.tolist())) == len(group.slots)
    assert particles == [(n, n, n, n) for n in (3, 3, 7, 2, 8)]
    engine.resize("r", 4)
    assert engine.abort("r")
    engine.step()
    assert_empty(engine)


@pytest.mark.parametrize("end", ["preempted", "cut off"])
def test_pending_particles_are_not_answered(end, monkeypatch):
    """Between the request for more particles and the round that creates them, only existing particles are saved or
    answered."""
    now = [0.0]
    engine = local_engine(tiny_pair(), FORMS[0], clock=lambda: now[0])
    engine.submit(
        request(
            particles=6,
            population="independent",
            min_particles=2,
            seed=1,
            max_tokens=30,
            ignore_eos=True,
            time_budget=1.0,
        )
    )
    for _ in range(3):
        engine.step()
    engine.resize("r", 2)
    engine.step()
    (group,) = running(engine)
    weights = engine.slots.logw_S[group.slots].copy()
    engine.resize("r", 6)
    if end == "preempted":
        engine.registry.preempt(group)
        assert group.checkpoint["logw_S"].tolist() == weights.tolist() and len(group.particles) == group.count == 2
    before = group.log_z
    now[0] = 2.0
    answer = engine.step()[-1].answer
    assert answer.statistics.log_z == pytest.approx(before + math.log(sum(math.exp(w) for w in weights) / 2))
    assert answer.statistics.particles_left == 2
    assert_empty(engine)


@pytest.mark.parametrize(("config", "ahead"), list(zip(CASES, (False, True))), ids=_name)
def test_last_pending_resize_wins(config, ahead, monkeypatch):
    """A resize requested while another is under way follows it; of several pending ones only the last is carried
    out."""
    if ahead:
        monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: PaddingOps())
    engine = local_engine(pair(), config)
    engine.submit(request(particles=8, min_particles=2, seed=1, max_tokens=110, ignore_eos=True))
    while not running(engine) or not running(engine)[0].rounds:
        engine.step()
    (group,), counts = running(engine), []
    for wishes in ((3, 7), (2, 8, 5), (4, 5)):
        for wish in wishes:
            engine.resize("r", wish)
        for _ in range(6):
            engine.step()
            counts.append(group.count)
        assert group.count == len(group.slots) == wishes[-1] and group.pending is group.next_rows is None
    assert 8 not in counts[6:], "a wish that another had replaced before its turn"
    assert engine.abort("r")
    engine.step()
    assert_empty(engine)


@pytest.mark.parametrize("when", ["before", "while it waits", "while it is computed again"])
def test_resize_survives_preemption(when):
    """A resize is carried out whether it was requested before a preemption, while the request was queued, or while it
    was resuming."""
    engine = local_engine(pair(), EngineConfig(form="lockstep", block=3, max_slots=8, prefill_chunk=8))
    engine.submit(request((0, 1, 2) * 4, particles=8, min_particles=2, seed=1, max_tokens=100, ignore_eos=True))
    while not running(engine) or not running(engine)[0].rounds:
        engine.step()
    (group,) = running(engine)
    for wish in (3, 6):
        if when == "before":
            engine.resize("r", wish)
        engine.registry.preempt(group)
        assert group.is_queued
        if when == "while it waits":
            engine.resize("r", wish)
        engine.step()
        assert group.state is RequestState.PREFILL
        if when == "while it is computed again":
            engine.resize("r", wish)
        while group.state is RequestState.PREFILL:
            engine.step()
        engine.step()
        assert group.count == wish
    engine.abort("r")
    engine.step()
    assert_empty(engine)


def test_only_running_requests_can_be_resized():
    engine = local_engine(tiny_pair(), EngineConfig(form="lockstep", block=3, max_slots=8))
    for name in ("first", "waits"):
        engine.submit(request(request_id=name, particles=8, min_particles=2, seed=1, max_tokens=40, ignore_eos=True))
    for name in ("first", "waits", "unknown"):
        with pytest.raises(ValueError, match="names no running request"):
            engine.resize(name, 4)


def test_more_particles_than_there_is_memory_for():
    """A request that is alone and finds no pages to grow is preempted, and its resize is dropped; it continues as it
    is, and ends."""
    engine = local_engine(pair(), EngineConfig(form="lockstep", block=3, pages=330))
    engine.submit(request(particles=8, min_particles=2, seed=1, max_tokens=110, ignore_eos=True, ess_threshold=0.0))
    counts, found = [], []
    while not engine.idle:
        found += [output.answer for output in engine.step() if output.answer]
        for group in running(engine):
            counts.append(group.count)
            engine.resize("r", 8 if group.rounds > 4 else 2)
        assert len(counts) < 400, "it does not come to an end"
    assert found[0].finish_reason is FinishReason.LENGTH and 2 in counts and max(counts[10:]) > 2
    assert found[0].statistics.preemptions > 0
    assert_empty(engine)
