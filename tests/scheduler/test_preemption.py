"""Preemption: requests that release their memory to older ones resume later with unchanged answers, and every request
makes progress."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import FinishReason, Request
from smc.api.sampling_params import SamplingParams
from smc.memory.pages import OutOfPages
from smc.scheduler.engine import Engine
from smc.types import BOTH_MODELS
from tests.pairwise import one_of
from tests.scheduler.harness import CASES, FORMS, LOOKAHEAD_FIRST, answers, assert_empty, config_id, request, running
from tests.scheduler.random_histories import answers_with_plenty_of_memory, assert_same, live, small_engine

PAGES = 300
FREE = {"method": "smc", "ess_threshold": 0.0, "ignore_eos": True, "logprobs": True, "max_tokens": 60}
LAWS = [
    {"method": "smc", "particles": 2},
    {"method": "smc", "particles": 3, "stop": ("abcab", "ccac"), "ess_threshold": 0.4},
    {"method": "smc", "particles": 2, "alpha": 1.4},
    {"method": "smc", "particles": 3, "top_p": 0.8, "temperature": 1.3, "ess_threshold": 0.6},
    {"method": "smc", "particles": 1, "draft_temperature": 1.2},
]


def hungry(count: int, **more) -> list[Request]:
    rng = random.Random(5)
    return [
        Request(
            str(i),
            tuple(rng.randrange(3) for _ in range(12 + i)),
            SamplingParams(seed=i, **(FREE | LAWS[i % 5] | more)),
        )
        for i in range(count)
    ]


def starved_engine(config: EngineConfig, monkeypatch, *, ahead: bool = False, pages: int = PAGES, **options) -> Engine:
    return small_engine(replace(config, pages=pages, prefill_chunk=16), monkeypatch, ahead=ahead, **options)


@pytest.mark.parametrize(("config", "ahead"), one_of((CASES[1], True), (CASES[0], False)), ids=["ahead", "lockstep"])
def test_the_answer_is_that_of_endless_memory(config, ahead, monkeypatch):
    """Tokens, logprobs, log Z, finish reason and streamed text are the same. Memory is short, and in about every third
    step a request is preempted in addition."""
    requests = hungry(5, max_tokens=30)
    engine = starved_engine(config, monkeypatch, ahead=ahead, pages=200)
    lives = live(engine, requests, random.Random(0), submit=1.0, interrupt=0.3)
    assert_empty(engine)
    times = sorted(lives.final[r.request_id].statistics.preemptions for r in requests)
    assert sum(times) >= lives.events["interrupted"] > 6 and times[-3] >= 1, times
    expected = answers_with_plenty_of_memory(config, requests)
    for r in requests:
        outputs = lives.streamed[r.request_id]
        assert_same(lives.final[r.request_id], expected[r.request_id])
        assert tuple(itertools.chain(*(o.tokens for o in outputs))) == expected[r.request_id].tokens
        assert "".join(o.text for o in outputs) == expected[r.request_id].text


@pytest.mark.parametrize("config", LOOKAHEAD_FIRST, ids=config_id)
@pytest.mark.parametrize("end", ["cancelled", "time_budget"])
def test_one_that_waits_to_go_on_answers_with_what_was_streamed(config, end, monkeypatch):
    """A preempted request that is cancelled or runs out of time answers with at least what was streamed already."""
    now = [0.0]
    engine = starved_engine(config, monkeypatch, clock=lambda: now[0])
    budget = 1.0 if end == "time_budget" else None
    for one in hungry(3, particles=3, ess_threshold=0.6, stop=(), time_budget=budget):
        engine.submit(one)
    outputs, ended = [], set()
    while not engine.idle:
        outputs += engine.step()
        for group in running(engine):
            if group.streamed:
                engine.registry.preempt(group)
        waiting = [
            g for g in engine.registry.groups.values() if g.is_queued and g.checkpoint is not None and g.streamed
        ]
        if waiting and end == "cancelled":
            ended.add(waiting[0].id)
            assert engine.abort(waiting[0].id)
        elif waiting:
            ended.update(g.id for g in waiting)
            now[0] = 2.0
        if ended:  # the other requests are not part of this test
            for name in engine.registry.groups.keys() - ended:
                engine.abort(name)
    assert_empty(engine)
    assert ended
    for name in ended:
        mine = [o for o in outputs if o.request_id == name]
        assert mine[-1].answer.finish_reason == FinishReason(end)
        streamed = tuple(itertools.chain(*(o.tokens for o in mine)))
        assert streamed == mine[-1].answer.tokens and len(streamed) == len(mine[-1].answer.logprobs) > 0


def test_preemption_makes_progress(monkeypatch):
    """Requests need more memory than there is: pages released by a younger request serve the older one, so that few
    steps pass without progress of any request."""
    engine = starved_engine(FORMS[0], monkeypatch)
    for one in hungry(3, particles=4, ess_threshold=0.0, stop=()):
        engine.submit(one)
    idle_steps = 0
    while not engine.idle:
        before = [(g.rounds, g.state) for g in engine.registry.groups.values()]
        ended = any(o.answer for o in engine.step())
        idle_steps += not ended and before == [(g.rounds, g.state) for g in engine.registry.groups.values()]
    assert idle_steps < 30, "only prompts' chunks may be run meanwhile"


def test_preempts_only_holders_of_the_short_pool(monkeypatch):
    """Requests of both models lack pages of the draft; the youngest request, of the target alone, is not preempted."""
    engine = starved_engine(EngineConfig(block=3, branches=8), monkeypatch, pages=400)
    for one in hungry(2, particles=4, stop=(), ess_threshold=0.0):
        engine.submit(one)
    engine.submit(request(request_id="target", method="target", max_tokens=50, ignore_eos=True, seed=1))
    found = {}
    for _ in range(200):
        found |= {o.request_id: o.answer for o in engine.step() if o.answer}
    assert sorted(found) == ["0", "1", "target"]
    assert found["target"].statistics.preemptions == 0 < found["1"].statistics.preemptions
    assert_empty(engine)


def test_younger_request_waits_without_shrinking(monkeypatch):
    """The only request of both models finds no pages, as an older request of the target alone holds them: it waits, and
    is neither shrunk nor refused."""
    engine = starved_engine(FORMS[0], monkeypatch, pages=270)
    engine.submit(request([0, 1, 2] * 20, "older", method="target", max_tokens=64, ignore_eos=True, seed=1))
    engine.submit(
        request([0, 2] * 16, "younger", particles=3, max_tokens=70, ess_threshold=0.0, ignore_eos=True, seed=2)
    )
    found, left_out = {}, 0
    for _ in range(300):
        before = {g.id: g.rounds for g in running(engine)}
        found |= {o.request_id: o.answer for o in engine.step() if o.answer}
        left_out += any(g.id == "younger" and g.rounds == before.get(g.id) for g in running(engine))
    assert {name: a.finish_reason for name, a in found.items()} == dict.fromkeys(
        ("older", "younger"), FinishReason.LENGTH
    )
    assert left_out > 0 and found["younger"].statistics.particles_left == 3
    assert_empty(engine)


@pytest.mark.slow
def test_requests_of_one_moment_are_in_order(monkeypatch):
    """With a clock that stands still, the request that was submitted first still counts as the oldest."""
    engine = starved_engine(FORMS[1], monkeypatch, clock=lambda: 0.0, pages=200)
    found = answers(engine, requests := hungry(5, max_tokens=30))
    assert found["0"].statistics.preemptions == 0
    assert sum(a.statistics.preemptions for a in found.values()) > 0
    for name, expected in answers_with_plenty_of_memory(FORMS[1], requests).items():
        assert_same(found[name], expected)


def test_nobody_is_preempted_if_there_are_enough_pages_by_now(monkeypatch):
    """A request gets no pages for a round, and when room is to be made, there are enough."""
    engine = starved_engine(FORMS[0], monkeypatch)
    engine.submit(request(particles=2, max_tokens=20, ignore_eos=True, seed=1))
    while not any(group.rounds for group in running(engine)):
        engine.step()
    allocate, refusals = engine.memory.allocate, [1, 2]

    def refuse(pages, spare=None):
        if refusals:
            raise OutOfPages(f"refusal {refusals.pop()}")
        return allocate(pages, spare)

    monkeypatch.setattr(engine.memory, "allocate", refuse)
    (answer,) = (o.answer for _ in range(30) for o in engine.step() if o.answer)
    assert not refusals and answer.statistics.preemptions == 0 and answer.finish_reason is FinishReason.LENGTH
    assert_empty(engine)


def test_cached_pages_are_evicted_for_a_prompt(monkeypatch):
    """Requests with a common beginning that start together leave more pages in the prefix cache than it has entries;
    they are freed for a waiting prompt."""
    engine = starved_engine(FORMS[0], monkeypatch, pages=180)
    same = [0, 1, 2] * 11
    answers_of = engine.run(
        request(same, str(i), particles=1, seed=i, max_tokens=18, ignore_eos=True) for i in range(3)
    )
    assert len([o for o in answers_of if o.answer]) == 3
    engine.submit(request([2, 1] * 60, "long", particles=1, seed=9, max_tokens=5))
    for _ in range(30):
        engine.step()
    assert engine.idle
    assert_empty(engine)


def test_one_that_has_ended_is_answered_and_not_interrupted(monkeypatch):
    """In the step in which a request ends, an older request of the target alone finds no pages: the pages of the ended
    one are free for it."""
    engine = starved_engine(replace(FORMS[0], prefix_cache=False), monkeypatch)
    engine.submit(request(request_id="older", method="target", max_tokens=100, ignore_eos=True, seed=1))
    engine.submit(request(request_id="ends", particles=3, max_tokens=30, ignore_eos=True, seed=2))
    rounds, allocator, taken = engine.registry.rounds[BOTH_MODELS], engine.memory.allocators["target"], []
    read = rounds.read

    def read_and_take_all(steps) -> list:
        found = read(steps)
        if not taken and any(group.id == "ends" and engine.registry.complete(group) for group in running(engine)):
            taken.append(allocator.allocate(allocator.num_free))
        return found

    rounds.read, found = read_and_take_all, {}
    while not taken:
        before = {group.id: group.rounds for group in running(engine)}
        found |= {o.request_id: o.answer for o in engine.step() if o.answer}
    assert found["ends"].statistics.preemptions == 0 and found["ends"].finish_reason is FinishReason.LENGTH
    (older,) = running(engine)
    assert older.rounds == before["older"] + 1, "it took part in the round for which it had found no pages"
    allocator.free(taken[0])
    assert engine.abort("older") and engine.step()
    assert_empty(engine)
