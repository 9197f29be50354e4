"""The log-probabilities reported with an answer are those of its tokens, recomputed from the tokens alone: with
`processed` under the distribution that they are drawn from. `test_raw_logprobs.py` is about the default."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from smc.api.engine_config import EngineConfig
from smc.api.request import Output
from smc.api.sampling_params import SamplingParams
from smc.local_engine import local_engine
from tests.pairwise import few, one_of
from tests.scheduler.harness import CASES, FORMS, answer, answers, config_id, processed, request
from tests.scheduler.pairs import next_log_probs, tiny_pair

PROMPT = (0, 1, 2)


def recomputed(tokens: tuple[int, ...], temperature: float = 1.0, top_k: int = 0) -> list[float]:
    found = []
    for i, token in enumerate(tokens):
        log_p = next_log_probs(tiny_pair().target, (*PROMPT, *tokens[:i]), temperature)
        if top_k:
            log_p = torch.where(log_p >= log_p.topk(top_k).values[-1], log_p, -torch.inf).log_softmax(-1)
        found.append(log_p[token].item())
    return found


LAWS = [
    {"method": "smc", "particles": 6, "ess_threshold": 1.0},
    {"method": "smc", "particles": 4, "temperature": 0.7, "top_k": 2, "ess_threshold": 0.9},
    {"method": "smc", "particles": 3, "alpha": 1.5},
    {"method": "smc", "particles": 1},
    {"method": "target", "temperature": 0.7},
]


@pytest.mark.parametrize(
    ("config", "params"),
    few(product(CASES, LAWS), together=1),
    ids=lambda value: str(value) if isinstance(value, dict) else config_id(value),
)
def test_equal_to_recomputation(config, params):
    for seed in range(2):
        a = answer(
            tiny_pair(), processed(config), seed=seed, max_tokens=15, ignore_eos=seed > 0, logprobs=True, **params
        )
        expected = recomputed(a.tokens, params.get("temperature", 1.0), params.get("top_k", 0))
        assert a.logprobs == pytest.approx(expected, abs=1e-4)


STREAMS = [
    *LAWS,
    {"method": "smc", "particles": 6, "population": "distinct"},
    {"method": "smc", "particles": 4, "answer": "best"},
    {"method": "smc", "particles": 3, "stop": ("ab", "cca"), "min_tokens": 4},
    {"method": "smc", "particles": 2, "top_logprobs": 2},
    {"method": "exact", "particles": 4},
    {"method": "exact", "particles": 2, "temperature": 0.0, "stop": ("aa",)},
    {"method": "exact", "particles": 3, "verification": "rejection"},
]


@pytest.mark.parametrize("config", one_of(FORMS[2], *FORMS[:2]), ids=config_id)
def test_they_are_streamed_with_their_tokens(config):
    engine = local_engine(tiny_pair(), replace(config, max_slots=64))
    asked = {"max_tokens": 16, "ignore_eos": True, "logprobs": True}
    requests = [request(request_id=str(i), seed=i, **asked | law) for i, law in enumerate(STREAMS)]
    pieces: dict[str, list[Output]] = {}
    for output in engine.run([*requests, request(request_id="quiet", seed=1, max_tokens=16)]):
        pieces.setdefault(output.request_id, []).append(output)
    assert not any(output.logprobs for output in pieces.pop("quiet"))
    for outputs in pieces.values():
        found = outputs[-1].answer
        assert all(len(output.logprobs) == len(output.tokens) for output in outputs)
        assert sum((output.logprobs for output in outputs), ()) == found.logprobs
        assert not any(math.isnan(value) for value in found.logprobs)
    early = [output.logprobs for outputs in pieces.values() for output in outputs[:-1]]
    assert len(early) > 2 * len(STREAMS)


def test_an_answer_that_is_cut_off_ends_where_the_target_has_come():
    """The answer leaves out tokens that a look-ahead round has drafted and the target has not scored."""
    now = [0.0]
    engine = local_engine(tiny_pair(), EngineConfig(block=8, branches=2), clock=lambda: now[0])
    engine.submit(request(particles=1, seed=1, max_tokens=40, ignore_eos=True, logprobs=True, time_budget=1.0))
    for _ in range(3):  # the prompt, and two rounds
        engine.step()
    now[0] = 2.0
    a = engine.step()[-1].answer
    assert len(a.tokens) == len(a.logprobs) > 2
    assert a.logprobs == pytest.approx(recomputed(a.tokens), abs=1e-4)


def test_only_for_those_who_ask():
    """Slots are reused: log-probabilities that an earlier request left there are not reported."""
    engine = local_engine(tiny_pair(), FORMS[2])
    asked = request(request_id="asked", particles=4, seed=1, max_tokens=9, ignore_eos=True, logprobs=True)
    quiet = request(request_id="quiet", particles=4, seed=1, max_tokens=9, ignore_eos=True)
    first = answers(engine, [asked, quiet])
    assert first["quiet"].logprobs is None and first["asked"].tokens == first["quiet"].tokens
    assert answers(engine, [asked])["asked"].logprobs == pytest.approx(first["asked"].logprobs, abs=1e-5)


def test_the_draft_alone_has_none():
    with pytest.raises(ValueError, match="logprobs=True has no effect with method='draft'"):
        SamplingParams(method="draft", logprobs=True)
