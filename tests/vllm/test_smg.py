"""The unmodified router smg in front of one gateway: OpenAI's API over the engine protocol. Two worker groups and the
loss of one: `tests.vllm.two_replicas`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from smc.demo.problems import generate
from tests.gateway.harness import local_answer, until
from tests.vllm.smg import models, routing

# One router for all tests, because each router has a thread pool of its own.
pytestmark = pytest.mark.xdist_group("smg")
QUESTIONS = [problem.question for problem in generate(1, 8, "test")]


@pytest.fixture(scope="module")
def client(shared, tmp_path_factory) -> Iterator[openai.OpenAI]:
    with (
        routing([f"127.0.0.1:{shared.gateway.port}"], tmp_path_factory.mktemp("smg") / "smg.log") as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        assert models(url) == ["demo-target"]
        yield client


def ask(client: openai.OpenAI, question: str, **settings):
    return client.chat.completions.create(
        model="demo-target", messages=[{"role": "user", "content": question}], **settings
    )


def expected(pair, question: str, **settings):
    return local_answer(pair, pair.tokenizer.chat([{"role": "user", "content": question}]), method="target", **settings)


def test_answers_and_streams_are_the_targets_own(service, client, pair):
    """Six calls at once, half of them streamed, get the target's own answers, with usage and finish reasons."""

    def call(number: int) -> tuple[str, str, int]:
        settings = {"temperature": 1.5, "seed": number, "max_tokens": 12}
        if number % 2:
            whole = ask(client, QUESTIONS[number], **settings)
            return whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage.completion_tokens
        chunks = list(ask(client, QUESTIONS[number], stream=True, stream_options={"include_usage": True}, **settings))
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert len(choices) > 3
        return (
            "".join(c.delta.content or "" for c in choices),
            choices[-1].finish_reason,
            chunks[-1].usage.completion_tokens,
        )

    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(call, range(6)))
    for number, (text, reason, tokens) in enumerate(found):
        own = expected(pair, QUESTIONS[number], temperature=1.5, seed=number, max_tokens=12)
        assert (text, tokens) == (own.text, len(own.tokens))
        assert reason == ("length" if own.finish_reason == "length" else "stop")


@pytest.mark.slow
def test_several_answers_stops_and_log_probabilities(service, client, pair):
    several = ask(client, QUESTIONS[0], n=2, seed=5, temperature=1.5, max_tokens=10, logprobs=True)
    for index, choice in enumerate(several.choices):
        own = expected(pair, QUESTIONS[0], seed=5 + index, temperature=1.5, max_tokens=10, logprobs=True)
        assert choice.message.content == own.text
        assert [token.logprob for token in choice.logprobs.content] == pytest.approx(own.logprobs, abs=1e-4)
    stopped = ask(client, QUESTIONS[0], temperature=0, stop=["####"])
    assert "#" not in stopped.choices[0].message.content and stopped.choices[0].finish_reason == "stop"


def test_constrained_answers(service, client):
    # Without this, the demo pair would write only whitespace.
    compact = {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], **compact}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    found = ask(client, QUESTIONS[0], max_tokens=40, response_format=form)
    assert json.loads(found.choices[0].message.content)["a"] in (1, 22)
    found = ask(client, QUESTIONS[0], max_tokens=40, extra_body={"regex": "(up|down)"})
    assert found.choices[0].message.content in ("up", "down")


def test_what_is_refused_keeps_its_words(service, client):
    for settings, message in (
        ({"frequency_penalty": 2.5}, "frequency_penalty: .*2.5"),
        ({"extra_body": {"regex": "("}}, "regex: unclosed group"),
        ({"max_tokens": 600}, "exceeds the context of 512"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            ask(client, QUESTIONS[0], **settings)


def test_a_caller_that_leaves_frees_what_it_held(service, client):
    stream = ask(client, QUESTIONS[0], stream=True, temperature=1.0, extra_body={"ignore_eos": True})
    next(stream)
    until(lambda: service.metric("smc_requests_running") == 1)
    stream.close()
    service.wait_until_free()


def test_router_503_and_recovery(service, client):
    """Without healthy workers the router answers 503; when they are healthy again, calls succeed again."""
    service.set_health(draft=False, target=False)
    try:
        with pytest.raises(openai.APIStatusError) as caught:
            ask(client, QUESTIONS[0], max_tokens=4)
        assert caught.value.status_code == 503
    finally:
        service.set_health(draft=True, target=True)

    def answers() -> bool:
        try:
            return bool(ask(client, QUESTIONS[0], max_tokens=4).choices)
        except openai.APIStatusError:
            return False

    until(answers, 30)
