"""`priority`: a call with a lower number is decoded before calls that have waited longer."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from smc.api.engine_config import EngineConfig
from tests.gateway.harness import serving, until
from tests.openai.asking import chat, is_error, post, user


@pytest.mark.slow
def test_calls_are_answered_by_priority(pair):
    """One call fits at a time. Three calls, to the chat API, to the Messages API and over gRPC, wait behind a long one
    and are answered by priority."""
    ended, short = [], {"max_tokens": 2, "method": "target"}
    with (
        serving(pair, EngineConfig(max_slots=1), http_port=0, served_model_names=("demo",)) as service,
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


def test_what_is_refused(service):
    said = post(service, chat(priority=10**7))
    is_error(said, 400, "invalid", "priority=10000000; allowed: -1000000 to 1000000", param="priority")
    is_error(post(service, chat(priority=1.5)), 400, "invalid", "priority=1.5; allowed: an integer", param="priority")
