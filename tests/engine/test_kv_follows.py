"""KV after fan-out, resampling, re-rooting and sharing is what the particles' own tokens would give; the books always balance."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from smc.engine.config import EngineConfig
from smc.engine.local import local_engine
from smc.engine.request import Request, SamplingParams
from tests.engine import pairs
from tests.engine.harness import FORMS, TokenLedger, assert_empty, config_id, next_log_probs, running, step_through, workers

MIXED = [
    {"particles": 6, "ess_threshold": 1.0},
    {"particles": 3, "ess_threshold": 0.5, "resampling": "multinomial"},
    {"particles": 8, "ess_threshold": 1.0, "resampling": "residual", "alpha": 1.3},
    {"particles": 1},
    {"method": "target"},
    {"method": "draft", "temperature": 0.0},
    {"particles": 5, "ess_threshold": 0.9, "resampling": "ssp", "top_p": 0.95},
]


def mixed_requests(count: int, rng: random.Random, vocab: int = 4) -> list[Request]:
    return [
        Request(
            str(i),
            tuple(rng.randrange(vocab - 1) for _ in range(rng.randint(1, 9))),
            SamplingParams(seed=i, max_tokens=rng.randint(1, 16), ignore_eos=i % 3 == 0, **MIXED[i % len(MIXED)]),
        )
        for i in range(count)
    ]


def rows_of(engine, group, side: str) -> list[tuple[int, list[int]]]:
    """(row, tokens it must hold) for every live row of a group."""
    expected = []
    for slot in group.slots[engine._rows.live_S(side)[group.slots]].tolist():
        kept = engine._rows.kv_S(side)[slot] - group.prompt_size
        tokens = [*group.request.prompt, *engine.slots.tokens_SL[slot, :kept].tolist()]
        rows = engine._rows.of(side, np.array([slot])).ravel().tolist()
        expected += [(row, tokens) for row in (rows if group.is_smc else rows[:1])]
    return expected


@pytest.mark.parametrize("config", FORMS, ids=config_id)
def test_rows_hold_the_tokens_of_their_particles(config):
    """After every step, every live row's pages were written for exactly the tokens of its particle, prompt included."""
    engine = local_engine(pairs.tiny_pair(), config)
    ledgers = {side: TokenLedger(worker) for side, worker in workers(engine).items()}
    for r in mixed_requests(70, random.Random(0)):
        engine.submit(r)
    seen = 0

    def check(engine) -> None:
        nonlocal seen
        for group in running(engine):
            for side in group.prefilled:
                for row, tokens in rows_of(engine, group, side):
                    assert ledgers[side].tokens(row) == tokens
                    seen += 1
        for worker in workers(engine).values():
            worker.tables.check()

    step_through(engine, check)
    assert seen > 300
    assert_empty(engine)


@pytest.mark.parametrize("config", FORMS, ids=config_id)
def test_next_token_law_equals_recomputation(config):
    """Feeding a particle's next token to its KV gives the law that a fresh run over all its tokens gives, after each round."""
    pair = pairs.tiny_pair()
    engine = local_engine(pair, config)
    engine.submit(Request("r", (0, 1, 2), SamplingParams(particles=6, ess_threshold=1.0, seed=5, max_tokens=14, ignore_eos=True)))
    compared = 0

    def check(engine) -> None:
        nonlocal compared
        for group in running(engine):
            for side in ("draft", "target"):
                for row, tokens in rows_of(engine, group, side)[::3]:
                    for token in (0, 2):
                        ours = next_log_probs(workers(engine)[side], row, token)
                        fresh = pairs.next_log_probs(getattr(pair, side), [*tokens, token])
                        assert (ours - fresh).abs().max() < 1e-4
                        compared += 1

    outputs = step_through(engine, check)
    assert outputs[-1].answer.statistics.resamples > 0
    assert compared > 20


@pytest.mark.parametrize("seed", range(4))
def test_books_balance_through_random_lives(seed):
    """Random admissions, rounds, cancellations and finishes in a pool too small for all: pages are conserved at every step."""
    rng = random.Random(seed)
    config = EngineConfig(
        form=rng.choice(["lockstep", "lookahead"]), block=rng.randint(1, 4), max_slots=20, pages=320, prefill_chunk=rng.choice([3, 64])
    )
    engine = local_engine(pairs.tiny_pair(), config)
    waiting = mixed_requests(40, rng)
    cancelled = finished = 0
    while waiting or not engine.idle:
        while waiting and rng.random() < 0.4:
            engine.submit(waiting.pop())
        if engine._groups and rng.random() < 0.15:
            cancelled += engine.abort(rng.choice(list(engine._groups)))
        finished += sum(output.answer is not None for output in engine.step())
        for side, worker in workers(engine).items():
            worker.tables.check()
            assert worker.tables.allocator.num_held <= engine.budget.reserved[side] <= engine.budget.capacity[side]
    assert finished == 40 and cancelled > 0
    assert_empty(engine)


def test_what_all_particles_agree_on_is_held_once():
    """A draft equal to the target, nearly greedy: particles agree, so their pages are shared and attention reads them once."""
    equal = replace(pairs.tiny_pair(), draft=pairs.tiny_pair().target)
    engine = local_engine(equal, EngineConfig(form="lookahead", block=2, branches=2))
    engine.submit(Request("r", (0, 1, 2), SamplingParams(particles=8, temperature=0.01, seed=0, max_tokens=30, ignore_eos=True)))
    most = 0

    def check(engine) -> None:
        nonlocal most
        most = max(most, *(w.tables.allocator.num_held for w in workers(engine).values()))

    step_through(engine, check)
    assert most < 3 + 30 + 8 * 2 * 2, "duplicates of the committed prefix are held"
