"""Exact decoding may fall back to the target and return to the draft-target pair at any time: only the speed
changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, FinishReason, Request
from smc.api.sampling_params import Method, SamplingParams
from smc.local_engine import local_engine
from smc.scheduler.engine import Engine
from smc.scheduler.planner import DraftSize
from smc.scheduler.sequence_group import SequenceGroup
from smc.scheduler.speculation import LatencyModel
from smc.scheduler.tree_policy import OtherLoad, TreeRequest
from tests.pairwise import one_of
from tests.scheduler.harness import TokensOfPages, answers, assert_empty, check_kv, request, running
from tests.scheduler.random_histories import answers_with_plenty_of_memory, live, pair, random_requests, small_engine

CASES = one_of(("lookahead", True), ("lockstep", False))
LAWS = [
    {"logprobs": True, "stop": ("ab", "ca")},
    {"temperature": 1.5, "particles": 3},
    {"temperature": 0.0, "logprobs": True},
    {"top_p": 0.8, "particles": 1, "stop": ("bb",)},
    {"guidance_scale": 1.5, "particles": 4},
]


def exact_of(requests: list[Request]) -> list[Request]:
    """The same requests, three of four turned into exact ones with the same prompts, lengths and time budgets."""
    found = []
    for i, one in enumerate(requests):
        budget, law = one.params.time_budget, LAWS[i // 4 % len(LAWS)]
        settings = {
            "seed": i,
            "max_tokens": one.params.max_tokens,
            "ignore_eos": one.params.ignore_eos,
            "time_budget": budget,
        }
        params = SamplingParams(method="exact", **settings, **law) if i % 4 else one.params
        found.append(Request(one.request_id, one.prompt, params, one.cache_salt))
    return found


def plain_of(requests: list[Request]) -> list[Request]:
    """The same requests with `method=target`, without time budgets."""
    changed = []
    for one in requests:
        law = {
            name: value
            for name, value in vars(one.params).items()
            if name not in ("method", "particles", "population", "verification", "time_budget")
        }
        given = {name: value for name, value in law.items() if value is not None}
        changed.append(Request(one.request_id, one.prompt, SamplingParams(method="target", **given)))
    return changed


class AnyRows:
    """A tree policy that chooses at random."""

    def __init__(self, rng: random.Random, config: EngineConfig) -> None:
        self.rng, self.config = rng, config
        self._again = random.Random(0)

    def begin(
        self, tree: TreeRequest, others: Sequence[TreeRequest], beside: OtherLoad, latency: LatencyModel | None
    ) -> int:
        return self.rng.choice((0, self.rng.randint(1, tree.most)))

    def change(
        self,
        trees: Sequence[TreeRequest],
        waiting: Sequence[TreeRequest],
        beside: OtherLoad,
        latency: LatencyModel | None,
    ) -> list[int]:
        return [
            self.rng.choice((0, 1, tree.most // 2 or 1, tree.most)) if self.rng.random() < 0.4 else tree.rows
            for tree in trees
        ]

    def draft_size(
        self, trees: Sequence[TreeRequest], batch_size: int, context: int, latency: LatencyModel | None
    ) -> DraftSize:
        config = self.config
        steps = self.rng.choice((None, *(config.block_levels[1:] if config.lookahead else range(1, config.block))))
        tokens = batch_size * config.scored(steps or config.block)
        nodes = self.rng.choice((0, self.rng.randint(min(2 * len(list(trees)), tokens), tokens)))
        redrafted = self._again.choice(range(config.block))
        return DraftSize(self.rng.randint(1, config.branches), steps, nodes, redrafted)


class NothingKept(dict):
    """What a controller remembers of earlier calls of a policy: nothing, so that a random one is asked every time."""

    def __contains__(self, _key: object) -> bool:
        return False


class Turns:
    """Watches exact requests; now and then makes one fall back to the target at once, in whatever state it is."""

    def __init__(self, rng: random.Random, written: dict[str, TokensOfPages]) -> None:
        self.rng, self.written, self.seen = rng, written, Counter()
        self._were: dict[SequenceGroup, int] = {}

    def __call__(self, engine: Engine) -> None:
        if self.written:
            self.seen["looked at"] += check_kv(engine, self.written)
        for group in [group for group in engine.registry.groups.values() if group.params.method is Method.EXACT]:
            if group.is_running:
                rows = 0 if group.alone else group.count
                before = self._were.get(group, rows)
                self.seen["back"] += bool(rows and not before)
                self.seen["alone"] += bool(before and not rows)
                self.seen["resized"] += bool(rows and before and rows != before)
                self._were[group] = rows
            chance = 0.06 if not group.is_queued else 0.01 if group.checkpoint is None else 0.5
            if self.rng.random() < chance:
                self.seen[
                    f"{group.state.value}{' again' * (group.checkpoint is not None)}{' flying' * bool(group.in_flight)}"
                ] += 1
                engine.fallback.fall_back(group)


@pytest.mark.parametrize(("form", "ahead"), CASES)
def test_answers_do_not_depend_on_who_decodes(form, ahead, monkeypatch):
    """In a pool that is too small for all requests, with all other methods in the batch, a prefix cache, cancellations
    and time-outs."""
    rng, clock = random.Random(10 if ahead else 76), iter(range(1 << 30))
    shape = {"branches": 2} if form == "lookahead" else {"micro_batches": 1 + ahead}
    config = EngineConfig(form=form, block=3, **shape, max_slots=60, pages=440, prefill_chunk=24)
    requests = exact_of(random_requests(20, rng, longest=24, budgets=0.1))
    monkeypatch.setattr("smc.scheduler.tree_policy.EVERY", 1)
    monkeypatch.setattr("smc.scheduler.tree_policy.REST", 0)
    engine = small_engine(
        config, monkeypatch, ahead=ahead, clock=lambda: float(next(clock)), trees=AnyRows(rng, config)
    )
    monkeypatch.setattr(engine.trees, "_begins", NothingKept())
    turns = Turns(rng, {} if ahead else {side: TokensOfPages(engine, side) for side in ("draft", "target")})
    lives = live(engine, requests, rng, submit=0.9, cancel=0.04, interrupt=0.05, after_step=turns)
    assert_empty(engine)
    assert not any(engine.memory.leaked().values()) and not engine.prefill.stops.used
    assert min(turns.seen[name] for name in ("alone", "back", "resized")) >= 3, turns.seen
    phases = {"waiting", "preempted again", "prefill", "prefill again", "running flying" if ahead else "running"}
    assert phases <= set(turns.seen) and lives.events["preempted"] > 2 and lives.events["cached"], (
        turns.seen,
        lives.events,
    )
    cut = (FinishReason.CANCELLED, FinishReason.TIME_BUDGET, FinishReason.QUEUE_TIME)
    exact = [one for one in requests if one.params.method is Method.EXACT]
    assert sum(lives.final[one.request_id].finish_reason not in cut for one in exact) > 9
    expected = answers_with_plenty_of_memory(config, plain_of(exact))
    for one in exact:
        _assert_same(lives.final[one.request_id], expected[one.request_id], cut)


def _assert_same(found: Answer, expected: Answer, cut: tuple[FinishReason, ...]) -> None:
    if found.finish_reason in cut:
        assert found.tokens == expected.tokens[: len(found.tokens)]
    else:
        assert (found.tokens, found.text, found.matched) == (expected.tokens, expected.text, expected.matched)
        assert found.finish_reason == expected.finish_reason
    if found.logprobs is not None:
        assert found.logprobs == pytest.approx(expected.logprobs[: len(found.tokens)], abs=1e-4)


@pytest.mark.parametrize(("form", "cached"), one_of(("lookahead", True), ("lockstep", False)))
def test_the_target_runs_nothing_again_and_the_draft_what_it_lacks(form, cached):
    """The draft's computed pages are cached. Without a cache the draft runs all confirmed tokens again."""
    engine = local_engine(pair(), EngineConfig(form=form, block=4, prefix_cache=cached))
    asked = request([0, 1, 2] * 7, method="exact", particles=4, seed=1, max_tokens=60, ignore_eos=True)
    engine.submit(asked)
    while not running(engine) or running(engine)[0].committed < 20:
        engine.step()
    (group,), prompts = running(engine), _prompts(engine)
    held = int(engine.slots.held_S["target"][group.slots[0]])
    engine.fallback.fall_back(group)
    engine.step()
    assert group.alone and len(group.slots) == 1 and engine.slots.num_free == 63 and not prompts
    assert int(engine.slots.held_S["target"][group.slots[0]]) == held
    draft = engine.memory.allocators["draft"]
    assert draft.num_held == (held // 16 * 16 if cached else 0), "nothing of it but what is cached"
    while group.committed < 40:
        engine.step()
    engine.fallback.reenable_draft(group)
    while group.alone or not group.is_running:
        engine.step()
    lacks = 21 + group.committed - 1 - (held // 16 * 16 if cached else 0)
    assert prompts == [("draft", lacks)] and len(group.slots) == 4
    (answer,) = [output.answer for output in engine.run([]) if output.answer]
    plain = answers(
        engine, [Request("r", asked.prompt, SamplingParams(method="target", seed=1, max_tokens=60, ignore_eos=True))]
    )
    assert answer.tokens == plain["r"].tokens


def _prompts(engine: Engine) -> list[tuple[str, int]]:
    """A list that collects every prompt run from now on: model role, and number of tokens."""
    asked = []
    for side, worker in engine.workers.items():

        def listening(batch, side=side, run=worker.run_prompts):
            asked.append((side, len(batch.tokens_T)))
            return run(batch)

        worker.run_prompts = listening
    return asked


@pytest.mark.slow
def test_one_that_finds_no_slots_stays_alone():
    """Another request has taken the slots that it released."""
    engine = local_engine(pair(), EngineConfig(block=3, max_slots=8))
    law = {"method": "exact", "seed": 1, "max_tokens": 60, "ignore_eos": True}
    engine.submit(request(particles=8, **law))
    engine.submit(request(request_id="other", particles=6, **law))
    while not running(engine) or not running(engine)[0].rounds:
        engine.step()
    (first,) = running(engine)
    engine.fallback.fall_back(first)
    while len(running(engine)) < 2:
        engine.step()
    engine.fallback.reenable_draft(first)
    for _ in range(5):
        engine.step()
    assert first.alone and first.is_running and first.pending is None
    engine.abort("other")
    engine.fallback.reenable_draft(first)
    while first.alone or not first.is_running:
        engine.step()
    assert len(first.slots) == 8
    found = {output.answer.request_id: output.answer for output in engine.run([]) if output.answer}
    assert_empty(engine)
    plain = answers(
        engine, [Request("r", (0, 1, 2), SamplingParams(method="target", seed=1, max_tokens=60, ignore_eos=True))]
    )
    assert found["r"].tokens == plain["r"].tokens
