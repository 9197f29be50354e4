"""The pair that the documentation uses as an example of one's own: Qwen2.5-Coder-1.5B-Instruct and its 0.5B, with their
published weights. Exact answers are the target's in float32, plain, with tools and with a schema; and tools are called
over HTTP.

Skipped unless PUBLISHED_PAIR names a folder with the directories `target` and `draft`, or is `hub`, which downloads 4
GB. Needs 10 GB of memory and two minutes of two cores."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from services.openai.requests import Served, understood
from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.local_engine import ModelPair, local_engine
from smc.model.source import find_model
from tests.gateway.harness import Service, serving
from tests.model.published import DRAFT, TARGET

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("published pair")]

VARIABLE = "PUBLISHED_PAIR"
EXACT_TOKENS = 8
CHATS = (
    "Hi",
    "Why is the sky blue?",
    "Name three rivers.",
    "Reverse a list in Python.",
    "def fib(n):",
    "SELECT name FROM users WHERE",
    "What is 12 * 7?",
    "今天天气怎么样?",
    "Größe, Übung, Straße",
    "🙂🚀 emoji",
)
CALLS = ("What is the weather in Paris?", "Is it raining in Oslo?", "Hello!", "Compare Rome and Cairo.", "巴黎天气")
PEOPLE = ("Ann is 31.", "Bob, 7 years old.", "Zoë turned 99 today.", "Nobody.", "Li Wei is twenty.")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": WEATHER}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}


@pytest.fixture(scope="module")
def pair() -> Iterator[ModelPair]:
    given = os.environ.get(VARIABLE)
    if not given:
        pytest.skip(f"{VARIABLE} is not set: a folder with {TARGET} as target and {DRAFT} as draft, or hub")
    names = (TARGET, DRAFT) if given == "hub" else (f"{given}/target", f"{given}/draft")
    torch.set_num_threads(os.cpu_count() or 1)
    yield ModelPair.load(*(find_model(Path(name)) for name in names))
    torch.set_num_threads(1)


def bodies() -> Iterator[dict[str, Any]]:
    """Bodies of 20 chats: 10 plain ones, 5 with a tool, of which 2 must call it, and 5 with a schema."""
    for number, text in enumerate((*CHATS, *CALLS, *PEOPLE)):
        body = {"messages": [{"role": "user", "content": text}], "temperature": (0.0, 0.7, 1.0)[number % 3]}
        if text in CALLS:
            body |= {"tools": TOOLS, "tool_choice": "required" if text in CALLS[:2] else "auto"}
        yield body | ({"response_format": SCHEMA} if text in PEOPLE else {})


def test_exact_answers_are_the_targets(pair):
    served, asked = Served(("target",), pair.tokenizer), list(bodies())
    assert len(asked) == 20
    config = EngineConfig(
        form="lockstep", block=3, drafting="always", max_slots=40, max_context=512, prefill_chunk=4096
    )
    engine, found, rounds = local_engine(pair, config), {}, 0
    for method in ("target", "exact"):
        requests = []
        for number, body in enumerate(asked):
            read = understood(body | {"method": method}, True, served).with_tool_format(pair.tokenizer)
            params = replace(read.params(EXACT_TOKENS, seed=number), particles=2 if method == "exact" else None)
            requests.append(Request(f"{method} {number}", tuple(read.prompts[0].encode(pair.tokenizer, 400)), params))
        answers = {output.request_id: output.answer for output in engine.run(requests) if output.answer}
        found[method] = [answers[request.request_id] for request in requests]
        rounds += sum(answer.statistics.rounds for answer in found[method] if method == "exact")
    tokens = {method: [answer.tokens for answer in answers] for method, answers in found.items()}
    assert tokens["exact"] == tokens["target"], [answer.text for answer in found["exact"]]
    count = sum(map(len, tokens["target"]))
    print(f"{count} tokens of {len(asked)} answers are equal; exact decoding took {rounds} rounds for them")
    assert rounds < count - len(asked), "rounds confirmed drafted tokens"


@pytest.fixture(scope="module")
def service(pair) -> Iterator[Service]:
    config = EngineConfig(form="lockstep", block=4, drafting="always", max_slots=8, max_context=512, pages=4096)
    with serving(pair, config, http_port=0, served_model_names=("qwen",), write_timeout=300.0) as service:
        yield service


def test_tools_are_called_over_http(service):
    """A chat, the same with a strict tool, its stream and a response, none of which must call a tool; a chat that must;
    and one with a schema, at the same time. This model leaves out the tags of calls."""
    own = {"model": "qwen", "temperature": 0, "extra_body": {"method": "exact", "particles": 1}}
    question = [{"role": "user", "content": CALLS[0]}]
    chat = {**own, "messages": question, "tools": TOOLS, "max_tokens": 60}
    tool = {"type": "function", "strict": False, **WEATHER}
    strict = {**chat, "tools": [{"type": "function", "function": WEATHER | {"strict": True}}]}
    with (
        openai.OpenAI(base_url=service.url, api_key="none", max_retries=0, timeout=600) as client,
        ThreadPoolExecutor(6) as pool,
    ):
        create = client.chat.completions.create
        whole = [pool.submit(create, **chat, tool_choice=choice) for choice in ("auto", "required")]
        whole.append(pool.submit(create, **strict))
        streamed = pool.submit(lambda: list(create(**chat, stream=True)))
        response = pool.submit(client.responses.create, **own, input=CALLS[0], tools=[tool], max_output_tokens=60)
        person = [{"role": "user", "content": f"{PEOPLE[0]} Reply as JSON."}]
        schema = pool.submit(create, **own, messages=person, max_tokens=60, response_format=SCHEMA)
    found = []
    for each in whole:
        (choice,) = each.result().choices
        assert choice.finish_reason == "tool_calls" and not choice.message.content, choice
        found += [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    deltas = [chunk.choices[0].delta for chunk in streamed.result()]
    calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
    assert not any(delta.content for delta in deltas) and len(calls) > 2
    found.append(("".join(call.name or "" for call in calls), "".join(call.arguments or "" for call in calls)))
    found += [(item.name, item.arguments) for item in response.result().output if item.type == "function_call"]
    assert [(name, json.loads(arguments)) for name, arguments in found] == [("get_weather", {"city": "Paris"})] * 5
    assert json.loads(schema.result().choices[0].message.content) == {"name": "Ann", "age": 31}
