"""The draft may be lost at any time, and replaced by another: requests that the target can decode alone keep their
answers; only their speed changes."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, Request
from smc.api.sampling_params import Method, SamplingParams
from smc.executor.messages import ModelLost
from smc.local_engine import local_engine
from smc.scheduler.admission import NoDraft
from smc.scheduler.engine import Engine
from tests.scheduler.harness import answers, assert_empty, request, running
from tests.scheduler.random_histories import (
    answers_with_plenty_of_memory,
    assert_same,
    guided,
    pair,
    random_requests,
    small_engine,
)

CASES = [("lookahead", True), pytest.param("lockstep", True, marks=pytest.mark.slow)]
ALONE = (Method.EXACT, Method.TARGET)


class Lost:
    """The result of a call to a lost draft: reading it raises `ModelLost`."""

    def result(self) -> None:
        raise ModelLost("draft", "out of luck")

    def spans(self) -> dict[str, tuple[int, int]]:
        return {}


class Breaking:
    """Takes the draft away from an engine at any point of its work, and gives it another one."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.there = engine, True
        self._round, self._run = engine.executor.round, engine.workers["draft"].run_prompts
        engine.executor.round = self._ask_round
        engine.workers["draft"].run_prompts = lambda batch: self._run(batch) if self.there else Lost()

    def _ask_round(self, plan) -> object:
        asked = self._round(plan)
        return asked if self.there or plan.kind.roles == ("target",) else Lost()

    def step(self, submit: Callable[[], None] | None = None) -> tuple[list, list[str]]:
        """Outputs of a step, and the ids of requests that ended with the draft."""
        try:
            return self.engine.step(submit), []
        except ModelLost:
            return [], self.engine.detach_draft()


@pytest.mark.parametrize(("form", "ahead"), CASES)
def test_answers_of_the_targets_own_draws_do_not_depend_on_the_draft(form, ahead, monkeypatch):
    """In a pool that is too small for all requests, with a prefix cache and preemptions; most requests are guided.
    Other requests are refused or dropped while there is no draft."""
    rng = random.Random(2)
    branches = {} if form == "lockstep" else {"branches": 2}
    config = EngineConfig(form=form, block=2, **branches, max_slots=60, pages=800, prefill_chunk=24, micro_batches=2)
    requests = guided([_more_exact(one, i) for i, one in enumerate(random_requests(22, rng, longest=24))], rng)
    engine = small_engine(config, monkeypatch, ahead=ahead)
    final, refused, ended, seen = {}, set(), set(), Counter()
    breaking, waiting = Breaking(engine), list(requests)

    def submit_some() -> None:
        while waiting and rng.random() < 0.4:
            one = waiting.pop(0)
            try:
                engine.submit(one)
            except NoDraft:
                refused.add(one.request_id)

    while waiting or not engine.idle:
        if not ahead:
            submit_some()
        if rng.random() < 0.05 and (groups := running(engine)):
            engine.registry.preempt(rng.choice(groups))
        outputs, dropped = breaking.step(submit_some if ahead else None)
        final |= {output.request_id: output.answer for output in outputs if output.answer}
        ended |= set(dropped)
        if not breaking.there and not engine.fallback.has_draft and rng.random() < 0.2:
            breaking.there = True
            engine.attach_draft(pages=rng.choice((790, 800)))
            seen["back"] += 1
        elif breaking.there and rng.random() < 0.12:
            breaking.there = False
            seen["lost"] += 1
    if not engine.fallback.has_draft:
        engine.attach_draft(pages=800)
    assert_empty(engine)
    assert seen["back"] > 3 and min(len(refused), len(ended)) > 3, (seen, refused, ended)
    assert final.keys() | refused | ended == {one.request_id for one in requests}
    assert not final.keys() & (refused | ended)
    assert {one.request_id for one in requests if one.params.method in ALONE} <= final.keys()
    expected = answers_with_plenty_of_memory(config, requests)
    for one in requests:
        if one.request_id in final:
            _assert_same(one, final[one.request_id], expected[one.request_id])


def _more_exact(one: Request, number: int) -> Request:
    if number % 2 or one.params.method is not Method.SMC:
        return one
    ends = {name: getattr(one.params, name) for name in ("seed", "max_tokens", "ignore_eos", "stop")}
    return Request(
        one.request_id, one.prompt, SamplingParams(method="exact", particles=3, temperature=1.3, **ends), one.cache_salt
    )


def _assert_same(one: Request, found: Answer, expected: Answer) -> None:
    if one.params.method in ALONE:
        assert (found.tokens, found.text, found.finish_reason) == (
            expected.tokens,
            expected.text,
            expected.finish_reason,
        )
    elif found.statistics.particles_left == found.statistics.particles:
        assert_same(found, expected)


def test_what_the_target_has_is_not_run_again():
    engine = local_engine(pair(), EngineConfig(block=4, branches=2, prefix_cache=False))
    breaking, asked = Breaking(engine), []
    run = engine.workers["target"].run_prompts
    engine.submit(request([0, 1, 2] * 7, method="exact", particles=4, seed=1, max_tokens=60, ignore_eos=True))
    engine.submit(request(request_id="other", particles=3, seed=1, max_tokens=100, ignore_eos=True))
    while len(running(engine)) < 2 or running(engine)[0].committed < 10:
        engine.step()
    engine.workers["target"].run_prompts = lambda batch: (asked.append(len(batch.tokens_T)), run(batch))[1]
    breaking.there = False
    assert breaking.step() == ([], ["other"])
    assert engine.detach_draft() == [], "once is enough"
    final = [output.answer for output in engine.run([]) if output.answer]
    assert not asked and final[0].statistics.rounds and len(final) == 1
    plain = answers(engine, [request([0, 1, 2] * 7, method="target", seed=1, max_tokens=60, ignore_eos=True)])
    assert [final[0].tokens] == [answer.tokens for answer in plain.values()]
    with pytest.raises(NoDraft, match="method='draft' needs the draft"):
        engine.submit(request(request_id="third", method="draft", max_tokens=2))
    engine.attach_draft(engine.memory.capacity["draft"])
    breaking.there = True
    assert answers(engine, [request(request_id="third", method="draft", max_tokens=2, seed=1)])
    assert np.all(engine.slots.head_S["draft"] == 0)
    assert_empty(engine)


@pytest.mark.slow
def test_returning_draft_with_few_pages_takes_what_fits():
    """The returning draft has too few pages for "large", which is running, and for "waits", which is queued: the target
    continues them alone. "small" is drafted."""
    engine = local_engine(pair(), EngineConfig(block=4, branches=2, max_slots=4, pages=500))
    breaking = Breaking(engine)
    large, small = {"max_tokens": 100, "ignore_eos": True}, {"max_tokens": 8, "ignore_eos": True}
    for name, ends in (("large", large), ("waits", large), ("small", small)):
        engine.submit(request([0, 1, 2] * 7, name, method="exact", particles=4, seed=1, **ends))
    while not running(engine) or running(engine)[0].committed < 4:
        engine.step()
    breaking.there = False
    assert breaking.step() == ([], [])
    engine.attach_draft(pages=100)
    breaking.there = True
    final = {output.request_id: output.answer for output in engine.run([]) if output.answer}
    plain = answers(engine, [request([0, 1, 2] * 7, name, method="target", seed=1, **large) for name in ("large",)])
    assert final["large"].tokens == final["waits"].tokens == plain["large"].tokens
    assert final["waits"].statistics.draft_tokens == 0 < final["small"].statistics.draft_tokens
    assert_empty(engine)


def test_model_lost_pickles_its_role():
    error = pickle.loads(pickle.dumps(ModelLost("draft", "out of luck")))
    assert (error.role, str(error)) == ("draft", "the draft model is lost: out of luck")
