"""A request waits in the queue until the workers have compiled its constraint. No other request waits for it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from services.link.base import LinkError
from services.link.remote_worker import RemoteWorker
from services.workers.rank import Rank, lead
from smc import constraints, demo
from smc.api.constraint import Constraint
from smc.api.engine_config import EngineConfig
from smc.api.request import FinishReason, Request
from smc.api.sampling_params import SamplingParams
from smc.constraints import MOST_KEPT, Compiler
from smc.executor.messages import PromptBatch
from smc.executor.ops import RoundOps
from smc.executor.round_executor import OneModelExecutor, TargetRunner
from smc.executor.worker import ModelWorker
from smc.grammar.compiler import MOST_ACCEPTED
from smc.local_engine import ModelPair, local_engine
from smc.scheduler.engine import Engine
from smc.scheduler.stats import Timeline
from smc.stops import TokenBytes
from smc.types import ModelRole

CONFIG = EngineConfig(form="lockstep", block=3, max_slots=8)
DIGITS = Constraint.of({"regex": "[0-9]{1,8}"})


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return ModelPair.load(demo.TARGET, demo.DRAFT)


def asked(pair: ModelPair, name: str, **params) -> Request:
    prompt = pair.tokenizer.chat([{"role": "user", "content": "What is 9 + 30?"}])
    settings = {"method": "exact", "seed": 1, "max_tokens": 12} | params
    return Request(name, tuple(prompt), SamplingParams(**settings))


class Slow:
    """A worker that compiles when it is told to."""

    def __init__(self, worker: ModelWorker) -> None:
        self._worker, self.done, self.asked = worker, 0, 0
        self.numbers: dict[Constraint, int] = {}

    def __getattr__(self, name: str):
        return getattr(self._worker, name)

    def compile(self, constraint: Constraint) -> int:
        if constraint not in self.numbers:
            self.asked += 1
            self.numbers[constraint] = self.asked
        return self.numbers[constraint]

    def has_compiled(self, number: int) -> bool:
        return self.done >= number


def slow_engine(pair: ModelPair) -> tuple[Engine, Slow, Slow]:
    engine = local_engine(pair, CONFIG)
    for role in ModelRole:
        engine.workers[role] = Slow(engine.workers[role])
    return engine, engine.workers[ModelRole.TARGET], engine.workers[ModelRole.DRAFT]


def test_others_go_on_meanwhile(pair):
    engine, target, draft = slow_engine(pair)
    wanted = next(
        o.answer for o in local_engine(pair, CONFIG).run([asked(pair, "c", constraint=DIGITS)]) if o.answer is not None
    )
    engine.submit(asked(pair, "c", constraint=DIGITS))
    engine.submit(asked(pair, "other"))
    ended = []
    while "other" not in ended:
        ended += [o.request_id for o in engine.step() if o.answer is not None]
    assert ended == ["other"] and engine.num_queued == 1 and not engine.idle
    target.done = 1
    for _ in range(3):
        assert not engine.step() and engine.num_queued == 1
    draft.done = 1
    answers = [o.answer for _ in range(50) for o in engine.step() if o.answer is not None]
    assert [(a.request_id, a.tokens) for a in answers] == [("c", wanted.tokens)]
    assert (target.asked, draft.asked) == (1, 1)
    engine.check_books()


def test_what_is_forgotten_in_the_queue_is_compiled_again_beside_other_work(pair):
    engine, target, draft = slow_engine(pair)
    engine.submit(asked(pair, "long", particles=8, max_tokens=40, ignore_eos=True))
    target.done = draft.done = 1
    engine.submit(asked(pair, "c", constraint=DIGITS))
    engine.submit(asked(pair, "after"))
    engine.step()
    for worker in (target, draft):
        worker.numbers.clear()
    ended = []
    while len(ended) < 2:
        ended += [o.request_id for o in engine.step() if o.answer is not None]
    assert ended == ["long", "after"] and engine.num_queued == 1 and (target.asked, draft.asked) == (2, 2)
    target.done = draft.done = 2
    assert [o.request_id for _ in range(50) for o in engine.step() if o.answer is not None] == ["c"]
    engine.check_books()


def test_only_the_models_of_its_method_are_awaited(pair):
    engine, target, draft = slow_engine(pair)
    target.done = 1
    answers = [o.answer for o in engine.run([asked(pair, "c", method="target", constraint=DIGITS)]) if o.answer]
    assert len(answers) == 1 and draft.asked == 0


def test_a_request_can_end_meanwhile(pair):
    engine, _, _ = slow_engine(pair)
    engine.submit(asked(pair, "aborted", constraint=DIGITS))
    engine.submit(asked(pair, "late", constraint=DIGITS, time_budget=0.05))
    engine.step()
    assert engine.abort("aborted")
    outputs = []
    while not engine.idle:
        outputs += engine.step()
    reasons = {o.request_id: o.answer.finish_reason for o in outputs if o.answer is not None}
    assert reasons == {"aborted": FinishReason.CANCELLED, "late": FinishReason.QUEUE_TIME}
    engine.check_books()


def test_a_worker_that_replaces_another_is_asked_again(pair):
    engine, _, draft = slow_engine(pair)
    engine.workers[ModelRole.TARGET].done = draft.done = 1
    draft.done = 0
    engine.submit(asked(pair, "c", constraint=DIGITS))
    engine.step()
    engine.workers[ModelRole.DRAFT] = again = Slow(draft._worker)
    engine.step()
    assert engine.num_queued == 1 and again.asked == 1
    again.done = 1
    assert any(o.answer is not None for _ in range(50) for o in engine.step())


LONG = Constraint.of({"regex": "[0-9]{60}"})


def test_a_new_draft_compiles_before_requests_return_to_it(pair):
    """The target goes on alone meanwhile, with those that run, those that wait, and those that came without a draft."""
    engine, target, draft = slow_engine(pair)
    target.done = draft.done = 99
    names = [str(n) for n in range(4)]
    for name in names[:3]:
        engine.submit(asked(pair, name, constraint=LONG, max_tokens=90, particles=4))
    while engine.num_running < 2:
        engine.step()
    assert engine.num_queued == 1 and not engine.detach_draft()
    engine.submit(asked(pair, names[3], constraint=LONG, max_tokens=90, particles=4))
    engine.workers[ModelRole.DRAFT] = again = Slow(draft._worker)
    engine.attach_draft(engine.memory.capacity[ModelRole.DRAFT])
    groups = [engine.registry.groups[name] for name in names]
    before = [group.committed for group in groups]
    for _ in range(8):
        engine.step()
    assert again.asked == 1
    assert all(group.alone for group in groups) and all(group.committed > was for group, was in zip(groups, before))
    again.done = 99
    for _ in range(4):
        engine.step()
    assert any(group.is_running and not group.alone for group in groups)
    assert len([o for o in engine.run([]) if o.answer and not o.answer.error]) == len(groups)
    engine.check_books()


def test_a_return_that_waits_can_be_cancelled(pair):
    """By the end of the request, or by the loss of this draft, too."""
    engine, target, draft = slow_engine(pair)
    target.done = draft.done = 99
    engine.submit(asked(pair, "ends", constraint=LONG, max_tokens=90, particles=4))
    engine.submit(asked(pair, "stays", constraint=LONG, max_tokens=90, particles=4))
    while engine.num_running < 2:
        engine.step()
    engine.detach_draft()
    engine.workers[ModelRole.DRAFT] = Slow(draft._worker)
    engine.attach_draft(engine.memory.capacity[ModelRole.DRAFT])
    engine.step()
    # The policy sees its rows, and may take them back.
    stays = engine.registry.groups["stays"]
    (tree,) = engine.trees._trees([stays])
    assert stays.alone and tree.rows == stays.most_rows == 4
    engine.trees._change(stays, 2)
    assert engine.fallback.tree_rows(stays) == 2
    engine.trees._change(stays, 0)
    assert engine.fallback.tree_rows(stays) == 0 and stays not in engine.fallback._returning
    engine.trees._change(stays, 4)
    assert engine.abort("ends")
    engine.step()
    engine.detach_draft()
    engine.workers[ModelRole.DRAFT].done = 99
    for _ in range(3):
        engine.step()
    assert engine.registry.groups["stays"].alone and not engine.fallback._returning
    assert len([o for o in engine.run([]) if o.answer and not o.answer.error]) == 1
    engine.check_books()


def test_models_may_take_longer_than_the_gateway_to_compile(pair, monkeypatch):
    """What was accepted is not refused where a mask is needed before the constraint is compiled beside other work."""
    found, original = [], constraints.compiled

    def noted(constraint: Constraint, vocabulary, limits, seconds: float):
        found.append(seconds)
        return original(constraint, vocabulary, limits, seconds)

    monkeypatch.setattr(constraints, "compiled", noted)
    engine, target, draft = slow_engine(pair)
    target.done = draft.done = 99
    unseen = Constraint.of({"regex": "(unseen){1,3}"})
    compiler = engine._constraints
    monkeypatch.setattr(engine, "_constraints", None)
    assert list(engine.run([asked(pair, "c", constraint=unseen)]))[-1].answer.error is None
    assert compiler._known(unseen) and found == [MOST_ACCEPTED]


class QueueEnd:
    """An end of a link within one process."""

    def __init__(self, sent: queue.SimpleQueue, received: queue.SimpleQueue) -> None:
        self._sent, self._received = sent, received

    def send(self, message: bytes) -> None:
        self._sent.put(message)

    def receive(self, timeout: float) -> bytes:
        try:
            return self._received.get(timeout=timeout)
        except queue.Empty:
            raise LinkError("silent") from None

    def close(self) -> None:
        pass


@contextmanager
def served(pair: ModelPair) -> Iterator[RemoteWorker]:
    """A worker of the target behind a link, carried out by a thread of this process."""
    worker = local_engine(pair, CONFIG).workers[ModelRole.TARGET]
    there, here = queue.SimpleQueue(), queue.SimpleQueue()
    executor = OneModelExecutor(TargetRunner(CONFIG, worker, RoundOps(), worker.stages, None))
    rank = Rank({ModelRole.TARGET: worker}, executor, 1, 60.0)
    thread = threading.Thread(target=lead, args=(rank, QueueEnd(here, there), None))
    thread.start()
    remote = RemoteWorker(ModelRole.TARGET, QueueEnd(there, here), 1, 60.0, Timeline())
    try:
        yield remote
    finally:
        remote.stop()
        thread.join(60)
    assert not thread.is_alive()


def test_a_rank_goes_on_while_it_compiles(pair, monkeypatch):
    """It answers other commands at once, and reports the constraint when it is compiled, even one that is refused."""
    may_end, original = threading.Event(), constraints.compiled

    def slow(constraint: Constraint, *args):
        assert may_end.wait(60)
        return original(constraint, *args)

    monkeypatch.setattr(constraints, "compiled", slow)
    with served(pair) as remote:
        slow_one = Constraint.of({"regex": "(slow){1,3}"})
        number, refused = remote.compile(slow_one), remote.compile(Constraint.of({"regex": "[a&&b]"}))
        assert (number, refused, remote.compile(slow_one)) == (1, 2, 1)
        remote.ping()
        assert not remote.has_compiled(number)
        may_end.set()
        while not remote.has_compiled(refused):
            remote.keep_alive(0.001)
        assert remote.has_compiled(number)


def test_a_constraint_is_asked_for_again_before_a_rank_may_have_forgotten_it(pair, monkeypatch):
    """A rank forgets the one that it has not used for longest: it uses those that run, of which the link knows nothing.
    So the link counts on half of what the rank keeps."""
    compiler = Compiler(TokenBytes.of(pair.tokenizer))
    monkeypatch.setattr(Compiler, "of", lambda _token_bytes: compiler)
    many = [Constraint.of({"choice": [str(n)]}) for n in range(MOST_KEPT + 10)]
    running = many[: MOST_KEPT // 2]
    with served(pair) as remote:
        numbers = []
        for constraint in many:
            numbers.append(remote.compile(constraint))
            while not remote.has_compiled(numbers[-1]):
                remote.keep_alive(0.001)
            for one in running[: len(numbers)]:
                compiler._known(one)
        waiting = slice(len(running), None)
        for constraint, number in zip(many[waiting], numbers[waiting]):
            again = remote.compile(constraint)
            assert again != number or compiler._known(constraint) is not None
            if again != number:
                while not remote.has_compiled(again):
                    remote.keep_alive(0.001)
                assert compiler._known(constraint) is not None


def test_a_result_that_nobody_reads_does_not_hide_that_a_constraint_is_compiled(pair):
    """Nor does it keep the worker from getting heartbeats."""
    with served(pair) as remote:
        one = np.ones(1, dtype=np.int32)
        prompt = PromptBatch(pages_B=one, starts_R=0 * one, counts_R=one, tokens_T=one.astype(np.int64))
        unread = remote.ask(prompt, ModelRole.TARGET)
        number, deadline = remote.compile(DIGITS), time.monotonic() + 60
        while not remote.has_compiled(number):
            assert time.monotonic() < deadline
            remote.keep_alive(0.001)
            time.sleep(0.001)
        assert unread.of(ModelRole.TARGET).failures == {}
