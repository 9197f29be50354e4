"""By default, reported log-probabilities are those of the softmax of the target's own logits, whatever a request
changes about the distribution that its tokens are drawn from. With `logprobs_mode` they are those of that distribution.
The answers are the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from smc.api.engine_config import EngineConfig
from smc.api.request import Answer, Request
from smc.local_engine import local_engine
from tests.scheduler.harness import CASES, LOOKAHEAD_FIRST, answers, config_id, request
from tests.scheduler.pairs import next_log_probs, tiny_pair

PROMPT, NEGATIVE = (0, 1, 2), (2, 1, 1, 0, 2)
EVERY = [
    {"particles": 6, "ess_threshold": 1.0, "temperature": 0.7},
    {"particles": 4, "population": "independent", "top_k": 2},
    {"particles": 3, "alpha": 1.5, "answer": "best", "temperature": 1.3},
    {"particles": 4, "population": "independent", "presence_penalty": 1.0, "repetition_penalty": 1.4},
    {"method": "target", "temperature": 0.0},
    {"method": "target", "top_p": 0.5},
    {"method": "target", "logit_bias": {1: 3.0, 2: -3}, "min_tokens": 6},
    {"method": "target", "guidance_scale": 2.5},
    {"method": "target", "constraint": {"regex": "(ab|c)+"}},
    {"method": "exact", "particles": 3, "temperature": 0.0},
    {"method": "exact", "particles": 3, "temperature": 0.8, "top_p": 0.9},
    {"method": "exact", "particles": 2, "guidance_scale": 1.7, "logit_bias": {0: 1.0}},
    {"method": "exact", "particles": 3, "verification": "rejection", "temperature": 0.6},
    {"method": "exact", "particles": 2, "bad_words": ("ab",), "frequency_penalty": 0.5},
    {"particles": 3, "constraint": {"regex": "(ab|c)+"}, "constraint_scope": "answer"},
]
REPORTS_TOKENS_ALONE = ("penalty", "constraint", "bad_words")
"""Settings, by the ends of their names, that cannot be combined with `top_logprobs`."""


def asked(number: int, **more) -> Request:
    how = EVERY[number]
    count = 0 if any(name.endswith(REPORTS_TOKENS_ALONE) for name in how) else 3
    asks = {"seed": number, "max_tokens": 14, "logprobs": True, "top_logprobs": count, "prompt_logprobs": 2}
    one = request(PROMPT, str(number), **asks | how | more)
    return replace(one, negative_prompt=NEGATIVE) if one.params.guided else one


@torch.inference_mode()
def laws(tokens: tuple[int, ...]) -> list[torch.Tensor]:
    """Log-probabilities of the target alone [V] before every token of an answer."""
    return [next_log_probs(tiny_pair().target, (*PROMPT, *tokens[:t])).log_softmax(-1) for t in range(len(tokens))]


def assert_raw(answer: Answer) -> None:
    found = laws(answer.tokens)
    own = [float(law_V[token]) for token, law_V in zip(answer.tokens, found)]
    assert answer.logprobs == pytest.approx(own, abs=2e-5)
    for likeliest, law_V in zip(answer.top_logprobs or (), found):
        value_C, token_C = law_V.topk(3)
        assert [token for token, _ in likeliest] == token_C.tolist()
        assert [value for _, value in likeliest] == pytest.approx(value_C.tolist(), abs=2e-5)


@pytest.mark.parametrize("config", CASES, ids=config_id)
def test_every_setting_reports_the_targets_own_law(config):
    engine = local_engine(tiny_pair(), replace(config, max_slots=128))
    found = answers(engine, [asked(number) for number in range(len(EVERY))])
    for number in range(len(EVERY)):
        assert found[str(number)].tokens
        assert_raw(found[str(number)])


@pytest.mark.parametrize("config", CASES, ids=config_id)
def test_answers_do_not_depend_on_the_mode(config):
    """Weights and the choice of the best answer stay those of the distribution that tokens are drawn from."""
    raw, processed = (
        answers(
            local_engine(tiny_pair(), replace(config, max_slots=128, logprobs_mode=mode)),
            [asked(number) for number in range(len(EVERY))],
        )
        for mode in ("raw", "processed")
    )
    for request_id, one in raw.items():
        other = processed[request_id]
        assert (one.tokens, one.text, one.statistics.log_z) == (other.tokens, other.text, other.statistics.log_z)
        scores, expected = ([token.logprob for token in each.prompt_logprobs] for each in (one, other))
        assert scores == pytest.approx(expected, abs=2e-6)
    for number in (4, 9):
        assert set(processed[str(number)].logprobs) == {0.0} and min(raw[str(number)].logprobs) < 0


@pytest.mark.parametrize("config", LOOKAHEAD_FIRST, ids=config_id)
def test_after_preemption_and_beside_requests_that_ask_for_nothing(config):
    """Log-probabilities of the first tokens are in the checkpoint."""
    engine = local_engine(tiny_pair(), replace(config, max_slots=64))
    requests = [asked(number, max_tokens=30, ignore_eos=True) for number in (0, 1, 5, 10)]
    beside = [request(PROMPT, f"beside {n}", seed=n, max_tokens=30, ignore_eos=True, particles=2) for n in range(2)]
    for one in (*requests, *beside):
        engine.submit(one)
    found = {}
    for step in range(400):
        if step in (4, 9):
            for group in list(engine.registry.admitted):
                if group.is_running and not group.in_flight:
                    engine.registry.preempt(group)
        found |= {output.request_id: output.answer for output in engine.step() if output.answer}
        if engine.idle:
            break
    assert len(found) == 6 and any(one.statistics.preemptions for one in found.values())
    for one in requests:
        assert len(found[one.request_id].tokens) == 30
        assert_raw(found[one.request_id])
    assert all(found[one.request_id].logprobs is None for one in beside)


def test_prompts_are_scored_alike_whatever_else_is_asked():
    """Bit for bit: with and without truncation, temperature, penalties, and beside other requests."""
    reports = {"logprobs": True, "top_logprobs": 2}
    beside = request((1, 2, 0, 0, 1), "beside", seed=1, max_tokens=5, top_k=2, **reports)
    for mode in ("raw", "processed"):
        config, found = EngineConfig(block=3, logprobs_mode=mode), set()
        for more in ({}, {"top_k": 2}, {"top_p": 0.5, "temperature": 0.3}, {"min_p": 0.2, "logprobs": True}):
            for company in ([], [beside]):
                one = request((2, 2, 1, 0, 1), "one", seed=3, max_tokens=3, prompt_logprobs=2, **more)
                answer = answers(local_engine(tiny_pair(), config), [one, *company])["one"]
                found.add(tuple(np.float32(token.logprob).tobytes() for token in answer.prompt_logprobs))
        assert len(found) == 1


def test_refused():
    with pytest.raises(ValueError, match="logprobs_mode='both'; allowed: raw, processed"):
        EngineConfig(logprobs_mode="both")
