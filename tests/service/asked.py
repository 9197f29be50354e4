"""Requests of every kind, the answers of an in-process engine to them, and a check that a service gives the same
answers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen

import pytest

from services.client import Client, Message
from smc.api.engine_config import EngineConfig
from smc.api.request import Request as EngineRequest
from smc.api.sampling_params import SamplingParams
from smc.demo.problems import generate
from smc.local_engine import ModelPair, local_engine

LOOKAHEAD = {"block": 5, "branches": 2, "micro_batches": 2, "drafting": "always"}
LOCKSTEP = {"form": "lockstep", "block": 5, "micro_batches": 2, "drafting": "always"}
NEGATIVE = "What is 2 + 2? Say nothing else."
GUIDED = {"guidance_scale": 1.6, "negative_prompt": NEGATIVE}
TOPS = {"logprobs": True, "top_logprobs": 5}
KINDS = [
    {"method": "smc", "particles": 8, "max_tokens": 16},
    {"method": "exact", "particles": 4, "max_tokens": 14, **GUIDED},
    {"method": "smc", "particles": 4, "max_tokens": 16, "ess_threshold": 1.0},
    {"method": "smc", "particles": 3, "max_tokens": 14, "guidance_scale": 1.3, **TOPS, "min_tokens": 8},
    {"method": "target", "max_tokens": 16, **TOPS},
    {"method": "smc", "particles": 5, "max_tokens": 16, "resampling": "residual", "temperature": 0.8, "top_p": 0.9},
    {"method": "smc", "particles": 3, "max_tokens": 40, "alpha": 1.2, "stop": ["####"]},
    {"method": "draft", "max_tokens": 16},
    {"method": "smc", "particles": 8, "max_tokens": 16, "ignore_eos": True, "resampling": "ssp"},
    {"method": "exact", "particles": 4, "max_tokens": 16, "temperature": 1.5},
    {"method": "exact", "particles": 4, "max_tokens": 14, "constraint": {"regex": "[0-9 +=]{3,}"}},
    {
        "method": "smc",
        "particles": 3,
        "max_tokens": 16,
        "constraint": {"choice": ["yes", "no", "17"]},
        "constraint_scope": "answer",
    },
]
ASKED = [
    (problem.question, {"seed": i, **KINDS[i % len(KINDS)]})
    for i, problem in enumerate(generate(5, len(KINDS), "test"))
]


def engines_own(pair: ModelPair, form: dict) -> list:
    """Return the answers of an engine in this process to all of `ASKED`."""
    engine = local_engine(pair, EngineConfig(**form | {"micro_batches": 1}))
    requests = [engine_request(pair, i, question, dict(params)) for i, (question, params) in enumerate(ASKED)]
    found = {output.answer.request_id: output.answer for output in engine.run(requests) if output.answer}
    return [found[str(i)] for i in range(len(ASKED))]


def engine_request(pair: ModelPair, i: int, question: str, params: dict) -> EngineRequest:
    texts = (question, params.pop("negative_prompt", None))
    prompt, negative = (text and tuple(pair.tokenizer.chat([{"role": "user", "content": text}])) for text in texts)
    return EngineRequest(str(i), prompt, SamplingParams(**params), negative_prompt=negative)


def with_chats(params: dict) -> dict:
    """Replace the text of the negative prompt by a chat, as the client takes it."""
    return params | ({"negative_prompt": [Message("user", NEGATIVE)]} if "negative_prompt" in params else {})


def all_are_the_engines_own(client: Client, http_port: int, answers: list) -> None:
    """Send all of `ASKED` at once, three of them over HTTP as well, and check that the service gives `answers`."""

    def ask(i: int):
        question, params = ASKED[i]
        return client.generate([Message("user", question)], timeout=60, **with_chats(params))

    def ask_over_http(i: int) -> str:
        question, params = ASKED[i]
        chats = {"negative_prompt": [{"role": "user", "content": NEGATIVE}]} if "negative_prompt" in params else {}
        body = json.dumps({"messages": [{"role": "user", "content": question}], **params | chats}).encode()
        url = f"http://127.0.0.1:{http_port}/v1/chat/completions"
        with urlopen(Request(url, body, {"content-type": "application/json"}), timeout=60) as response:
            return json.load(response)["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(len(ASKED) + 3) as pool:
        over_http = pool.map(ask_over_http, range(3))
        found = list(pool.map(ask, range(len(ASKED))))
        assert list(over_http) == [answer.text for answer in answers[:3]]
    for completion, answer, (_, params) in zip(found, answers, ASKED):
        assert completion.text == answer.text, params
        assert tuple(completion.tokens) == answer.tokens
        assert completion.finish_reason == answer.finish_reason and completion.seed == answer.seed
        assert len(completion.top_logprobs or ()) == len(answer.tokens) * ("top_logprobs" in params)
        for found, expected in zip(completion.top_logprobs or (), answer.top_logprobs or ()):
            assert [logp for _, logp in found] == pytest.approx([logp for _, logp in expected], abs=1e-3)
            assert found[0][0] == expected[0][0] or found[0][1] == pytest.approx(found[1][1], abs=1e-3)
        if completion.statistics is not None:
            # Exponents of coupled drafting are fitted over all requests (`smc.scheduler.speculation`), so how often the
            # draft of an exact request is right depends on earlier requests. The answer does not.
            if params.get("method") != "exact":
                assert completion.statistics.rounds == answer.statistics.rounds
                assert completion.statistics.hits == answer.statistics.hits
            assert completion.statistics.log_z == pytest.approx(answer.statistics.log_z, abs=1e-3), (
                params,
                completion.statistics,
                answer.statistics,
            )
