"""`priority`: a call with a lower number is decoded before calls that have waited longer."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from services.client import ServiceError
from services.gateway.config import GatewayConfig
from smc.api.engine_config import EngineConfig
from tests.gateway.harness import serving, until
from tests.openai.asking import chat, is_error, post, user


@pytest.mark.slow
def test_calls_are_answered_by_priority(pair):
    """One call fits at a time. Three calls, to the chat API, to the Messages API and over gRPC, wait behind a long one
    and are answered by priority."""
    ended, short = [], {"max_tokens": 2, "method": "target"}
    with (
        serving(
            pair, EngineConfig(max_slots=1), http_port=0, served_model_names=("demo",), min_priority=-10
        ) as service,
        service.client() as client,
        ThreadPoolExecutor(4) as pool,
    ):

        def run(name: str, call) -> None:
            call()
            ended.append(name)

        messages = json.dumps({"messages": user("x"), "priority": -1} | short).encode()
        calls = {
            "long": lambda: client.generate("x", method="target", max_tokens=200, ignore_eos=True),
            "last": lambda: post(service, chat(priority=3, **short)),
            "second": lambda: client.generate("x", priority=1, **short),
            "first": lambda: post(service, messages, "/v1/messages"),
        }
        for count, (name, call) in enumerate(calls.items()):
            pool.submit(run, name, call)
            until(lambda count=count: service.engine.num_queued == count and not service.engine.idle, 30)
    assert ended == ["long", "first", "second", "last"]


RAISED = "priority=-1; allowed: 0 to 1000000, the lowest is first (min-priority and max-priority of the service)"


def test_callers_may_not_pass_others_unless_the_service_says_so(service):
    """By default a caller may lower the priority of its calls, but not raise it, in every API."""
    bodies = {
        "/v1/chat/completions": {"messages": user("x")},
        "/v1/completions": {"prompt": "x"},
        "/v1/responses": {"input": "x"},
        "/v1/messages": {"messages": user("x")},
    }
    for path, body in bodies.items():
        said = post(service, json.dumps(body | {"priority": -1}).encode(), path)
        assert said.status == 400 and RAISED in said.data.decode(), path
    with service.client() as client:
        with pytest.raises(ServiceError, match=re.escape(RAISED)) as refused:
            client.generate("x", priority=-1, max_tokens=2)
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert client.generate("x", priority=7, max_tokens=2).tokens
    assert post(service, chat(priority=7, max_tokens=2)).status == 200


def test_priorities_can_be_turned_off(pair):
    with serving(pair, http_port=0, served_model_names=("demo",), max_priority=0) as service:
        is_error(post(service, chat(priority=1)), 400, "invalid", "priority=1; allowed: 0 to 0", param="priority")
        assert post(service, chat(priority=0, max_tokens=2)).status == 200


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ({"min_priority": 1}, "min_priority=1; allowed: -1000000..0"),
        ({"max_priority": -1}, "max_priority=-1; allowed: 0..1000000"),
        ({"min_priority": -(10**7)}, "min_priority=-10000000; allowed: -1000000..0"),
    ],
)
def test_bounds_include_the_default(bounds, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        GatewayConfig(**bounds)


def test_what_is_refused(service):
    said = post(service, chat(priority=10**7))
    is_error(said, 400, "invalid", "priority=10000000; allowed: 0 to 1000000", param="priority")
    is_error(post(service, chat(priority=1.5)), 400, "invalid", "priority=1.5; allowed: an integer", param="priority")
