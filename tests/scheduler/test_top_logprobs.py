"""`top_logprobs` are the most probable tokens of the target's distribution at each position, recomputed from the tokens
alone, here under the distribution that tokens are drawn from (`processed`). Computing them changes no answer, whatever
happens in the engine meanwhile. `test_raw_logprobs.py` is about the default."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from smc.api.engine_config import EngineConfig
from smc.api.request import Alternatives, FinishReason, Request
from smc.api.sampling_params import SamplingParams
from smc.executor import worker as tops
from smc.local_engine import local_engine
from smc.scheduler.engine import Engine
from smc.scheduler.sequence_group import RequestState
from tests.scheduler.harness import FORMS, LOOKAHEAD_FIRST, answers, assert_empty, config_id, processed, request
from tests.scheduler.pairs import next_log_probs, tiny_pair
from tests.scheduler.random_histories import (
    answers_with_plenty_of_memory,
    assert_same,
    guided,
    live,
    random_requests,
    small_engine,
)

PROMPT, NEGATIVE, EOS = (0, 1, 2), (2, 1, 1, 0, 2), 3
EVERY = [
    {"method": "smc", "particles": 6, "ess_threshold": 1.0},
    {"method": "smc", "particles": 4, "population": "distinct", "temperature": 0.7, "top_k": 2},
    {"method": "smc", "particles": 3, "alpha": 1.5},
    {"method": "target", "temperature": 1.3},
    {"method": "exact", "particles": 3, "temperature": 0.8, "top_p": 0.9},
    {"method": "exact", "particles": 3, "verification": "rejection"},
    {"method": "exact", "temperature": 0},
    {"method": "target", "min_tokens": 6, "logit_bias": {1: 1.5, 2: -3}},
    {"method": "smc", "particles": 3, "guidance_scale": 2.5},
    {"method": "exact", "particles": 2, "guidance_scale": 1.7, "min_tokens": 4, "top_k": 3},
]


def asked(number: int, prompt: tuple[int, ...] = PROMPT, **more) -> Request:
    """Request number `number` of `EVERY`, with `top_logprobs`."""
    how = EVERY[number % len(EVERY)]
    one = request(
        prompt, str(number), **({"seed": number, "max_tokens": 14, "logprobs": True, "top_logprobs": 3} | how | more)
    )
    return replace(one, negative_prompt=NEGATIVE) if one.params.guided else one


@torch.inference_mode()
def law(one: Request, before: tuple[int, ...]) -> torch.Tensor:
    """log p [V] of the token after `before`: the formula in float64."""
    params, target = one.params, tiny_pair().target
    logits_V = next_log_probs(target, (*one.prompt, *before))
    if params.guided:
        theirs_V = next_log_probs(target, (*one.negative_prompt, *before))
        logits_V = theirs_V + params.guidance_scale * (logits_V - theirs_V)
    for token, bias in params.logit_bias:
        logits_V[token] += bias
    if len(before) < params.min_tokens:
        logits_V[EOS] = -torch.inf
    if not params.temperature:
        return torch.where(torch.arange(len(logits_V)) == logits_V.argmax(), 0.0, -torch.inf)
    law_V = (logits_V / params.temperature).log_softmax(-1)
    sorted_V = law_V.sort(descending=True).values
    keep_V = law_V >= sorted_V[(params.top_k or len(law_V)) - 1]
    keep_V &= law_V >= sorted_V[sorted_V.exp().cumsum(0) - sorted_V.exp() < params.top_p][-1]
    return law_V.where(keep_V, -torch.inf).log_softmax(-1)


def likeliest(law_V: torch.Tensor, count: int) -> Alternatives:
    sorted_V = law_V.sort(descending=True)
    tokens = zip(sorted_V.indices.tolist()[:count], sorted_V.values.tolist())
    return tuple((token, logp) for token, logp in tokens if logp > -torch.inf)


def assert_right(one: Request, answer) -> None:
    """The reported tokens, and `logprobs` of the answer's own, likeliest or not, are those of the formula."""
    assert answer.tokens and len(answer.top_logprobs) == len(answer.tokens)
    laws = [law(one, answer.tokens[:t]) for t in range(len(answer.tokens))]
    for found, law_V in zip(answer.top_logprobs, laws):
        expected = likeliest(law_V, one.params.top_logprobs)
        assert [token for token, _ in found] == [token for token, _ in expected]
        assert [logp for _, logp in found] == pytest.approx([logp for _, logp in expected], abs=2e-5)
    own = [float(law_V[token]) for token, law_V in zip(answer.tokens, laws)]
    assert answer.logprobs == pytest.approx(own, abs=2e-5)


@pytest.mark.parametrize("config", LOOKAHEAD_FIRST, ids=config_id)
def test_every_method_reports_the_targets_law(config, monkeypatch):
    """In one engine at once, with a prefix cache and with chunks that cut prompts and answers. Requests without
    `top_logprobs` in the batch are unaffected."""
    monkeypatch.setattr(tops, "SLICE", 5)
    requests = [asked(i, (*PROMPT, *[i % 3] * (i % 7 * 5)), ignore_eos=i % 2 == 0) for i in range(len(EVERY))]
    company = [request((2, 0), f"beside {i}", seed=i, max_tokens=12, **how) for i, how in enumerate(EVERY[:7])]
    found = answers(local_engine(tiny_pair(), replace(processed(config), prefill_chunk=13)), [*requests, *company])
    for one in requests:
        assert_right(one, found[one.request_id])
    quiet = [replace(one, params=replace(one.params, top_logprobs=0)) for one in requests]
    for request_id, one in answers(local_engine(tiny_pair(), processed(config)), [*quiet, *company]).items():
        assert one.top_logprobs is None and (one.tokens, one.text) == (found[request_id].tokens, found[request_id].text)


@pytest.mark.parametrize("chunk", [1, 8])
def test_no_step_runs_more_than_a_chunk(chunk):
    """Also for a long prompt that is not cached. Both rows of a guided request advance by at least one token."""
    config = processed(EngineConfig(block=2, prefill_chunk=chunk, prefix_cache=False))
    engine, sizes = local_engine(tiny_pair(), config), []
    ask = engine.workers["target"].run_prompts
    engine.workers["target"].run_prompts = lambda batch: sizes.append(len(batch.tokens_T)) or ask(batch)
    requests = [asked(3, (0, 1) * 15), asked(8, (1, 2) * 9)]
    for request_id, answer in answers(engine, requests).items():
        assert_right(next(one for one in requests if one.request_id == request_id), answer)
    assert max(sizes) <= max(chunk, 2) and len(sizes) > 100 / chunk


def test_the_prompt_is_not_run_again():
    """Whole blocks of the prompt come from the prefix cache; the answer runs once more."""
    engine, sizes = local_engine(tiny_pair(), processed(EngineConfig(block=2))), []
    ask = engine.workers["target"].run_prompts
    engine.workers["target"].run_prompts = lambda batch: sizes.append(len(batch.tokens_T)) or ask(batch)
    one = asked(3, (0, 1) * 20, max_tokens=9, ignore_eos=True)
    assert_right(one, answers(engine, [one])["3"])
    assert sizes == [40, 40 - 32 + 8]


def test_top_logprobs_in_random_histories(monkeypatch):
    """In pools too small for all requests: they are preempted, cancelled while running and while rescored, and time
    out; all pages are free afterwards. Every second request has its prompt scored as well."""
    rng, ticks, seen = random.Random(6), iter(range(1 << 30)), set()
    config = processed(EngineConfig(form="lookahead", block=3, branches=2, max_slots=60, pages=560, prefill_chunk=24))
    requests = [
        replace(
            one, params=replace(one.params, logprobs=True, top_logprobs=2, prompt_logprobs=1 if number % 2 else None)
        )
        if one.params.method != "draft"
        else one
        for number, one in enumerate(guided(random_requests(15, rng, longest=16, budgets=0.1), rng))
    ]
    engine = small_engine(config, monkeypatch, ahead=True, clock=lambda: float(next(ticks)))

    def disturb(engine: Engine) -> None:
        for group in [g for g in engine.registry.groups.values() if g.state is RequestState.RESCORING]:
            seen.add(engine.prefill.answer_of(group).finish_reason)
            if rng.random() < 0.1:
                engine.abort(group.id)
                seen.add("cancelled")

    lives = live(engine, requests, rng, submit=0.9, cancel=0.02, after_step=disturb)
    assert_empty(engine)
    assert "cancelled" in seen and lives.events["preempted"]
    untouched = [one for one in requests if lives.untouched(one.request_id)]
    assert sum(bool(one.params.top_logprobs) for one in untouched) > 5
    expected = answers_with_plenty_of_memory(config, untouched)
    for one in untouched:
        assert_same(lives.final[one.request_id], expected[one.request_id])
    cancelled = [answer for answer in lives.final.values() if answer.finish_reason is FinishReason.CANCELLED]
    assert cancelled and all(answer.top_logprobs is answer.prompt_logprobs is None for answer in cancelled)
    assert sum(lives.final[one.request_id].prompt_logprobs is not None for one in untouched) > 2


@pytest.mark.parametrize("preempted", [False, True])
def test_rescoring_follows_a_time_out(preempted):
    """For a running and for a preempted request: rescoring follows the time-out, and every token of the answer has its
    alternatives."""
    now, one = [0.0], asked(0, particles=1, max_tokens=40, ignore_eos=True, time_budget=1.0)
    engine = local_engine(
        tiny_pair(), processed(EngineConfig(block=8, branches=2, prefill_chunk=4)), clock=lambda: now[0]
    )
    engine.submit(one)
    for _ in range(2):  # the prompt, and a round
        engine.step()
    if preempted:
        engine.registry.preempt(engine.registry.groups["0"])
    now[0] = 2.0
    steps = [engine.step() for _ in range(5 if preempted else 3)]
    (output,) = [output for outputs in steps for output in outputs]
    assert_empty(engine)
    assert output.answer.finish_reason is FinishReason.TIME_BUDGET and output.answer.seconds == 2.0
    assert len(output.answer.tokens) >= 2
    assert_right(one, output.answer)


def rescored(engine: Engine, one: Request) -> None:
    """Submit `one` and step until it is in `RESCORING`."""
    engine.submit(one)
    while engine.registry.groups[one.request_id].state is not RequestState.RESCORING:
        engine.step()


def test_the_draft_may_be_lost_meanwhile_and_come_back():
    """Rescoring needs no draft, whatever the method; the request stays in `RESCORING`."""
    for number in (0, 4, 5):
        engine, one = local_engine(tiny_pair(), processed(FORMS[2])), asked(number)
        rescored(engine, one)
        assert engine.detach_draft() == []
        engine.attach_draft(engine.memory.capacity["draft"])
        group = engine.registry.groups[one.request_id]
        assert group.state is RequestState.RESCORING
        assert_right(one, next(output.answer for output in engine.run([]) if output.answer))
        assert_empty(engine)


def test_nan_ends_the_request_and_no_other():
    engine, one = local_engine(tiny_pair(), processed(FORMS[0])), asked(3, ignore_eos=True)
    rescored(engine, one)
    engine.submit(asked(4))
    worker = engine.workers["target"]
    own = worker.model.logits
    try:
        worker.model.logits = lambda hidden: own(hidden) * torch.nan if len(hidden) == 14 else own(hidden)
        done = {output.answer.request_id: output.answer for output in engine.run([]) if output.answer}
    finally:
        del worker.model.logits
    assert_empty(engine)
    assert done["3"].finish_reason is FinishReason.ERROR and done["3"].error.startswith(
        "the target model returned NaN logits"
    )
    assert_right(asked(4), done["4"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs=21; allowed: 0..20"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs=-1; allowed: 0..20"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs=True; allowed: an integer, 0..20"),
        ({"top_logprobs": 2}, "top_logprobs=2 has no effect without logprobs"),
        ({"method": "draft", "logprobs": True, "top_logprobs": 2}, "logprobs=True has no effect with method='draft'"),
    ],
)
def test_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings)
    assert SamplingParams(top_logprobs=0).top_logprobs == 0


def test_time_that_is_up_while_one_waits_for_memory(monkeypatch):
    """The preempted request was refused the pages that it needs to resume; rescoring its answer needs fewer."""
    now, config = [0.0], EngineConfig(block=3, branches=2, pages=330, max_slots=16, max_context=128)
    engine = small_engine(config, monkeypatch, ahead=False, clock=lambda: now[0])
    law = {"method": "smc", "max_tokens": 50, "ignore_eos": True, "ess_threshold": 0}
    engine.submit(request(PROMPT, "old", seed=1, particles=5, **law))
    engine.submit(request(PROMPT, "young", seed=2, particles=3, logprobs=True, top_logprobs=2, time_budget=5.0, **law))
    found = {}
    while not engine.idle:
        group = engine.registry.groups.get("young")
        if group and group.checkpoint is not None:
            now[0] = 6.0
        found |= {output.request_id: output.answer for output in engine.step() if output.answer}
    assert_empty(engine)
    young = found["young"]
    assert (young.finish_reason, found["old"].finish_reason) == (FinishReason.TIME_BUDGET, FinishReason.LENGTH)
    assert young.statistics.preemptions and len(young.top_logprobs) == len(young.tokens) > 0


def test_rescoring_requests_do_not_count_as_queued():
    engine = local_engine(tiny_pair(), EngineConfig(block=3, branches=2, max_queue=2))
    for number in range(2):
        engine.submit(replace(asked(3, ignore_eos=True, max_tokens=8), request_id=str(number)))
    while not all(group.state is RequestState.RESCORING for group in engine.registry.groups.values()):
        engine.step()
    for number in range(2):
        engine.submit(request((0, 1), f"new {number}", max_tokens=4))
    answers(engine, [])
    assert_empty(engine)


def test_rescoring_forecast_is_the_answer_length():
    engine = local_engine(tiny_pair(), EngineConfig(block=3, branches=2, pages=1000, max_context=64))
    one = request(
        PROMPT, "short", seed=3, max_tokens=60, method="target", logprobs=True, top_logprobs=2, stop_token_ids=(0, 1, 2)
    )
    rescored(engine, one)
    assert len(engine.prefill.answer_of(engine.registry.groups["short"]).tokens) == 1
    engine.prefill.admit_rescoring()
    assert engine.memory.expected["target"] <= len(PROMPT) + 1
    answers(engine, [])
    assert_empty(engine)
