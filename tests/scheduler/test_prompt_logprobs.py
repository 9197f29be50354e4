"""Log-probabilities of a prompt equal those of a plain pass of the target over it, for all settings, methods, chunk
sizes and states of the prefix cache. `test_top_logprobs.py` covers preemption and other events."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.executor import worker
from smc.local_engine import local_engine
from tests.scheduler.harness import LOOKAHEAD_FIRST, answers, config_id, request
from tests.scheduler.pairs import next_log_probs, tiny_pair, tokenizer_of

PROMPT = (0, 1, 2, 2, 1, 0, 0, 2)
EVERY = [
    {"method": "smc", "particles": 6, "ess_threshold": 1.0, "temperature": 0.7},
    {"method": "smc", "particles": 4, "population": "distinct", "top_k": 2},
    {"method": "smc", "particles": 3, "alpha": 1.5, "repetition_penalty": 1.4},
    {"method": "target", "temperature": 1.3, "logprobs": True, "top_logprobs": 3},
    {"method": "exact", "particles": 3, "temperature": 0.8, "top_p": 0.9},
    {"method": "exact", "temperature": 0, "logprobs": True, "top_logprobs": 1},
    {"method": "target", "min_tokens": 6, "logit_bias": {1: 1.5, 2: -3}, "logprobs": True, "top_logprobs": 2},
    {"method": "smc", "particles": 3, "guidance_scale": 2.5},
    {"method": "exact", "particles": 2, "guidance_scale": 1.7, "logprobs": True, "top_logprobs": 2},
    {"method": "target", "constraint": {"regex": "[ab]+"}},
]


def asked(number: int, prompt: tuple[int, ...] = PROMPT, **more) -> Request:
    how = EVERY[number % len(EVERY)]
    one = request(prompt, str(number), **({"seed": number, "max_tokens": 9, "prompt_logprobs": 2} | how | more))
    return replace(one, negative_prompt=(2, 1, 1)) if one.params.guided else one


@torch.inference_mode()
def assert_right(one: Request, answer) -> None:
    assert len(answer.prompt_logprobs) == len(one.prompt) - 1
    for at, found in enumerate(answer.prompt_logprobs, 1):
        logp_V = next_log_probs(tiny_pair().target, one.prompt[:at]).log_softmax(-1)
        assert found.logprob == pytest.approx(float(logp_V[one.prompt[at]]), abs=2e-5)
        assert found.rank == int((logp_V >= logp_V[one.prompt[at]]).sum())
        value_C, token_C = logp_V.topk(one.params.prompt_logprobs)
        assert [token for token, _ in found.likeliest] == token_C.tolist()
        assert [logp for _, logp in found.likeliest] == pytest.approx(value_C.tolist(), abs=2e-5)


@pytest.mark.parametrize("config", LOOKAHEAD_FIRST, ids=config_id)
def test_every_method_reports_the_targets_own_law(config, monkeypatch):
    """In one engine at once, with prompts partly in the prefix cache, in chunks and slices that cut prompts and
    answers. The answers are the same without `prompt_logprobs`."""
    monkeypatch.setattr(worker, "SLICE", 5)
    requests = [asked(i, PROMPT * (1 + i % 3), prompt_logprobs=i % 4) for i in range(len(EVERY))]
    engine = local_engine(tiny_pair(), replace(config, prefill_chunk=7))
    list(engine.run([request(PROMPT * 3, "before", max_tokens=2)]))
    found = answers(engine, requests)
    assert any(0 < found[one.request_id].cached_tokens < len(one.prompt) for one in requests)
    for one in requests:
        assert_right(one, found[one.request_id])
    quiet = [replace(one, params=replace(one.params, prompt_logprobs=None)) for one in requests]
    for request_id, one in answers(local_engine(tiny_pair(), config), quiet).items():
        assert one.prompt_logprobs is None and one.tokens == found[request_id].tokens
        tops, expected = found[request_id].top_logprobs or (), one.top_logprobs or ()
        for each, other in zip(tops, expected, strict=True):
            assert dict(each) == pytest.approx(dict(other), abs=2e-5)


def test_what_is_cached_is_scored_and_the_answer_is_not():
    """A cached prompt runs in full for its scores; the answer does not."""
    engine, sizes = local_engine(tiny_pair(), EngineConfig(block=2)), []
    ask = engine.workers["target"].run_prompts
    engine.workers["target"].run_prompts = lambda batch: sizes.append(len(batch.tokens_T)) or ask(batch)
    for number in range(2):
        one = asked(4, PROMPT * 5, max_tokens=5)
        (found,) = [output.answer for output in engine.run([one]) if output.answer]
        assert_right(one, found)
        assert sizes == ([40, 39] if not number else [40 - 32, 39])
        sizes.clear()


def test_truncation_changes_no_bit():
    """Of a large vocabulary, over which another normalisation is visible: another sum of its probabilities differs from
    1 by 1e-5."""
    size = 150_000
    pair = replace(tiny_pair(size, scale=3.0), tokenizer=tokenizer_of([str(number) for number in range(size - 1)]))
    engine = local_engine(pair, EngineConfig(block=2, branches=1, max_slots=4))
    found = set()
    for more in ({}, {"top_k": 3}, {"top_p": 0.5}, {"top_k": 40, "top_p": 0.9, "temperature": 0.3}):
        one = request(range(0, 30_000, 1000), "one", seed=1, max_tokens=1, method="target", prompt_logprobs=1, **more)
        found.add(tuple(score.logprob for score in answers(engine, [one])["one"].prompt_logprobs))
    assert len(found) == 1


@pytest.mark.parametrize("prompt", [(1,), (1, 2)])
@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 2}])
def test_short_prompts(prompt, more):
    """The first token has no context, so it gets no score."""
    one = asked(4, prompt, **more)
    assert_right(one, answers(local_engine(tiny_pair(), EngineConfig(block=2)), [one])["4"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt_logprobs": 21}, r"prompt_logprobs=21; allowed: 0\.\.20"),
        ({"prompt_logprobs": -1}, r"prompt_logprobs=-1; allowed: 0\.\.20"),
        ({"prompt_logprobs": True}, r"prompt_logprobs=True; allowed: an integer, 0\.\.20"),
        ({"method": "draft", "prompt_logprobs": 0}, "prompt_logprobs=0 has no effect with method='draft'"),
    ],
)
def test_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings)
