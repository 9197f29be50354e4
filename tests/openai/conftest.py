from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from smc import demo
from smc.local_engine import ModelPair
from tests.gateway.harness import Service, serving


@pytest.fixture(scope="session")
def pair() -> ModelPair:
    return ModelPair.load(demo.TARGET, demo.DRAFT)


@pytest.fixture(scope="session")
def shared(pair) -> Iterator[Service]:
    """A service for all tests of this process: each leaves it as it found it."""
    with serving(pair, http_port=0, served_model_names=("demo", "gpt-4o")) as service:
        yield service


@pytest.fixture
def service(shared) -> Iterator[Service]:
    yield shared
    shared.wait_until_free()


@pytest.fixture(scope="session")
def client(shared) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=shared.url, api_key="none", max_retries=0) as client:
        yield client
