"""Requests from submission to answer: streaming, batching, prefill in chunks, budgets, cancellation, bad input."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from smc.api.engine_config import EngineConfig
from smc.api.request import FinishReason, Request
from smc.api.sampling_params import SamplingParams
from smc.local_engine import ModelPair, local_engine
from tests.scheduler.harness import (
    CASES,
    FORMS,
    LOCKSTEP_FIRST,
    LOOKAHEAD_FIRST,
    answer,
    answers,
    assert_empty,
    config_id,
    request,
    step_through,
    workers,
)
from tests.scheduler.pairs import next_log_probs, tiny_pair

LETTER = {"a": 0, "b": 1, "c": 2}
EOS = 3


@pytest.mark.parametrize("config", LOOKAHEAD_FIRST, ids=config_id)
def test_a_streamed_prefix_is_never_taken_back(config):
    """The streamed pieces, joined, are the answer, and some are streamed before the end."""
    engine = local_engine(tiny_pair(), config)
    params = {"max_tokens": 24, "ignore_eos": True, "stop": ("abca", "cc")}
    for i in range(30):
        engine.submit(
            Request(
                str(i), (0, 1), SamplingParams(method="smc", particles=1 + i % 5, seed=i, ess_threshold=1.0, **params)
            )
        )
    streamed: dict[str, list] = {str(i): [] for i in range(30)}
    for output in step_through(engine, lambda _: None):
        streamed[output.request_id].append(output)
    for outputs in streamed.values():
        final = outputs[-1].answer
        assert tuple(itertools.chain(*(o.tokens for o in outputs))) == final.tokens
        assert "".join(o.text for o in outputs) == final.text
        assert not any(stop in final.text for stop in ("abca", "cc"))
    assert sum(len(outputs) > 1 for outputs in streamed.values()) >= 10
    assert {outputs[-1].answer.finish_reason for outputs in streamed.values()} == {
        FinishReason.STOP_STRING,
        FinishReason.LENGTH,
    }


@pytest.mark.parametrize("config", LOCKSTEP_FIRST, ids=config_id)
def test_an_answer_does_not_depend_on_company(config):
    """The same seeds give the same answers alone, in a batch, in another order, and with prompts cut into chunks."""
    requests = [
        Request(
            str(i),
            tuple(j % 3 for j in range(i, i + 1 + i % 7)),
            SamplingParams(method="smc", particles=1 + i % 6, seed=i, max_tokens=4 + i, ess_threshold=1.0),
        )
        for i in range(6)
    ]
    alone = {r.request_id: answers(local_engine(tiny_pair(), config), [r])[r.request_id] for r in requests}
    crowd = answers(local_engine(tiny_pair(), config), requests)
    chunked = answers(local_engine(tiny_pair(), replace(config, prefill_chunk=2, max_slots=10)), reversed(requests))
    for r in requests:
        for other in (crowd, chunked):
            assert other[r.request_id].tokens == alone[r.request_id].tokens
            assert other[r.request_id].statistics.log_z == pytest.approx(alone[r.request_id].statistics.log_z, abs=1e-3)


def test_seeds_reproduce_and_differ():
    first, again, other = (
        answer(tiny_pair(), FORMS[2], seed=s, particles=4, max_tokens=12, ignore_eos=True) for s in (7, 7, 8)
    )
    assert first.tokens == again.tokens != other.tokens
    unseeded = answer(tiny_pair(), FORMS[2], particles=4, max_tokens=12, ignore_eos=True)
    assert (
        answer(tiny_pair(), FORMS[2], seed=unseeded.seed, particles=4, max_tokens=12, ignore_eos=True).tokens
        == unseeded.tokens
    )


@pytest.mark.parametrize("config", LOOKAHEAD_FIRST, ids=config_id)
def test_stop_strings_and_ids(config):
    """A stop string may span tokens and blocks. A stop token stays in `tokens`; its text is left out."""
    a = answer(tiny_pair(), config, particles=3, seed=3, max_tokens=40, ignore_eos=True, stop=("ca", "never in it"))
    assert a.finish_reason is FinishReason.STOP_STRING and a.matched == "ca"
    visible = [t for t in a.tokens if t != EOS]
    assert visible[-2:] == [LETTER["c"], LETTER["a"]] and a.tokens[-1] == LETTER["a"]
    assert a.text == "".join("abc"[t] for t in visible[:-2]) and "ca" not in a.text
    a = answer(
        tiny_pair(),
        config,
        particles=3,
        seed=3,
        max_tokens=40,
        ignore_eos=True,
        stop_token_ids=[LETTER["c"], LETTER["b"]],
    )
    assert a.finish_reason is FinishReason.STOP_TOKEN and a.matched == a.tokens[-1] in (1, 2)
    assert a.text == "a" * (len(a.tokens) - 1)
    everything = tuple(range(4))
    assert len(answer(tiny_pair(), config, particles=3, seed=3, stop_token_ids=everything, max_tokens=40).tokens) == 1


def test_greedy_target_follows_the_argmax():
    a = answer(tiny_pair(), FORMS[0], method="target", temperature=0, max_tokens=10, ignore_eos=True)
    tokens = [0, 1, 2]
    for _ in range(10):
        tokens.append(int(next_log_probs(tiny_pair().target, tokens).argmax()))
    assert a.tokens == tuple(tokens[3:])


def test_a_long_prompt_does_not_stop_the_others():
    """With chunks of 4 tokens a prompt of 40 takes ten steps. A running request has a round in each of them; the prompt
    of a later request follows."""
    engine = local_engine(tiny_pair(), EngineConfig(form="lockstep", block=2, prefill_chunk=4, prefix_cache=False))

    def submit(request_id: str, prompt: list[int], max_tokens: int) -> None:
        engine.submit(request(prompt, request_id, particles=2, seed=0, max_tokens=max_tokens, ignore_eos=True))

    def steps_to_answers() -> dict[str, int]:
        found, steps = {}, 0
        while not engine.idle:
            steps += 1
            found |= {output.request_id: steps for output in engine.step() if output.answer}
        return found

    submit("alone", [0], 20)
    alone = steps_to_answers()["alone"]
    submit("first", [0], 20)
    engine.step()
    submit("long", [0, 1] * 20, 4)
    submit("later", [0], 4)
    assert steps_to_answers() == {"first": alone - 1, "long": 11, "later": 12} and alone - 1 < 11
    assert_empty(engine)


def test_waiting_for_room_is_in_order():
    """With slots for one request at a time, all are answered in order of submission."""
    engine = local_engine(tiny_pair(), EngineConfig(block=2, max_slots=4))
    found = [
        o.answer
        for o in engine.run(request(request_id=str(i), particles=4, seed=i, max_tokens=5) for i in range(6))
        if o.answer
    ]
    assert [a.request_id for a in found] == [str(i) for i in range(6)]
    assert_empty(engine)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("config", LOCKSTEP_FIRST, ids=config_id)
def test_time_budget_answers_with_what_exists(config):
    """The first step after the budget ends the request. Its answer is a particle with weight, as far as the target has
    scored it; other requests go on."""
    clock = Clock()
    engine = local_engine(tiny_pair(), config, clock=clock)
    shared = {"particles": 4, "max_tokens": 40, "ignore_eos": True}
    weighted = {"population": "independent", "ess_threshold": 0.0, "return_particles": True}
    engine.submit(request(request_id="slow", seed=1, time_budget=2.5, **shared, **weighted))
    engine.submit(request(request_id="free", seed=2, **shared))
    outputs, times = [], {}
    while not engine.idle:
        new = engine.step()
        outputs += new
        times |= {output.request_id: clock.now for output in new if output.answer}
        clock.now += 1.0
    final = {o.request_id: o.answer for o in outputs if o.answer}
    assert final["slow"].finish_reason is FinishReason.TIME_BUDGET and times["slow"] == 3.0
    assert tuple(itertools.chain(*(o.tokens for o in outputs if o.request_id == "slow"))) == final["slow"].tokens
    scored_blocks = 2 if config.form == "lockstep" else 1  # in the other form a block is scored a round later
    particles = final["slow"].particles
    assert {len(particle.tokens) for particle in particles} == {1 + scored_blocks * (config.block + 1)}
    weights = [particle.weight for particle in particles]
    assert sum(weights) == pytest.approx(1) and len(set(weights)) == 4
    assert final["slow"].tokens in {particle.tokens for particle in particles}
    assert final["free"].finish_reason is FinishReason.LENGTH and len(final["free"].tokens) == 40
    assert_empty(engine)


def test_time_budget_spent_in_the_queue():
    clock = Clock()
    engine = local_engine(tiny_pair(), EngineConfig(block=2, max_slots=4), clock=clock)
    engine.submit(request(request_id="first", particles=4, seed=1, max_tokens=40, ignore_eos=True))
    engine.submit(request(request_id="second", particles=4, seed=1, max_tokens=40, time_budget=1.0))
    engine.step()
    clock.now = 5.0
    (final,) = [o.answer for o in engine.step() if o.answer]
    assert final.request_id == "second" and final.finish_reason is FinishReason.QUEUE_TIME and final.tokens == ()


@pytest.mark.parametrize("config", LOOKAHEAD_FIRST, ids=config_id)
def test_cancel_at_any_moment(config):
    engine = local_engine(tiny_pair(), replace(config, prefill_chunk=4))
    expected = answer(tiny_pair(), config, particles=3, seed=2, max_tokens=12, ignore_eos=True).tokens
    for steps in range(6):
        engine.submit(request([0, 1] * 4, "gone", particles=4, seed=1, max_tokens=30, ignore_eos=True))
        engine.submit(request(request_id="stays", particles=3, seed=2, max_tokens=12, ignore_eos=True))
        outputs = [o for _ in range(steps) for o in engine.step()]
        assert engine.abort("gone") and not engine.abort("gone") and not engine.abort("unknown")
        outputs += step_through(engine, lambda _: None)
        final = {o.request_id: o.answer for o in outputs if o.answer}
        assert final["gone"].finish_reason is FinishReason.CANCELLED
        assert final["stays"].tokens == expected
        assert_empty(engine)


@pytest.mark.parametrize(("config", "side"), [(CASES[0], "draft"), (CASES[1], "target")], ids=["draft", "target"])
def test_nan_logits_end_one_request_with_an_error(config, side):
    """One token's embedding is NaN: the request that contains the token fails with an error that names the model; the
    other request is unaffected."""
    pair = tiny_pair(5)
    broken = {s: type(getattr(pair, s))(getattr(pair, s).config) for s in ("draft", "target")}
    for s, model in broken.items():
        model.load_state_dict(getattr(pair, s).state_dict())
        model.requires_grad_(False).eval()
    broken[side].embed.weight[3] = float("nan")
    engine = local_engine(ModelPair(broken["target"], broken["draft"], pair.tokenizer, pair.max_context), config)
    good = {"particles": 3, "seed": 2, "max_tokens": 9, "stop_token_ids": (3,)}
    found = answers(
        engine,
        [request([0, 3, 1], "bad", particles=4, seed=1, max_tokens=9), request([0, 1], "good", **good)],
    )
    assert found["bad"].finish_reason is FinishReason.ERROR
    assert f"{side} model returned NaN" in found["bad"].error
    assert found["good"].error is None
    assert found["good"].tokens == answers(local_engine(pair, config), [request([0, 1], "good", **good)])["good"].tokens


@pytest.mark.parametrize(
    "params,field",
    [
        ({"method": "smc", "particles": 0}, "particles"),
        ({"method": "smc", "particles": 65}, "particles"),
        ({"method": "smc", "particles": 2.5}, "particles"),
        ({"method": "smc", "temperature": 0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"draft_temperature": 0}, "draft_temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": 1}, "min_p"),
        ({"method": "smc", "alpha": 0}, "alpha"),
        ({"method": "smc", "ess_threshold": 1.5}, "ess_threshold"),
        ({"method": "smc", "resampling": "bootstrap"}, "resampling"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stop": "text"}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": [3]}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"time_budget": 0}, "time_budget"),
        ({"method": "beam"}, "method"),
        ({"method": "target", "particles": 4}, "particles"),
        ({"method": "target", "alpha": 2.0}, "alpha"),
        ({"method": "draft", "ess_threshold": 0.5}, "ess_threshold"),
        ({"method": "target", "draft_temperature": 1.0}, "draft_temperature"),
    ],
)
def test_bad_parameters_are_refused_by_name(params, field):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**params)


@pytest.mark.parametrize(
    "settings,field",
    [
        ({"block": 0}, "block"),
        ({"block": 33}, "block"),
        ({"branches": 0}, "branches"),
        ({"form": "both"}, "form"),
        ({"form": "lockstep", "branches": 2}, "branches"),
        ({"max_slots": 0}, "max_slots"),
        ({"pages": 0}, "pages"),
        ({"defensive_share": 0}, "defensive_share"),
        ({"max_context": 10_000}, "max_context"),
    ],
)
def test_bad_engine_settings_are_refused_by_name(settings, field):
    with pytest.raises(ValueError, match=field):
        local_engine(tiny_pair(), EngineConfig(**settings))


@pytest.mark.parametrize(
    "prompt,params,message",
    [
        ((), {}, "the prompt is empty"),
        ((0,) * 64, {}, "at most 63"),
        ((0,) * 60, {"max_tokens": 5}, "max_tokens <= 4"),
        ((4,), {}, "token id 4; allowed: 0..3"),
        ((-1,), {}, "token id -1"),
        ((0,), {"method": "smc", "particles": 33}, "max_slots=32"),
        ((0,), {"method": "smc", "particles": 32, "max_tokens": 60}, "KV pages"),
        ((0,), {"stop_token_ids": [4]}, "stop_token_ids contains 4"),
    ],
)
def test_what_can_never_run_is_refused_at_submission(prompt, params, message):
    engine = local_engine(tiny_pair(), EngineConfig(max_slots=32, pages=1000))
    with pytest.raises(ValueError, match=message):
        engine.submit(request(prompt, **{"max_tokens": 8, **params}))
    assert engine.idle
    assert_empty(engine)


def test_a_request_id_in_use_is_refused():
    engine = local_engine(tiny_pair(), FORMS[0])
    engine.submit(request(max_tokens=4))
    with pytest.raises(ValueError, match="request_id='r' is already in use"):
        engine.submit(request(max_tokens=4))


def test_no_gradient_and_no_thread_state_is_left():
    engine = local_engine(tiny_pair(), FORMS[2])
    answers(engine, [request(max_tokens=6, particles=2)])
    assert torch.is_grad_enabled()
    assert all(not p.requires_grad for w in workers(engine).values() for p in w.model.parameters())
