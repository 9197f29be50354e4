"""What has been computed for one prompt serves the next that begins alike, and no answer changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smc.engine.engine import Engine
from smc.engine.local import local_engine
from smc.engine.request import Answer, Request
from smc.runtime.config import EngineConfig
from tests.engine.harness import FORMS, assert_empty, config_id, request, running, step_through
from tests.engine.lives import assert_same, pair

BLOCK = 16
PROMPT = (0, 1, 2, 2, 1) * 8
LAWS = [{"particles": 4, "ess_threshold": 1.0, "logprobs": True}, {"method": "target", "logprobs": True}, {"method": "draft"}]


def salted(prompt: tuple[int, ...], name: str, salt: str = "", **params) -> Request:
    return replace(request(prompt, name, **params), cache_salt=salt)


def one(engine: Engine, asked: Request) -> Answer:
    engine.submit(asked)
    return step_through(engine, lambda _: None)[-1].answer


@pytest.mark.parametrize("config", FORMS, ids=config_id)
@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("chunk", [7, 512])
def test_the_same_answer_with_and_without(config, law, chunk):
    """A prompt again, one that goes on after it, and one that is its beginning; whole or in chunks."""
    asked = [PROMPT, PROMPT, (*PROMPT, 2, 0, 1), PROMPT[:33], PROMPT[:32]]
    cached, plain = (local_engine(pair(), replace(config, prefill_chunk=chunk, prefix_cache=on)) for on in (True, False))
    hits = []
    for i, prompt in enumerate(asked):
        params = {"seed": i, "max_tokens": 12, "ignore_eos": True, **law}
        found, expected = (one(engine, request(prompt, str(i), **params)) for engine in (cached, plain))
        assert_same(found, expected)
        hits.append(found.cached_tokens)
        assert expected.cached_tokens == 0
    # Whole blocks, and never the last token: what comes after it is drawn.
    assert hits == [0, 32, 32, 32, BLOCK]
    assert_empty(cached)


@pytest.mark.parametrize("config", FORMS, ids=config_id)
def test_another_salt_shares_nothing(config):
    engine = local_engine(pair(), config)
    hits = [
        one(engine, salted(PROMPT, name, salt, seed=1, max_tokens=3)).cached_tokens for name, salt in (("a", ""), ("b", "x"), ("c", "x"))
    ]
    assert hits == [0, 0, 32]
    stats = engine.take_stats()
    assert stats.prefix_queries["draft"] == stats.prefix_queries["target"] == 3 * len(PROMPT)
    assert stats.prefix_hits == {"draft": 32, "target": 32}


@pytest.mark.parametrize("config", FORMS, ids=config_id)
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_a_conversation_goes_on_from_its_last_answer(config, law):
    """Prompt, answer and what is asked next: all whole blocks of prompt and answer are there, but for what has not been run yet."""
    engine = local_engine(pair(), config)
    first = one(engine, request(PROMPT, "first", seed=3, max_tokens=30, ignore_eos=True, **law))
    longer = (*PROMPT, *first.tokens, 1, 1)
    found = one(engine, request(longer, "next", seed=4, max_tokens=10, ignore_eos=True, **law))
    # Of 70 tokens a model has run all but a block.
    assert 64 - BLOCK <= found.cached_tokens <= 64
    plain = local_engine(pair(), replace(config, prefix_cache=False))
    assert_same(found, one(plain, request(longer, "next", seed=4, max_tokens=10, ignore_eos=True, **law)))
    assert_empty(engine)


@pytest.mark.parametrize("config", FORMS, ids=config_id)
def test_fifty_requests_hold_a_shared_prompt_once(config):
    """Pages of fifty running requests: the prompt's whole blocks once, what is behind them and the answers for each."""
    prompt, answer = PROMPT * 2, 9
    engine = local_engine(pair(), replace(config, max_slots=102))
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


@pytest.mark.parametrize("config", FORMS, ids=config_id)
def test_what_was_not_used_for_longest_makes_room(config):
    """Different prompts in a pool for two of them: all run, those not seen for long are computed again, the one in use is kept."""
    engine = local_engine(pair(), replace(config, pages=300))
    prompts = [tuple((i + j // 3) % 3 for j in range(64 + i)) for i in range(6)]
    hot = (2, 2, 0) * 16
    hits: list[int] = []
    for i, prompt in enumerate(prompts):
        one(engine, request(prompt, f"cold {i}", particles=2, seed=i, max_tokens=30, ignore_eos=True))
        hits.append(one(engine, request(hot, f"hot {i}", particles=1, seed=i, max_tokens=2)).cached_tokens)
        assert engine.memory.held("draft") <= 300
    assert hits == [0, 32, 32, 32, 32, 32]
    assert one(engine, request(prompts[0], "again", particles=2, max_tokens=2)).cached_tokens < 64
    assert_empty(engine)


def test_without_a_cache_nothing_is_kept():
    engine = local_engine(pair(), EngineConfig(block=2, prefix_cache=False))
    for name in "ab":
        assert one(engine, request(PROMPT, name, seed=1, max_tokens=4)).cached_tokens == 0
        assert not any(engine.memory.held(side) for side in engine.memory.capacity)
    assert engine.take_stats().pages_cached == {}
