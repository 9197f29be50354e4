"""Prefix reuse: prompts that begin alike share computed pages, and no answer changes."""

from __future__ import annotations

import copy
from dataclasses import replace
from hashlib import blake2b

import pytest

from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, FinishReason, Request
from smc.api.sampling_params import POPULATIONS
from smc.local_engine import ModelPair, local_engine
from smc.memory import prefix_keys
from smc.scheduler import prefill_batches
from smc.scheduler.engine import Engine
from smc.scheduler.prefill_batches import count_pages
from tests.pairwise import one_of
from tests.scheduler.harness import CASES, LOCKSTEP_FIRST, assert_empty, config_id, request, running, step_through
from tests.scheduler.pairs import tiny_pair
from tests.scheduler.random_histories import assert_same, pair

BLOCK = 16
PROMPT = (0, 1, 2, 2, 1) * 8
LAWS = [
    {"particles": 4, "ess_threshold": 1.0, "logprobs": True},
    {"method": "target", "logprobs": True},
    {"method": "draft"},
]


def salted(prompt: tuple[int, ...], name: str, salt: str = "", **params) -> Request:
    return replace(request(prompt, name, **params), cache_salt=salt)


def one(engine: Engine, asked: Request) -> Answer:
    engine.submit(asked)
    return step_through(engine, lambda _: None)[-1].answer


@pytest.mark.parametrize(
    ("config", "law", "chunk"),
    [
        (CASES[0], LAWS[0], 7),
        *one_of((CASES[1], LAWS[1], 7), (CASES[1], LAWS[0], 512), (CASES[0], LAWS[2], 7)),
    ],
    ids=lambda value: config_id(value) if isinstance(value, EngineConfig) else str(value),
)
def test_the_same_answer_with_and_without(config, law, chunk):
    """The same prompt again, a longer prompt, and a shorter one, whole or in chunks."""
    asked = [PROMPT, PROMPT, (*PROMPT, 2, 0, 1), PROMPT[:33], PROMPT[:32]]
    cached, plain = (
        local_engine(pair(), replace(config, prefill_chunk=chunk, prefix_cache=on)) for on in (True, False)
    )
    hits = []
    for i, prompt in enumerate(asked):
        params = {"seed": i, "max_tokens": 7, "ignore_eos": True, **law}
        found, expected = (one(engine, request(prompt, str(i), **params)) for engine in (cached, plain))
        assert_same(found, expected)
        hits.append(found.cached_tokens)
        assert expected.cached_tokens == 0
    # Whole blocks, and never the last token: its logits are needed to draw the next one.
    assert hits == [0, 32, 32, 32, BLOCK]
    assert_empty(cached)


@pytest.mark.parametrize("config", CASES, ids=config_id)
def test_another_salt_shares_nothing(config):
    engine = local_engine(pair(), config)
    hits = [
        one(engine, salted(PROMPT, name, salt, seed=1, max_tokens=3)).cached_tokens
        for name, salt in (("a", ""), ("b", "x"), ("c", "x"))
    ]
    assert hits == [0, 0, 32]
    stats = engine.take_stats()
    assert stats.prefix_queries["draft"] == stats.prefix_queries["target"] == 3 * len(PROMPT)
    assert stats.prefix_hits == {"draft": 32, "target": 32}


@pytest.mark.parametrize(
    ("config", "law"),
    one_of((CASES[1], LAWS[0]), (CASES[1], LAWS[1]), (CASES[0], LAWS[2])),
    ids=lambda value: config_id(value) if isinstance(value, EngineConfig) else str(value),
)
def test_a_conversation_goes_on_from_its_last_answer(config, law):
    """The next prompt consists of prompt, answer and a new question: all whole blocks of the first two are cached,
    except those not yet run."""
    engine = local_engine(pair(), config)
    first = one(engine, request(PROMPT, "first", seed=3, max_tokens=30, ignore_eos=True, **law))
    longer = (*PROMPT, *first.tokens, 1, 1)
    found = one(engine, request(longer, "next", seed=4, max_tokens=10, ignore_eos=True, **law))
    # A model has run all but a block of the 70 tokens.
    assert 64 - BLOCK <= found.cached_tokens <= 64
    plain = local_engine(pair(), replace(config, prefix_cache=False))
    assert_same(found, one(plain, request(longer, "next", seed=4, max_tokens=10, ignore_eos=True, **law)))
    assert_empty(engine)


@pytest.mark.parametrize("config", LOCKSTEP_FIRST, ids=config_id)
@pytest.mark.parametrize(
    ("law", "reuses_draft", "falls_back"),
    [
        ({"method": "exact"}, False, False),
        ({"method": "exact"}, False, True),
        ({"method": "exact", "verification": "rejection"}, True, False),
        ({}, True, False),
    ],
    ids=["walk", "walk, then the target alone", "rejection", "smc"],
)
def test_with_one_order_of_sums_only_deciding_models_cache_answers(config, law, reuses_draft, falls_back):
    """Rounds of walks may compute the draft's keys in another order of sums than SMC does."""
    engine = local_engine(pair(), replace(config, numerics="invariant"))
    first, fallen = None, False
    engine.submit(request(PROMPT, "first", seed=3, max_tokens=30, ignore_eos=True, particles=2, **law))
    while first is None:
        first = next((output.answer for output in engine.step() if output.answer), None)
        if falls_back and not fallen and (groups := running(engine)) and groups[0].committed > 20:
            engine.fallback.fall_back(groups[0])
            fallen = True
    assert fallen == falls_back
    engine.take_stats()
    longer = (*PROMPT, *first.tokens, 1, 1)
    one(engine, request(longer, "next", seed=4, max_tokens=4, ignore_eos=True, particles=2))
    hits = engine.take_stats().prefix_hits
    assert hits["target"] >= 64 - BLOCK
    assert (hits["draft"] >= 64 - BLOCK) == reuses_draft and hits["draft"] >= len(PROMPT) // BLOCK * BLOCK


@pytest.mark.parametrize("config", LOCKSTEP_FIRST, ids=config_id)
def test_fifty_requests_hold_a_shared_prompt_once(config):
    """Fifty running requests hold the prompt's whole blocks once; the rest of the prompt and the answers are held by
    each."""
    prompt, answer = PROMPT * 2, 9
    engine = local_engine(pair(), replace(config, max_slots=102, prefill_chunk=512))
    engine.submit(request(prompt, "first", particles=2, seed=0, max_tokens=answer, ignore_eos=True))
    while not running(engine):
        engine.step()
    for i in range(50):
        engine.submit(request(prompt, str(i), particles=2, seed=i, max_tokens=answer, ignore_eos=True))
    used = 0
    while not engine.idle:
        engine.step()
        if len(running(engine)) >= 50:
            used = max(used, *(engine.memory.held(side) for side in engine.memory.capacity))
    own = 51 * (len(prompt) % BLOCK or BLOCK) + 51 * 2 * answer
    assert 0 < used <= len(prompt) + own < 51 * len(prompt) / 2
    assert_empty(engine)


@pytest.mark.parametrize("config", CASES[:1], ids=config_id)
def test_what_was_not_used_for_longest_makes_room(config):
    """Different prompts in a pool for two of them: all run, the least recently used ones are computed again, and the
    one in use is kept."""
    engine = local_engine(pair(), replace(config, pages=300))
    prompts = [(i % 3, i // 3, *((i + j // 3) % 3 for j in range(62 + i))) for i in range(6)]
    hot = (2, 2, 0) * 16
    hits: list[int] = []
    for i, prompt in enumerate(prompts):
        one(engine, request(prompt, f"cold {i}", particles=2, seed=i, max_tokens=18, ignore_eos=True))
        hits.append(one(engine, request(hot, f"hot {i}", particles=1, seed=i, max_tokens=2)).cached_tokens)
        assert engine.memory.held("draft") <= 300
    assert hits == [0, 32, 32, 32, 32, 32]
    again = [one(engine, request(prompts[i], f"again {i}", particles=2, max_tokens=2)).cached_tokens for i in (5, 0)]
    assert again == [64, 0]
    assert_empty(engine)


def test_blocks_of_running_prompts_are_not_counted_as_cached():
    """Otherwise a pool full of long prompts seems to be nearly free."""
    engine = local_engine(pair(), EngineConfig(block=2))
    one(engine, request([1, 2] * 40, "before", method="target", seed=1, max_tokens=2))
    before = engine.take_stats()
    assert before.pages_used == before.pages_cached == {"draft": 0, "target": 80}
    engine.submit(request([3, 1] * 50, "long", method="target", seed=2, max_tokens=20, ignore_eos=True))
    engine.submit(request([3, 1] * 50, "same", method="target", seed=3, max_tokens=20, ignore_eos=True))
    while engine.num_running < 2:
        engine.step()
    running = engine.take_stats()
    assert running.pages_cached == {"draft": 0, "target": 80} and running.pages_used["target"] > 80 + 100
    for _ in engine.run([]):
        pass
    after = engine.take_stats()
    assert after.pages_used == after.pages_cached and after.pages_cached["target"] >= 80 + 96


def test_without_a_cache_nothing_is_kept():
    engine = local_engine(pair(), EngineConfig(block=2, prefix_cache=False))
    for name in "ab":
        assert one(engine, request(PROMPT, name, seed=1, max_tokens=4)).cached_tokens == 0
        assert not any(engine.memory.held(side) for side in engine.memory.capacity)
    assert engine.take_stats().pages_cached == {}


@pytest.mark.parametrize(
    ("config", "side", "population"),
    [
        (CASES[0], "draft", POPULATIONS[0]),
        (CASES[1], "target", POPULATIONS[1]),
    ],
)
def test_pages_of_nan_passes_are_not_cached(config, population, side):
    """A model's weights are temporarily broken. After they are repaired, a prompt that failed, alone or together with
    equal ones, is answered correctly: its pages were not cached."""
    sound = tiny_pair(5, max_context=128)
    mended = {name: copy.deepcopy(getattr(sound, name)) for name in ("draft", "target")}
    engine = local_engine(ModelPair(mended["target"], mended["draft"], sound.tokenizer, sound.max_context), config)
    prompt, law = (
        (0, 1, 2, 2, 1) * 5 + (3,) + (0, 1) * 12,
        {"particles": 3, "population": population, "seed": 1, "max_tokens": 9, "stop_token_ids": (3,)},
    )
    good, row = request(prompt[:25], "good", **law), mended[side].embed.weight[3].clone()
    first = one(engine, good)
    mended[side].embed.weight[3] = float("nan")
    outputs = []
    for number in range(3):
        engine.submit(request(prompt, str(number), **law))
        outputs += engine.step()
    outputs += step_through(engine, lambda _: None)
    assert [output.answer.finish_reason for output in outputs] == [FinishReason.ERROR] * 3
    for name in ("draft", "target"):
        assert engine.memory.match(name, engine.memory.keys(prompt, ""), len(prompt)) == (0, 0)
    mended[side].embed.weight[3] = row
    found = one(engine, request(prompt, "again", **law))
    assert found.cached_tokens == 0
    assert_same(found, one(local_engine(sound, config), request(prompt, "again", **law)))
    assert_same(one(engine, good), first)
    assert_empty(engine)


def test_waiting_prompts_are_hashed_once(monkeypatch):
    """Blocks of a waiting prompt are hashed once, when there may be room for it: not again while there are no slots or
    too few pages, nor after a preemption."""
    hashed, counted = [], []

    def hash_once(*args, **options):
        hashed.append(args)
        return blake2b(*args, **options)

    monkeypatch.setattr(prefix_keys, "blake2b", hash_once)
    monkeypatch.setattr(prefill_batches, "count_pages", lambda sequences: counted.append(1) or count_pages(sequences))
    engine = local_engine(pair(), EngineConfig(form="lockstep", block=2, max_slots=8, pages=440))
    blocks = 1 + len(PROMPT) // BLOCK
    engine.submit(request(PROMPT, "first", particles=6, seed=1, max_tokens=60, ignore_eos=True, ess_threshold=0.0))
    engine.step()
    engine.submit(request((1, *PROMPT), "no slots", particles=3, seed=2, max_tokens=60, ignore_eos=True))
    for _ in range(5):
        engine.step()
    assert len(hashed) == blocks
    assert engine.abort("no slots")
    engine.forecast.answer_share = 0.1  # it is expected to be short, and would start if there were pages for its prompt
    engine.submit(
        request((2, *PROMPT), "no pages", particles=2, seed=2, max_tokens=40, ignore_eos=True, ess_threshold=0.0)
    )
    waited = 0
    while engine.num_queued:
        engine.step()
        waited += engine.num_queued
    assert waited > 3 and len(hashed) <= 2 * blocks + 15, "one answer has been cached meanwhile"
    while not running(engine) or running(engine)[0].rounds < 4:
        engine.step()
    engine.registry.preempt(running(engine)[0])
    before, allocator = len(hashed), engine.memory.allocators["draft"]
    taken = allocator.allocate(allocator.num_free)
    for _ in range(5):
        engine.step()
    assert engine.num_queued == 1 and len(hashed) == before and len(counted) == 2, (
        "what it is to have on either side is counted once"
    )
    allocator.free(taken)
    step_through(engine, lambda _: None)
    assert_empty(engine)
