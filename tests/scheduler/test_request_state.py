"""The state machine of a request: the legal transitions, and that a running engine makes no others."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.local_engine import local_engine
from smc.scheduler.admission import NoDraft
from smc.scheduler.detokenizer import StopRules
from smc.scheduler.methods import TARGET_ALONE
from smc.scheduler.sequence_group import PendingChange, RequestState, SequenceGroup
from smc.scheduler.slots import SAVED, Checkpoint
from tests.scheduler.harness import PaddingOps, assert_empty, request
from tests.scheduler.pairs import tiny_pair
from tests.scheduler.random_histories import guided, pair, random_requests

WAITING, PREFILL, RUNNING, PREEMPTED, RESCORING, FINISHED = RequestState


def checkpoint(rows: int = 2) -> Checkpoint:
    return Checkpoint({name: np.zeros((rows, 4) if name.endswith("SL") else rows) for name in SAVED})


def group_in(state: RequestState, **params) -> SequenceGroup:
    """A request that has reached `state`."""
    params = {"method": "exact", "particles": 2, "max_tokens": 4} | params
    one = request(**params)
    group = SequenceGroup(one, 1, StopRules(one.params, tiny_pair().tokenizer), 0.0, 0, {})
    if state is FINISHED:
        group.finish()
    elif state is not WAITING:
        group.admit(np.arange(2), 1.0)
        if state is not PREFILL:
            group.run(2.0, {})
        if state is PREEMPTED:
            release_and_preempt(group)
        elif state is RESCORING:
            group.release_slots()
            group.rescore()
    assert group.state is state
    return group


def release_and_preempt(group: SequenceGroup) -> None:
    saved = checkpoint() if group.is_running else None
    group.release_slots()
    group.preempt(saved)


def release_and_redraw(group: SequenceGroup) -> None:
    group.release_slots()
    group.redraw()


MOVES: dict[str, tuple[Callable[[SequenceGroup], None], dict[RequestState, RequestState]]] = {
    "admit": (lambda group: group.admit(np.arange(2), 3.0), {WAITING: PREFILL, PREEMPTED: PREFILL}),
    "run": (lambda group: group.run(3.0, {}), {PREFILL: RUNNING}),
    "preempt": (release_and_preempt, {PREFILL: WAITING, RUNNING: PREEMPTED}),
    "redraw": (release_and_redraw, {RUNNING: WAITING}),
    "switch": (lambda group: group.switch(TARGET_ALONE, 1, checkpoint(1), np.arange(1)), {RUNNING: PREFILL}),
    "rescore": (lambda group: group.rescore(), {RUNNING: RESCORING, PREEMPTED: RESCORING}),
    "finish": (lambda group: group.finish(), {state: FINISHED for state in RequestState if state is not FINISHED}),
}
"""Transitions, and the state that each leads to from every state in which it is legal."""
TRANSITIONS = {(before, after) for _, legal in MOVES.values() for before, after in legal.items()} | {
    (PREFILL, PREEMPTED),
    (PREFILL, RESCORING),
}
"""Pairs of a state and one that may follow it: those of `MOVES`, and those of a request that is preempted or runs out
of time while it resumes from a checkpoint."""


@pytest.mark.parametrize(("name", "state"), list(product(MOVES, RequestState)))
def test_transitions(name, state):
    move, legal = MOVES[name]
    group = group_in(state)
    if state in legal:
        move(group)
        assert group.state is legal[state]
    else:
        with pytest.raises(AssertionError):
            move(group)


@pytest.mark.parametrize(("move", "after"), [(release_and_preempt, PREEMPTED), (SequenceGroup.rescore, RESCORING)])
def test_a_request_that_resumes_may_be_preempted_or_run_out_of_time(move, after):
    group = group_in(PREEMPTED)
    group.admit(np.arange(2), 3.0)
    move(group)
    assert group.state is after


def test_one_change_is_pending():
    group = group_in(RUNNING)
    group.request_rows(1)
    assert group.tree_rows == 1 and not group.switches
    group.request_switch(0)
    assert group.pending == PendingChange(0, True) and group.tree_rows == 0
    assert group.after_switch == (TARGET_ALONE, 1)
    release_and_preempt(group)
    assert group.alone and group.pending is None and group.count == 1, "a preempted request resumes after its switch"
    with pytest.raises(AssertionError):
        group.request_switch(2)
    group.choose(group.requested, 2)
    assert not group.alone and group.rows == 2


def test_a_resize_takes_a_round():
    group = group_in(RUNNING)
    group.begin_round({}, 1)
    group.begin_resize(3, np.array([7]))
    assert group.count == 2 and group.rows == 3 and group.particles.tolist() == [0, 1, 2]
    with pytest.raises(AssertionError):
        group.begin_resize(2, np.array([], dtype=np.int32))
    group.end_round()
    assert group.end_resize(np.array([True, False, True])).tolist() == [1]
    assert group.count == 2 and group.next_rows is None and group.slots.tolist() == [0, 7]
    with pytest.raises(AssertionError):
        group.end_resize(np.array([True, True]))


def test_results_of_an_earlier_generation_are_told_apart():
    group = group_in(RUNNING)
    group.begin_round({}, 1)
    release_and_preempt(group)
    assert group.generation == 1 and not group.in_flight
    with pytest.raises(AssertionError):
        group.begin_round({}, 1)
    with pytest.raises(AssertionError):
        group.release_slots()


def test_a_real_engine_makes_legal_transitions_only(monkeypatch):
    """Requests of all methods are submitted, aborted and preempted at random, in too little memory, while the draft is
    lost and comes back."""
    made: set[tuple[RequestState, RequestState]] = set()

    def watched(group: SequenceGroup, name: str, value: object) -> None:
        if name == "state" and name in vars(group) and group.state is not value:
            made.add((group.state, value))
        object.__setattr__(group, name, value)

    monkeypatch.setattr(SequenceGroup, "__setattr__", watched)
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: PaddingOps())
    config = EngineConfig(block=3, branches=2, max_slots=60, pages=800, prefill_chunk=6, micro_batches=2)
    engine, rng = local_engine(pair(), config), random.Random(7)
    engine.forecast.learn_answer, engine.forecast.answer_share = lambda _share: None, 0.1
    waiting, there = (
        [_with_tops(one, i) for i, one in enumerate(guided(random_requests(20, rng, longest=24), rng))],
        True,
    )
    while waiting or not engine.idle:
        groups = list(engine.registry.groups.values())
        admitted = [group for group in engine.registry.admitted if not group.error]
        if waiting and rng.random() < 0.6:
            try:
                engine.submit(waiting.pop())
            except NoDraft:
                assert not there
        elif groups and rng.random() < 0.04:
            engine.abort(rng.choice(groups).id)
        elif admitted and rng.random() < 0.15:
            engine.registry.preempt(rng.choice(admitted))
        elif rng.random() < 0.1:
            engine.detach_draft() if there else engine.attach_draft(pages=800)
            there = not there
        engine.step()
        engine.take_stats()
    if not there:
        engine.attach_draft(pages=800)
    assert_empty(engine)
    assert made <= TRANSITIONS
    assert {(PREFILL, WAITING), (PREFILL, PREEMPTED), (RUNNING, PREFILL), (RUNNING, PREEMPTED)} <= made
    assert {(RUNNING, RESCORING), (RESCORING, FINISHED), (PREEMPTED, PREFILL)} <= made


def _with_tops(one: Request, number: int) -> Request:
    if one.params.method == "smc" and number % 2:
        ends = {name: getattr(one.params, name) for name in ("seed", "max_tokens", "ignore_eos")}
        params = SamplingParams(method="exact", particles=3, logprobs=True, top_logprobs=2, **ends)
        return Request(one.request_id, one.prompt, params, one.cache_salt)
    return one
