"""Malformed and extreme bodies: none ends with 5xx or without an answer, and none leaves anything behind.

As a command it sends any number of them: `python -m tests.openai.test_malformed --requests 20000`."""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.openai import anthropic, responses
from services.openai.bodies import CHAT, COMPLETIONS, BadRequest
from services.openai.requests import CHAT_FORM, COMPLETION_FORM, Served, understood
from smc import demo
from smc.api.engine_config import EngineConfig
from smc.local_engine import ModelPair
from tests.gateway.fuzz import DOUBLES, INTEGERS, TEXTS
from tests.gateway.harness import Service, serving

FORMS = {CHAT: CHAT_FORM, COMPLETIONS: COMPLETION_FORM}
STATUSES = {200, 400, 404, 405, 408, 409, 413, 415, 429, 499, 504}
ODD = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    "",
    "\ud800",
    10**400,
    -(10**400),
    2**63,
    "NaN",
    [0] * 100,
    {"a": {"b": {}}},
    {"5": 3.5, "511": -100},
    {"512": 1},
    {"5": 10**400},
    "smc",
    "exact",
    "target",
)
"""Values that are valid for some fields and invalid for all others."""
BESIDE = {"max_tokens": 40, "ignore_eos": True, "seed": 1}
"""Settings of an answer that does not depend on the rest of the batch."""
VALUES = (*ODD, *DOUBLES, *INTEGERS, *TEXTS)


def message(rng: random.Random) -> Any:
    if rng.random() < 0.05:
        return rng.choice(VALUES)
    parts = [{"type": rng.choice(("text", "text", "image_url", None)), "text": rng.choice(TEXTS)}]
    said = {
        "role": rng.choice(("user", "user", "assistant", "system", "tool", "developer", "robot")),
        "content": rng.choice((*TEXTS, parts)),
    }
    if rng.random() < 0.1:
        call = {
            "id": "1",
            "type": "function",
            "function": {"name": "f", "arguments": rng.choice(('{"a": 1}', "{", "[" * 2000, "1", ""))},
        }
        said["tool_calls"] = rng.choice(([call], call, [rng.choice(VALUES)]))
    return said


def prompt(rng: random.Random) -> Any:
    text, ids = (
        rng.choice(TEXTS) * rng.choice((1, 1, 50)),
        rng.choices(range(512), k=rng.choice((0, 1, 5, 200, 511, 600))),
    )
    return rng.choice((text, text, ids, ids + [rng.choice(VALUES)], [text, text], [ids, ids], rng.choice(VALUES)))


def body(rng: random.Random, path: str) -> bytes:
    """Return a random body. Most fields are absent; the others have extreme or valid values. Some bodies are truncated,
    or have changed bytes."""
    fields: dict[str, Any] = {
        "max_tokens": rng.randrange(1, 12),
        "method": rng.choice(("smc", "exact", "target", "draft")),
    }
    fields |= {name: rng.choice(VALUES) for name in sorted(FORMS[path].names) if rng.random() < 0.02}
    fields |= {"stream": rng.random() < 0.3} if rng.random() < 0.9 else {}
    if rng.random() < 0.95:
        fields |= (
            {"messages": [message(rng) for _ in range(rng.choice((1, 1, 2, 30)))]}
            if path == CHAT
            else {"prompt": prompt(rng)}
        )
    data = bytearray(json.dumps(fields).encode())
    kind = rng.random()
    if kind < 0.05:
        del data[rng.randrange(len(data)) :]
    elif kind < 0.1:
        for _ in range(rng.choice((1, 5))):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind < 0.12:
        data = bytearray(b'{"messages": ' + b"[" * rng.choice((10, 900, 1500, 30_000)))
    elif kind < 0.14:
        depth = rng.choice((10, 300, 900, 1500))
        data = bytearray(
            b'{"max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "metadata": '
            + b'{"a":' * depth
            + b"1"
            + b"}" * depth
            + b"}"
        )
    return bytes(data)


def ended(service: Service, seed: str) -> str:
    """Send one random request and return its status, or a description of the fault. `seed` determines the request; it
    is named if there is no answer."""
    rng = random.Random(seed)
    connection = http.client.HTTPConnection("127.0.0.1", service.gateway.http_port, timeout=120)
    path = rng.choice((CHAT, COMPLETIONS))
    headers = {"content-type": "application/json"}
    if rng.random() < 0.05:
        headers |= rng.choice(
            (
                {"content-type": "text/plain"},
                {"content-encoding": "gzip"},
                {"authorization": "Bearer x"},
                {"content-length": "-1"},
            )
        )
    try:
        connection.request(rng.choice(("POST",) * 20 + ("GET", "PUT")), path, body(rng, path), headers)
        if rng.random() < 0.1:
            time.sleep(rng.random() * 0.05)
            return "left"
        response = connection.getresponse()
        data = response.read()
        if response.status != 200:
            assert data, "an error that says nothing"
        known = response.status in STATUSES and b'"internal"' not in data
        return str(response.status) if known else f"{response.status}: {data[:300]!r}"
    except TimeoutError:
        return f"no answer to request {seed!r}"
    finally:
        connection.close()


def fuzz(service: Service, requests: int, seed: int) -> Counter[str]:
    """Send this many requests from eight threads, beside two long answers that must not change, and count how they
    end."""
    with ThreadPoolExecutor(8) as pool, service.client() as client:
        alone = client.generate("x", method="target", **BESIDE).tokens
        beside = [pool.submit(client.generate, "x", method=method, **BESIDE) for method in ("exact", "target")]
        found = Counter(pool.map(lambda number: ended(service, f"{seed} {number}"), range(requests)))
        assert [call.result(120).tokens for call in beside] == [alone] * 2
    service.wait_until_free(30.0)
    return found


@pytest.mark.parametrize("dialect", [responses, anthropic], ids=lambda api: api.__name__)
def test_bodies_of_the_other_apis_are_read_or_refused(pair, dialect):
    """Random bodies of the Responses and Messages APIs are read or refused with BadRequest; no other error occurs."""
    reads = {responses: responses.ResponsesDialect, anthropic: anthropic.MessagesDialect}[dialect]()
    served, rng, found = Served(("demo",), pair.tokenizer), random.Random(1), Counter()
    items = ["message", "function_call", "function_call_output", "reasoning", "text", "tool_use", "tool_result", 1]
    inside = [
        "role",
        "content",
        "call_id",
        "id",
        "name",
        "arguments",
        "output",
        "text",
        "input",
        "tool_use_id",
        "summary",
    ]

    def item() -> Any:
        kept = {name: rng.choice((*VALUES, "user", "{}", [{"type": "text", "text": "x"}])) for name in inside}
        return {"type": rng.choice(items)} | {name: kept[name] for name in inside if rng.random() < 0.3}

    for _ in range(300):
        fields = {
            name: rng.choice((*VALUES, [item()], item())) for name in sorted(dialect.FORM.names) if rng.random() < 0.04
        }
        given = [{"role": rng.choice(("user", "assistant")), "content": rng.choice(("x", [item()]))}, item()]
        fields |= {reads.prompt: given[: rng.choice((1, 1, 2))]} if rng.random() < 0.9 else {}
        try:
            reads.read(fields, served)
            found["read"] += 1
        except BadRequest as error:
            assert reads.refusal(error).http_status in (400, 404)
            found["refused"] += 1
    assert found["read"] > 7 and found["refused"] > 150, found


def test_whatever_is_asked_is_answered_or_refused(shared):
    found = fuzz(shared, 16, seed=2)
    assert set(found) <= {"left", *map(str, STATUSES)}, found
    assert found["200"] >= 1 and found["400"] > 4


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=15, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(
    path=st.sampled_from((CHAT, COMPLETIONS)),
    sound=st.booleans(),
    fields=st.dictionaries(st.sampled_from(sorted(CHAT_FORM.names | COMPLETION_FORM.names)), JSON, max_size=4),
)
def test_the_mapping_understands_or_says_what_is_wrong(pair, path, sound, fields):
    """For any JSON, `understood` raises only BadRequest, which names a field and has a message of limited length in
    UTF-8."""
    if sound:
        fields = {"messages": [{"role": "user", "content": "x"}]} | fields if path == CHAT else {"prompt": "x"} | fields
    try:
        understood(fields, path == CHAT, Served(("demo",), pair.tokenizer))
    except BadRequest as error:
        assert error.http_status in (400, 404) and 0 < len(str(error).encode()) < 3000, error
        assert re.split(r"[.\[]", error.param or "")[0] in FORMS[path].names | fields.keys(), (error.param, error)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    config = EngineConfig(block=4, branches=2, max_slots=64, max_queue=64)
    with serving(ModelPair.load(demo.TARGET, demo.DRAFT), config, http_port=0) as under_test:
        begin = time.monotonic()
        print(fuzz(under_test, asked.requests, asked.seed), f"{time.monotonic() - begin:.0f} s")
