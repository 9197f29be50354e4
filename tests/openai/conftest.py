from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from smc import demo
from smc.local_engine import ModelPair
from smc.model.tokenizer import Tokenizer
from tests.gateway.harness import Service, serving


@pytest.fixture(scope="session")
def pair() -> ModelPair:
    return ModelPair.load(demo.TARGET, demo.DRAFT)


@pytest.fixture(scope="session")
def shared(pair) -> Iterator[Service]:
    """A service for all tests of this process; each test leaves it as it found it."""
    with serving(pair, http_port=0, served_model_names=("demo", "gpt-4o")) as service:
        yield service


@pytest.fixture
def service(shared) -> Iterator[Service]:
    yield shared
    shared.wait_until_free()


@pytest.fixture(scope="session")
def tool_service(pair) -> Iterator[Service]:
    """A service whose chat template renders tools, system messages and tool results, and reads tool calls in the Hermes
    format."""
    read = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    read += "{% for m in messages if m.role in ('system', 'tool') %}{{ m.content }}{% endfor %}"
    read += "{% for m in messages if m.tool_calls %}{{ m.tool_calls }}{% endfor %}"
    known = (
        "{% set messages = messages | rejectattr('role', 'in', ['system', 'tool']) | selectattr('content') | list %}"
    )
    tokenizer = pair.tokenizer
    template = read + known + (tokenizer.chat_template or "")
    changed = Tokenizer(tokenizer._tokenizer, tokenizer.eos_ids, tokenizer._special, template)
    with serving(
        ModelPair(pair.target, pair.draft, changed, pair.max_context), http_port=0, served_model_names=("demo",)
    ) as service:
        yield service


@pytest.fixture(scope="session")
def client(shared) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=shared.url, api_key="none", max_retries=0) as client:
        yield client
