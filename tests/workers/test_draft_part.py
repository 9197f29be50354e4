"""Ranks that hold both models choose whether the draft is whole on each of them: all alike, and with the same
answers."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from services.launch.config import WorkerGroupConfig
from services.launch.worker_group import rank_spec
from services.link.connect import Rendezvous
from services.workers import draft_part, process
from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.model.parallel import WHOLE, Shard
from smc.scheduler.engine import Engine
from smc.types import ModelRole
from tests.coordinator.harness import coordinator
from tests.coordinator.test_same_answers import ASKED, FORMS, answers_here, answers_of
from tests.pairwise import one_of

Times = Callable[[bool], float | None]
SHARED = EngineConfig(**FORMS["lockstep"], drafting="always")


def is_divided(engine: Engine) -> bool:
    return engine.workers[ModelRole.DRAFT].model.config.whole_heads is not None


@pytest.fixture
def chosen(monkeypatch):
    """Returns a function that starts two shared ranks, asks them, and returns the degree that they report, and the
    degree of the draft at each of them. Its argument maps whether a timed draft is divided to the seconds that a rank
    takes a step for instead of its real ones."""
    loaded: list[int] = []
    load_rank = process.load_rank

    def load(spec):
        found = load_rank(spec)
        heads = found.models[ModelRole.DRAFT].config.whole_heads
        loaded.append(1 if heads is None else spec.place.degree)
        return found

    monkeypatch.setattr(process, "load_rank", load)

    def run(seconds: Times | None = None, asked: Sequence[Request] = ASKED, **settings):
        if seconds is not None:
            monkeypatch.setattr(draft_part, "draft_step_seconds", lambda engine, _: seconds(is_divided(engine)))
        given = {"placement": "shared", "target_tp": 2, "link": "nccl", **settings}
        with coordinator(SHARED, **given) as (made, spec):
            answers = asyncio.run(answers_of(made.address, spec.rendezvous.secret, asked))
            found = int(spec.rendezvous.store().get(spec.rendezvous.draft_degree))
        return found, loaded, {one.request_id: one for one in answers}

    return run


def expect_the_answers_of_one_process(answers) -> None:
    expected = answers_here("lockstep")
    assert answers.keys() == expected.keys()
    for name, one in answers.items():
        same = expected[name]
        assert (one.tokens, one.text, one.statistics.rounds) == (same.tokens, same.text, same.statistics.rounds)


@pytest.mark.parametrize(("whole", "divided", "degree"), one_of((2.0, 1.0, 2), (1.0, 2.0, 1)))
def test_the_faster_part_is_loaded_with_the_same_answers(chosen, whole, divided, degree):
    found, loaded, answers = chosen(lambda is_divided: divided if is_divided else whole)
    assert found == degree and loaded == [degree, degree]
    expect_the_answers_of_one_process(answers)


def test_real_times_are_logged(chosen, caplog):
    with caplog.at_level(logging.INFO, logger=draft_part.logger.name):
        found, loaded, _ = chosen(asked=ASKED[:1], link="grpc")
    (said,) = [record.getMessage() for record in caplog.records if record.name == draft_part.logger.name]
    assert found in (1, 2) and loaded == [found, found]
    name = {1: "whole", 2: "divided"}[found]
    times = re.fullmatch(
        rf"draft_tp={found}, the draft is {name} on each of 2 ranks; a step of 8 rows takes (\S+) ms whole, (\S+) ms "
        "divided",
        said,
    )
    assert times is not None and (float(times[1]) <= float(times[2])) == (found == 1)


def test_ranks_with_different_times_choose_alike(chosen):
    """The slowest rank counts, since all wait for it."""
    turn, guard = iter((1.0, 5.0)), threading.Lock()

    def seconds(is_divided: bool) -> float:
        with guard:
            return 4.0 if is_divided else next(turn)

    found, loaded, _ = chosen(seconds, ASKED[:1])
    assert found == 2 and loaded == [2, 2]


@pytest.mark.parametrize(("lacking", "degree"), one_of(({1}, 2), ({1, 2}, 1)))
def test_without_memory_for_timing(chosen, monkeypatch, caplog, lacking, degree):
    """One rank lacks memory for a step of these degrees. The other one does not wait for it, and what cannot be timed
    is not chosen; if nothing can be, the draft is whole."""
    real = draft_part.with_step_engine

    def lacks(config, device, dtype, measure, shard, reduce, numerics):
        # A whole draft does not know its rank.
        if shard.degree in lacking and (next(turns) if shard == WHOLE else shard.rank == 1):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(config, device, dtype, measure, shard, reduce, numerics)

    turns = iter((True, False))
    monkeypatch.setattr(draft_part, "with_step_engine", lacks)
    found, loaded, answers = chosen()
    assert found == degree and loaded == [degree, degree]
    assert "is not timed: CUDA out of memory" in caplog.text
    expect_the_answers_of_one_process(answers)


def test_where_there_is_a_choice():
    """With placement shared, more than one rank, no degree given, and a draft that can be divided so."""
    lockstep = EngineConfig(form="lockstep")

    def parts(**settings) -> tuple[Shard, Shard | None, int | None]:
        config, rendezvous = WorkerGroupConfig(engine=lockstep, **settings), Rendezvous("host", 1, 1, "s", "grpc", 1.0)
        group, pair = config.ranks_of(ModelRole.DRAFT), config.serving_pair()
        draft = rank_spec(config, pair, rendezvous, group.name, Shard(0, group.size)).models[ModelRole.DRAFT]
        return draft.shard, draft.or_shard, pair.draft.tensor_parallel

    assert parts(placement="shared", target_tp=2) == (WHOLE, Shard(0, 2), 0)
    assert parts(placement="shared", target_tp=2, draft_tp=1) == (WHOLE, None, 1)
    assert parts(placement="shared", target_tp=2, draft_tp=2) == (Shard(0, 2), None, 2)
    assert parts(placement="shared") == (WHOLE, None, 1)
    assert parts(target_tp=2) == (WHOLE, None, 1)
    # The demo draft has two query heads.
    assert parts(placement="shared", target_tp=4) == (WHOLE, None, 1)
