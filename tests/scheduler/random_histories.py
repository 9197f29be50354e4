"""Runs requests through everything that an engine can do to them: waiting, preemption, shrinking, growing, cancellation
and time-outs. The engine's pool should be too small for all of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, FinishReason, Output, Request
from smc.api.sampling_params import Method, SamplingParams
from smc.local_engine import ModelPair, local_engine
from smc.scheduler.admission import QueueFull
from smc.scheduler.engine import Engine
from tests.scheduler.harness import PaddingOps, answers, running
from tests.scheduler.pairs import tiny_pair

SALTS = ("", "", "", "somebody else's")
LAWS = [
    {"method": "smc", "particles": 6, "ess_threshold": 1.0},
    {"method": "smc", "particles": 3, "resampling": "multinomial", "stop": ("ab", "cca"), "logprobs": True},
    {"method": "smc", "particles": 8, "ess_threshold": 0.9, "resampling": "residual", "alpha": 1.3, "min_particles": 2},
    {"method": "smc", "particles": 1, "logprobs": True},
    {"method": "target", "logprobs": True, "stop": ("ab", "cb")},
    {"method": "draft", "temperature": 0.7},
    {"method": "smc", "particles": 5, "ess_threshold": 0.9, "resampling": "ssp", "top_p": 0.9, "logprobs": True},
    {"method": "smc", "particles": 4, "ess_threshold": 0.0, "min_particles": 3},
    {"method": "smc", "particles": 6, "min_particles": 2, "logprobs": True},
    {"method": "exact", "particles": 6, "logprobs": True, "stop": ("ab", "ca")},
    {"method": "smc", "particles": 5, "top_p": 0.9, "min_particles": 1, "stop": ("a", "cc")},
]


@dataclass
class Lives:
    """Answers, streamed outputs and counts of events of a run."""

    final: dict[str, Answer] = field(default_factory=dict)
    streamed: dict[str, list[Output]] = field(default_factory=dict)
    events: Counter = field(default_factory=Counter)
    resized: set[str] = field(default_factory=set)
    """Requests whose number of particles was changed on demand."""

    def untouched(self, name: str) -> bool:
        """Whether nothing happened to the request that may change its answer."""
        found = self.final[name]
        ended = found.finish_reason in (FinishReason.CANCELLED, FinishReason.TIME_BUDGET, FinishReason.QUEUE_TIME)
        return not ended and name not in self.resized and found.statistics.particles_left == found.statistics.particles


def pair(max_context: int = 128) -> ModelPair:
    return tiny_pair(max_context=max_context)


def random_requests(
    count: int, rng: random.Random, longest: int = 40, budgets: float = 0.0, stretch: int = 1
) -> list[Request]:
    """Requests whose prompts often begin alike: some repeat an earlier prompt, some continue it. `budgets` is the share
    of requests with a time budget; every second request's budget is `stretch` times as long."""
    prompts: list[tuple[int, ...]] = []
    found = []
    for i in range(count):
        known = rng.choice(prompts) if prompts and rng.random() < 0.7 else ()
        prompt = (
            known + tuple(rng.randrange(3) for _ in range(rng.choice((0, 0, 5, 20)) if known else rng.randint(1, 40)))
        )[:60]
        prompts = [*prompts[-8:], prompt]
        law = LAWS[i % len(LAWS)]
        params = SamplingParams(seed=i, max_tokens=rng.randint(1, longest), ignore_eos=rng.random() < 0.6, **law)
        if i % 3 == 0:  # particles that share nothing, to the end
            params = SamplingParams(
                method="smc", seed=i, particles=5, ess_threshold=0, max_tokens=longest + 20, ignore_eos=True
            )
        if budgets and rng.random() < budgets:
            params = replace(params, time_budget=float(rng.randint(2, 60) * (stretch if i % 2 else 1)))
        found.append(Request(str(i), prompt, params, rng.choice(SALTS)))
    return found


def guided(requests: Sequence[Request], rng: random.Random) -> list[Request]:
    """The same requests, most of those that support guidance with it: with one of a few negative prompts, or the
    default one."""
    negatives = [tuple(rng.randrange(3) for _ in range(size)) for size in (3, 20, 45)] + [None]
    found = []
    for one in requests:
        if one.params.method is not Method.DRAFT and rng.random() < 0.7:
            params = replace(one.params, guidance_scale=rng.choice((1.3, 3.0)))
            one = replace(one, params=params, negative_prompt=rng.choice(negatives))
        found.append(one)
    return found


def small_engine(
    config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    *,
    ahead: bool,
    follows: bool = False,
    made: ModelPair | None = None,
    **options,
) -> Engine:
    """An engine that overestimates its memory: it expects short answers and much sharing. With `ahead`, it requests
    rounds before it has read the last result, and reads first tokens a step later beside two requests; with `follows`,
    it corrects its forecast of running requests."""
    if ahead:
        monkeypatch.setattr("smc.scheduler.engine.COMPANY", 2)
    with monkeypatch.context() as patch:
        if ahead:
            patch.setattr("smc.local_engine.ops_for", lambda _device: PaddingOps())
        engine = local_engine(made or pair(), config, **options)
    engine.forecast.learn_answer = lambda _share: None
    if not follows:
        engine.forecast.follow = lambda _groups: None
    engine.forecast.answer_share = 0.1
    return engine


def live(
    engine: Engine,
    requests: Sequence[Request],
    rng: random.Random,
    *,
    submit: float = 0.5,
    cancel: float = 0.0,
    resize: float = 0.0,
    interrupt: float = 0.0,
    after_step: Callable[[Engine], None] = lambda _: None,
) -> Lives:
    """Submit all requests in order and run them to their ends. In each step each kind of event occurs with the given
    probability. An engine that requests rounds ahead takes requests in while they run."""
    lives, waiting = Lives(), list(requests)

    def submit_some() -> None:
        while waiting and (rng.random() < submit or engine.idle):
            try:
                engine.submit(waiting[0])
            except QueueFull:
                lives.events["queue full"] += 1
                break
            waiting.pop(0)

    ahead = engine.executor.pipelined
    while waiting or not engine.idle:
        if not ahead:
            submit_some()
        if rng.random() < cancel and engine.registry.groups:
            engine.abort(rng.choice(list(engine.registry.groups)))
        if rng.random() < resize:
            _resize(engine, rng, lives)
        if rng.random() < interrupt and (groups := running(engine)):
            engine.registry.preempt(rng.choice(groups))
            lives.events["interrupted"] += 1
        for output in engine.step(submit_some if ahead else None):
            lives.streamed.setdefault(output.request_id, []).append(output)
            if output.answer:
                lives.final[output.request_id] = output.answer
                lives.events[output.answer.finish_reason.value] += 1
                lives.events["cached"] += output.answer.cached_tokens > 0
                lives.events["taken up again"] += output.answer.statistics.preemptions
        stats = engine.take_stats()
        lives.events["preempted"] += stats.preemptions
        lives.events["shrunk"] += stats.shrinks
        lives.events["pipelined"] += any(group.in_flight for group in running(engine))
        after_step(engine)
    assert sorted(lives.final) == sorted(request.request_id for request in requests)
    for request in requests:
        assert_streamed(request, lives.streamed[request.request_id])
    return lives


def assert_streamed(request: Request, outputs: Sequence[Output]) -> None:
    """Assert that each token was streamed once, with its log-probability if requested, and that all of them together
    are the answer."""
    found = outputs[-1].answer
    assert found is not None
    assert sum((output.tokens for output in outputs), ()) == found.tokens
    assert sum((output.logprobs for output in outputs), ()) == (found.logprobs or ())
    assert all(len(output.logprobs) == len(output.tokens) * request.params.logprobs for output in outputs)
    assert not np.isnan(found.logprobs or ()).any()


def _resize(engine: Engine, rng: random.Random, lives: Lives) -> None:
    groups = [group for group in running(engine) if group.params.method is Method.SMC and group.next_rows is None]
    if not groups:
        return
    group = rng.choice(groups)
    wanted = rng.randint(group.params.least_rows, group.params.rows)
    if wanted != group.count and (wanted - len(group.slots)) * group.params.slots_per_row <= engine.slots.num_free:
        engine.resize(group.id, wanted)
        lives.resized.add(group.id)
        lives.events["grown" if wanted > group.count else "made smaller"] += 1


def answers_with_plenty_of_memory(config: EngineConfig, requests: Sequence[Request]) -> dict[str, Answer]:
    """Answers of an engine with plenty of memory, no prefix cache and no time budgets."""
    plenty = replace(
        config, pages=200_000, max_slots=512, prefix_cache=False, prefill_chunk=512, max_queue=None, micro_batches=1
    )
    asked = [replace(request, params=replace(request.params, time_budget=None)) for request in requests]
    return answers(local_engine(pair(), plenty), asked)


def assert_same(found: Answer, expected: Answer) -> None:
    assert (found.tokens, found.finish_reason, found.matched, found.text) == (
        expected.tokens,
        expected.finish_reason,
        expected.matched,
        expected.text,
    )
    assert found.statistics.log_z == pytest.approx(expected.statistics.log_z, abs=1e-4)
    if not expected.statistics.accepted_per_round:  # an exact request that resumes has no tree at first
        assert found.statistics.rounds == expected.statistics.rounds
    assert found.statistics.resamples == expected.statistics.resamples
    assert found.logprobs == (None if expected.logprobs is None else pytest.approx(expected.logprobs, abs=1e-4))
    tops, expected_tops = found.top_logprobs or (), expected.top_logprobs or ()
    assert len(tops) == len(expected_tops)
    assert all(dict(one) == pytest.approx(dict(other), abs=1e-4) for one, other in zip(tops, expected_tops))
    scores, expected_scores = found.prompt_logprobs or (), expected.prompt_logprobs or ()
    assert [one.rank for one in scores] == [one.rank for one in expected_scores]
    assert [one.logprob for one in scores] == pytest.approx([one.logprob for one in expected_scores], abs=1e-4)
