"""Constraints that fail at run time end their own request, once, with an error of the caller; other requests go on."""

from __future__ import annotations

import re
import time

import pytest

from smc import constraint_masks, constraints, demo, mask_reader
from smc.api.constraint import Constraint, ConstraintFailed
from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, FinishReason, Request
from smc.api.sampling_params import SamplingParams
from smc.constraint_masks import check_end, check_particles
from smc.constraints import Compiler
from smc.grammar import compiler
from smc.grammar.compiler import NotCompiled
from smc.local_engine import ModelPair, local_engine
from smc.scheduler.engine import Engine
from smc.stops import TokenBytes
from tests.pairwise import one_of

METHODS = {
    "target": {"method": "target"},
    "exact": {"method": "exact", "particles": 2},
    "rejection": {"method": "exact", "particles": 2, "verification": "rejection"},
    "draft": {"method": "draft"},
    "distinct": {"method": "smc", "particles": 2},
    "independent": {"method": "smc", "particles": 2, "population": "independent"},
    "by answer": {"method": "smc", "particles": 2, "constraint_scope": "answer"},
}
FORMS = [EngineConfig(form="lockstep", block=5), EngineConfig(form="lookahead", block=5, branches=2)]
MOST = 4.0
"""How much longer the pauses of another request may be on a busy machine, in seconds. On a quiet one a round waits
about a quarter of a second for slow masks at each model."""


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return ModelPair.load(demo.TARGET, demo.DRAFT)


def asked(pair: ModelPair, name: str, **params) -> Request:
    chat = [{"role": "user", "content": "What is 9 + 30?"}]
    return Request(
        name,
        tuple(pair.tokenizer.chat(chat)),
        SamplingParams(**{"method": "smc", "seed": 1, "max_tokens": 40, **params}),
    )


def run(engine: Engine, requests: list[Request]) -> dict[str, list[Answer]]:
    """Run requests. Return the answers to each."""
    for request in requests:
        engine.submit(request)
    answers: dict[str, list[Answer]] = {}
    while not engine.idle:
        for output in engine.step():
            if output.answer is not None:
                answers.setdefault(output.request_id, []).append(output.answer)
    engine.check_books()
    return answers


def longest_gap(engine: Engine, requests: list[Request], beside: Request) -> tuple[float, dict[str, Answer]]:
    """Submit requests while another one is decoded. Return the longest time between two of its updates, and the answers
    to the requests."""
    for request in requests:
        Compiler.of(TokenBytes.of(engine.tokenizer)).check(request.params.constraint)
    engine.submit(beside)
    answers: dict[str, Answer] = {}
    last, gap, updates = time.monotonic(), 0.0, 0
    while not engine.idle:
        for output in engine.step():
            if output.request_id == beside.request_id:
                now, updates = time.monotonic(), updates + 1
                last, gap = now, max(gap, now - last)
            elif output.answer is not None:
                answers[output.request_id] = output.answer
        if updates == 3:
            for request in requests:
                engine.submit(request)
            updates += 1
    return gap, answers


SLOW = {
    "ambiguous": {"grammar": "start: e\ne: " + " | ".join(" ".join(["e"] * k) for k in range(2, 40)) + " | /[^#]/\n"},
}
FAILING = {
    "late": SLOW["ambiguous"],
}


@pytest.mark.parametrize("config", one_of(*FORMS), ids=lambda config: config.form)
@pytest.mark.parametrize("constraint", FAILING.values(), ids=FAILING)
def test_a_constraint_that_fails_ends_its_request_alone(
    pair: ModelPair, config: EngineConfig, constraint: dict, monkeypatch
):
    """By every method: once, without an answer that looks valid, and with the kind of the failure. After a quarter of
    the time that masks usually have."""
    monkeypatch.setattr(constraint_masks, "ROUND_SECONDS", constraint_masks.ROUND_SECONDS / 4)
    engine = local_engine(pair, config)
    requests = [asked(pair, name, constraint=constraint, **params) for name, params in METHODS.items()]
    beside = asked(pair, "beside", max_tokens=30, ignore_eos=True, method="exact")
    found = run(engine, [*requests, beside])
    for name in METHODS:
        (answer,) = found[name]
        assert answer.finish_reason is FinishReason.ERROR, (name, answer.text)
        assert answer.error.startswith("constraint: "), answer.error
        assert "NaN" not in answer.error
    alone = run(local_engine(pair, config), [beside])
    assert found["beside"][0].tokens == alone["beside"][0].tokens


@pytest.mark.parametrize("config", FORMS, ids=lambda config: config.form)
def test_a_wrong_end_is_an_error_in_every_method(pair: ModelPair, config: EngineConfig, monkeypatch):
    """The library is made to allow only the end of the answer, after any text."""
    write = mask_reader.MaskEnds.write

    def ended(ends: mask_reader.MaskEnds) -> None:
        ends.complete += ends.computed
        write(ends)

    monkeypatch.setattr(mask_reader.MaskEnds, "write", ended)
    engine = local_engine(pair, config)
    requests = [asked(pair, name, constraint={"regex": "[0-9]{9}"}, **params) for name, params in METHODS.items()]
    for name, (answer,) in run(engine, requests).items():
        assert answer.finish_reason is FinishReason.ERROR, (name, answer.text)
        assert answer.caller_error
        assert "where the regex does not allow an end" in answer.error


def test_a_particle_with_a_wrong_end_is_not_reported_as_ended(pair: ModelPair):
    compiler = Compiler.of(TokenBytes.of(pair.tokenizer))
    numbers = {"method": "smc", "constraint": {"regex": "[0-9]{1,4}"}, "temperature": 2.0, "ess_threshold": 0.0}
    asks = asked(pair, "a", particles=8, return_particles=True, population="independent", **numbers)
    (answer,) = run(local_engine(pair), [asks])["a"]
    ended = [particle for particle in answer.particles if particle.finish_reason is FinishReason.EOS]
    right = ended[0].text
    assert any(particle.text != right for particle in ended), "the test needs different particles"
    checked = check_particles(compiler, Constraint.of({"choice": [right]}), answer)
    assert [(one.tokens, one.weight) for one in checked.particles] == [
        (one.tokens, one.weight) for one in answer.particles
    ]
    for before, after in zip(answer.particles, checked.particles):
        is_wrong = before.finish_reason is FinishReason.EOS and before.text != right
        assert after.finish_reason is (FinishReason.LENGTH if is_wrong else before.finish_reason)


@pytest.mark.slow
@pytest.mark.parametrize("constraint", SLOW.values(), ids=SLOW)
def test_others_do_not_wait_for_slow_constraints(pair: ModelPair, constraint: dict):
    """16 answers to one call, beside another request: its longest pause is not much longer than beside 16 answers whose
    constraint is harmless. The machine may be busy, so pauses are compared."""
    beside = asked(pair, "beside", max_tokens=100, ignore_eos=True, method="exact", particles=4)

    def longest(given: dict) -> tuple[float, dict[str, Answer]]:
        requests = [asked(pair, str(i), constraint=given, seed=i, particles=3) for i in range(16)]
        return longest_gap(local_engine(pair, FORMS[0]), requests, beside)

    usual, answers = longest({"regex": "[0-9 +=]{1,40}"})
    assert not any(answer.error for answer in answers.values())
    gap, answers = longest(constraint)
    assert len(answers) == 16 and any(answer.caller_error for answer in answers.values())
    assert all(answer.caller_error or answer.finish_reason is FinishReason.EOS for answer in answers.values())
    assert gap < MOST + 3 * usual


@pytest.mark.parametrize("config", FORMS, ids=lambda config: config.form)
def test_a_finished_constraint_ends_an_answer_before_min_tokens(pair: ModelPair, config: EngineConfig):
    engine = local_engine(pair, config)
    cases = {
        "boolean": ({"json_schema": {"type": "boolean"}}, "true|false"),
        "choice": ({"choice": ["yes", "no"]}, "yes|no"),
        "regex": ({"regex": "[0-9]{2,4}"}, "[0-9]{4}"),
    }
    requests = [
        asked(pair, f"{case}/{name}", constraint=given, min_tokens=40, max_tokens=60, **params)
        for case, (given, _) in cases.items()
        for name, params in METHODS.items()
    ]
    found = run(engine, requests)
    for request in requests:
        (answer,) = found[request.request_id]
        assert answer.finish_reason is FinishReason.EOS
        assert re.fullmatch(cases[request.request_id.split("/")[0]][1], answer.text)
        assert len(answer.tokens) < 12


def test_a_constraint_that_is_refused_at_the_end_harms_nothing(pair: ModelPair, monkeypatch):
    """A compiled constraint may be forgotten while its request runs, and be refused when it is compiled again, because
    the machine is busy then. Nothing is known against the answer's end."""
    compiler = Compiler(TokenBytes.of(pair.tokenizer))
    constraint = Constraint.of({"choice": ["1"]})
    tokens = pair.tokenizer.encode("2")
    with pytest.raises(ConstraintFailed):
        check_end(compiler, constraint, tokens, FinishReason.EOS)

    def refused(*args):
        raise NotCompiled("it takes more than 2 s to compile")

    monkeypatch.setattr(constraints, "compiled", refused)
    check_end(Compiler(TokenBytes.of(pair.tokenizer)), constraint, tokens, FinishReason.EOS)


def test_a_constraint_that_only_a_model_refuses_fails_its_request(pair: ModelPair, monkeypatch):
    """The error names the field as other failures do, whatever the caller calls it."""
    engine = local_engine(pair, EngineConfig(block=3))
    constraint = Constraint.of({"choice": ["1"]}, "response_format")
    engine._constraints.check(constraint)
    engine._constraints._kept.clear()
    monkeypatch.setattr(engine._constraints, "check", lambda constraint: None)

    def refused(*args):
        raise NotCompiled("it takes more than 10 s to compile")

    monkeypatch.setattr(constraints, "compiled", refused)
    (answer,) = run(engine, [asked(pair, "late", constraint=constraint)])["late"]
    assert answer.error == "constraint: it takes more than 10 s to compile"


def test_the_time_of_compiling_is_that_of_its_own_thread(monkeypatch):
    """On a busy machine a constraint needs no more of it. Where another process has accepted it, it may need more."""
    spent = iter([0.0, 1.9, 1.9, 2.1, 2.1])
    monkeypatch.setattr(compiler.time, "thread_time", lambda: next(spent))
    clock = compiler._Clock(compiler.MOST_COMPILED)
    clock.check()
    clock.check()
    with pytest.raises(NotCompiled, match="more than 2 s"):
        clock.check()
