"""Guidance: every method samples from the distribution of the logits l_u + s (l_c - l_u), and unconditional rows follow
their particles."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from smc.api.request import Answer, Request
from smc.api.sampling_params import SamplingParams
from smc.executor.forward import StaticForward
from smc.local_engine import local_engine
from smc.scheduler.engine import Engine
from smc.types import ModelRole
from tests.pairwise import one_of
from tests.scheduler.harness import (
    FORMS,
    LOCKSTEP_FIRST,
    LOOKAHEAD_FIRST,
    TokensOfPages,
    answers,
    assert_empty,
    check_kv,
    config_id,
    processed,
    request,
    running,
    wide,
)
from tests.scheduler.pairs import (
    exact_law,
    far_from,
    law_of,
    likelier_elsewhere,
    mean_and_error,
    next_log_probs,
    tiny_pair,
)
from tests.scheduler.random_histories import (
    answers_with_plenty_of_memory,
    assert_same,
    guided,
    live,
    random_requests,
    small_engine,
)
from tests.scheduler.shared_answers import ALWAYS, DISTINCT, distance, evidence

PROMPT, NEGATIVE, SCALE, EOS = (0, 1, 2), (2, 1, 1, 0, 2), 2.5, 3
EVERY = [
    {"method": "target"},
    {"method": "exact", "particles": 3},
    {"method": "exact", "particles": 2, "verification": "rejection"},
    {"method": "smc", "particles": 3, "population": "distinct"},
    {"method": "smc", "particles": 3, "population": "independent"},
]
ENDS = [FORMS[0], FORMS[2]]


def asked(
    request_id: str = "r", negative: tuple[int, ...] | None = NEGATIVE, prompt: tuple[int, ...] = PROMPT, **params
) -> Request:
    return replace(request(prompt, request_id, **({"guidance_scale": SCALE} | params)), negative_prompt=negative)


def log_law(
    answer: tuple[int, ...], temperature: float, top_k: int, negative: tuple[int, ...] = NEGATIVE
) -> torch.Tensor:
    """log p [V] after an answer: the formula in float64, from passes over whole texts."""
    own, theirs = (next_log_probs(tiny_pair().target, (*prompt, *answer)) for prompt in (PROMPT, negative))
    law = torch.log_softmax((theirs + SCALE * (own - theirs)) / temperature, -1)
    return torch.log_softmax(law.where(law >= law.topk(top_k).values[-1], -torch.inf), -1)


@pytest.mark.parametrize("config", LOCKSTEP_FIRST, ids=config_id)
def test_every_method_weighs_by_the_formula(config):
    """Temperature and truncation apply after guidance. All methods share rounds with each other and with requests
    without guidance."""
    law = {"temperature": 0.8, "top_k": 3, "max_tokens": 12, "ignore_eos": True, "logprobs": True}
    requests = [asked(f"{i} {seed}", seed=seed, **law, **how) for i, how in enumerate(EVERY) for seed in range(2)]
    company = [request((2, 0), f"beside {i}", seed=i, max_tokens=12, **how) for i, how in enumerate(EVERY)]
    found = answers(local_engine(tiny_pair(), processed(config)), [*requests, *company])
    for one in requests:
        answer = found[one.request_id]
        expected = [log_law(answer.tokens[:t], 0.8, 3)[token].item() for t, token in enumerate(answer.tokens)]
        assert answer.logprobs == pytest.approx(expected, abs=2e-5)


def test_answers_follow_the_guided_law():
    """By enumeration. Plain decoding and rejection: by chi-square, and by the likelihood ratio that separates the
    distribution from that without guidance. SMC: E[Z-hat] = 1. Six cases at 4.5 standard deviations: one false alarm in
    24,000 choices of seeds. Many particles come close to the distribution."""
    config, law = ENDS[1], law_of(lambda prefix: log_law(prefix, 1.0, 4).tolist(), 4, EOS)
    plain = exact_law(tiny_pair().target, PROMPT, 4, EOS)
    assert sum(abs(law[answer] - plain[answer]) for answer in law) / 2 > 0.25

    def population(count: int, **params) -> list[Answer]:
        params["return_particles"] = True
        engine = local_engine(tiny_pair(), wide(config))
        return list(
            answers(engine, [asked(str(seed), seed=seed, max_tokens=4, **params) for seed in range(count)]).values()
        )

    for how in ({"method": "target"}, {"method": "exact", "verification": "rejection", "particles": 2}):
        found = [answer.tokens for answer in population(90, **how)]
        assert far_from(law, found) < 4.5
        assert likelier_elsewhere(law, plain, found) < 4.5 < likelier_elsewhere(plain, law, found)
    for how, near in ((DISTINCT, 0.22), (ALWAYS, 0.4)):
        found = population(50, particles=8, **how)
        mean, error = mean_and_error(evidence(found))
        assert abs(mean - 1) < 4.5 * error and error < 0.2
        assert distance(found, law) < near


@pytest.mark.parametrize("config", LOOKAHEAD_FIRST, ids=config_id)
def test_exact_decoding_is_plain_decoding_seed_by_seed(config):
    """Also with truncation, with trees of several sizes, and in shared batches. Answers differ from those without
    guidance."""
    rng = random.Random(config.block)
    more = ({}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"stop": ("ab", "cca")})
    laws = [
        {"seed": i, "max_tokens": rng.randint(1, 16), "guidance_scale": rng.choice((1.5, 4.0))} | rng.choice(more)
        for i in range(10)
    ]
    laws = [law | {"temperature": rng.choice((0.0, 0.7, 1.0, 1.5))} for law in laws]
    begins = [
        (tuple(rng.randrange(4) for _ in range(rng.randint(1, 8))), rng.choice((None, NEGATIVE, (0,) * 12)))
        for _ in laws
    ]
    particles = rng.choice((1, 4, 7))
    plain, exact = (
        [
            asked(str(i), negative, prompt, **how(i), **law)
            for i, (law, (prompt, negative)) in enumerate(zip(laws, begins))
        ]
        for how in (
            lambda _: {"method": "target"},
            lambda _: {"method": "exact", "particles": particles},
        )
    )
    company = [request((1, 2), f"beside {i}", seed=i, max_tokens=9, **how) for i, how in enumerate(EVERY)]
    expected, found = (
        answers(local_engine(tiny_pair(), config), plain),
        answers(local_engine(tiny_pair(), config), exact + company),
    )
    unguided = [replace(one, params=replace(one.params, guidance_scale=1), negative_prompt=None) for one in plain]
    others = answers(local_engine(tiny_pair(), config), unguided)
    for request_id, one in expected.items():
        other = found[request_id]
        assert (other.tokens, other.text, other.finish_reason) == (one.tokens, one.text, one.finish_reason)
    assert any(others[request_id].tokens != one.tokens for request_id, one in expected.items())


@pytest.mark.parametrize("config", LOCKSTEP_FIRST, ids=config_id)
def test_a_scale_of_1_is_no_guidance_and_costs_no_companion(config):
    requests = [request(request_id=str(i), seed=i, max_tokens=15, logprobs=True, **how) for i, how in enumerate(EVERY)]
    without, plans = local_engine(tiny_pair(), config), []
    expected = answers(without, requests)
    engine = local_engine(tiny_pair(), config)
    asks = engine.executor.round
    engine.executor.round = lambda plan: plans.append(plan) or asks(plan)
    found = answers(engine, [replace(one, params=replace(one.params, guidance_scale=1.0)) for one in requests])
    for request_id, one in expected.items():
        other = found[request_id]
        assert (other.tokens, other.logprobs, other.statistics) == (one.tokens, one.logprobs, one.statistics)
    assert plans and all(plan.target_unconditional is None for plan in plans)


@pytest.mark.parametrize("config", LOOKAHEAD_FIRST, ids=config_id)
def test_unconditional_rows_are_padded_separately(config, monkeypatch):
    """Unconditional rows of the target's pass: 5 guided particles of two requests beside 12 others add 5 rows, padded
    to 8; a guided request alone adds its own. There are never more of them than rows in the round."""
    engine = local_engine(tiny_pair(), config)
    asks, runs, found = engine.executor.round, StaticForward.__call__, []

    def counting(self, tokens_T, rows):
        plan, more = found[-1]
        side = next(side for side in ModelRole if self is engine.executor.runners[side]._forward)
        if side == "target":
            more.append(len(rows.tables.slot_R) - len(plan.arrays.slot_A))
        return runs(self, tokens_T, rows)

    monkeypatch.setattr(StaticForward, "__call__", counting)
    engine.executor.round = lambda plan: found.append((plan, [])) or asks(plan)
    law = {"method": "smc", "ignore_eos": True, "population": "independent"}
    requests = [
        asked("0", particles=3, max_tokens=16, **law),
        asked("1", particles=2, max_tokens=40, **law),
    ]
    company = [request((2, 0), f"beside {i}", seed=i, max_tokens=28, particles=4, **law) for i in range(3)]
    answers(engine, [company[0], requests[0], *company[1:], requests[1]])
    assert all(len(set(more)) == 1 for _, more in found)
    counts = {(int((plan.arrays.slot_A < engine.config.max_slots).sum()), more[0]) for plan, more in found}
    assert counts == {(17, 8), (14, 2), (2, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("config", ENDS[:1], ids=config_id)
def test_answers_do_not_depend_on_company_or_chunks(config):
    """The same answers alone, with prompt chunks of one token, and after a cached negative prompt. The last tokens of a
    prompt and its negative prompt run in one pass."""
    requests = [asked(str(i), (1, 0) * 20, seed=i, max_tokens=12, logprobs=True, **how) for i, how in enumerate(EVERY)]
    together = answers(local_engine(tiny_pair(), config), requests)
    engine = local_engine(tiny_pair(), config)
    alone = {one.request_id: answers_of_one(engine, one) for one in requests}
    drawn, chunked = [], local_engine(tiny_pair(), replace(config, prefill_chunk=1))
    runs = chunked.workers["target"].run_prompts
    chunked.workers["target"].run_prompts = lambda batch: drawn.append(batch) or runs(batch)
    for request_id, one in together.items():
        assert_same(alone[request_id], one)
    for request_id, one in answers(chunked, requests).items():
        assert_same(one, together[request_id])
    assert all((len(batch.starts_R) == 2 * len(batch.draws.seed_R)) for batch in drawn if batch.draws is not None)
    assert sum(batch.draws is None for batch in drawn) > 30


def answers_of_one(engine: Engine, one: Request) -> Answer:
    """Answer of an engine that keeps its prefix cache. Only the first request runs the negative prompt on the target;
    the draft never reuses it."""
    done = next(output.answer for output in engine.run([one]) if output.answer)
    hits = {side: cache.take_counts()[1] for side, cache in engine.memory.caches.items()}
    assert hits == {"target": 32 * (one.request_id != "0"), "draft": 32 * (int(one.request_id) > len(EVERY))}
    return done


@pytest.mark.parametrize(("config", "ahead"), one_of((ENDS[1], True), (ENDS[0], False)), ids=["ahead", "lockstep"])
def test_unconditional_rows_follow_their_particles(config, ahead, monkeypatch):
    """In pools too small for all requests: they are preempted, resized, cancelled and time out. Keys and values are
    right after every step, all pages are free afterwards, and undisturbed requests answer as with plenty of memory."""
    rng, clock = random.Random(6), iter(range(1 << 30))
    small = replace(config, max_slots=60, pages=640, prefill_chunk=24)
    requests = guided(random_requests(22, rng, longest=24, budgets=0.1), rng)
    engine = small_engine(small, monkeypatch, ahead=ahead, clock=lambda: float(next(clock)))
    written, seen = {side: TokensOfPages(engine, side) for side in ModelRole}, []
    chances = {"submit": 0.9, "cancel": 0.04, "resize": 0.8}
    lives = live(engine, requests, rng, **chances, after_step=lambda engine: seen.append(check_kv(engine, written)))
    assert_empty(engine)
    assert (engine.slots.unconditional_S < 0).all() and sum(seen) > 300
    missing = [
        event for event in ("cached", "preempted", "made smaller", "grown", "cancelled") if not lives.events[event]
    ]
    assert not missing, f"never happened: {missing}, of {lives.events}"
    untouched = [one for one in requests if lives.untouched(one.request_id)]
    assert sum(one.params.guided for one in untouched) > 4
    expected = answers_with_plenty_of_memory(small, untouched)
    for one in untouched:
        assert_same(lives.final[one.request_id], expected[one.request_id])


@pytest.mark.parametrize("config", LOCKSTEP_FIRST, ids=config_id)
def test_exact_decoding_goes_alone_and_comes_back_with_its_companion(config):
    law = {"seed": 4, "max_tokens": 40, "ignore_eos": True}
    expected = answers(local_engine(tiny_pair(), config), [asked(method="target", **law)])["r"]
    engine = local_engine(tiny_pair(), config)
    written = {side: TokensOfPages(engine, side) for side in ModelRole}
    engine.submit(asked(method="exact", particles=4, **law))
    changes = {3: engine.fallback.fall_back, 7: engine.fallback.reenable_draft, 12: engine.fallback.fall_back}
    steps = 0
    while not engine.idle:
        outputs, steps = engine.step(), steps + 1
        for group in running(engine):
            changes.get(steps, lambda _: None)(group)
        check_kv(engine, written)
    assert outputs[-1].answer.tokens == expected.tokens and outputs[-1].answer.statistics.alone_rounds > 0
    assert_empty(engine)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"guidance_scale": 0.9}, r"guidance_scale=0.9; allowed: 1 to 1000 \(1 = none\)"),
        ({"guidance_scale": math.inf}, "guidance_scale=inf; allowed: 1 to 1000"),
        ({"guidance_scale": math.nan}, "guidance_scale=nan; allowed: 1 to 1000"),
        ({"guidance_scale": True}, "guidance_scale=True; allowed: a number, 1 to 1000"),
        ({"method": "draft"}, "guidance_scale=2.5 has no effect with method='draft'"),
        ({"guidance_scale": 1}, "negative_prompt has no effect with guidance_scale=1"),
        ({"negative": ()}, "negative_prompt is empty"),
        (
            {"negative": (0,) * 40},
            "negative_prompt has 40 tokens, and max_tokens=30 after them exceeds the context of 64",
        ),
        ({"negative": (0, 9)}, r"negative_prompt contains token id 9; allowed: 0\.\.3"),
        (
            {"method": "smc", "particles": 40},
            "particles=40; this engine has max_slots=64, and a guided one takes two for each",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(given, says):
    with pytest.raises(ValueError, match=says):
        local_engine(tiny_pair(), FORMS[2]).submit(asked(**({"max_tokens": 30} | given)))


def test_the_longest_answer_leaves_room_for_the_negative_prompt():
    from smc.scheduler.capacity import longest_answer

    params = SamplingParams(method="smc", guidance_scale=2)
    assert longest_answer(params, FORMS[2], {}, 64, 10, negative=40) == 24
