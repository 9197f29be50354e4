"""`/openapi.json` and `/docs` describe all endpoints and exactly the fields that are accepted."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from services.openai import anthropic, pages, responses
from services.openai.requests import CHAT_FORM, COMPLETION_FORM
from tests.gateway.harness import serving
from tests.openai.asking import ask, post, user


def test_it_is_written_once_and_beside_the_loop(pair, monkeypatch):
    """The document is generated once, outside the event loop, because that takes as long as many rounds."""
    writers, write = [], pages.document

    def noted(*args):
        writers.append(threading.current_thread())
        return write(*args)

    monkeypatch.setattr(pages, "document", noted)
    with serving(pair, http_port=0) as service, ThreadPoolExecutor(4) as callers:
        said = list(callers.map(lambda path: ask(service, "GET", path), ["/openapi.json", "/docs"] * 4))
        loop = service._thread
    assert {one.status for one in said} == {200} and len({one.data for one in said}) == 2
    assert len(writers) == 1 and writers[0] is not loop


@pytest.fixture(scope="module")
def described(shared):
    said = ask(shared, "GET", "/openapi.json")
    assert said.status == 200
    return said.json


def schema_of(described, path):
    (reference,) = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"].values()
    return described["components"]["schemas"][reference.rpartition("/")[2]]


def test_it_names_every_path(described):
    paths = {"/health", "/v1/models", "/v1/models/{name}", "/v1/chat/completions", "/v1/completions", "/v1/responses"}
    paths |= {"/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/openapi.json", "/docs", "/metrics"}
    assert paths <= described["paths"].keys() and described["openapi"] == "3.1.0"
    assert set(described["paths"]["/ping"]) == {"get", "post"}


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/v1/chat/completions", CHAT_FORM.names),
        ("/v1/completions", COMPLETION_FORM.names),
        ("/v1/responses", responses.FORM.names),
        ("/v1/messages", anthropic.FORM.names),
    ],
)
def test_it_names_every_field_and_no_other(described, path, names):
    schema = schema_of(described, path)
    assert set(schema["properties"]) == names and schema["additionalProperties"] is False


@pytest.mark.parametrize(
    ("path", "body", "neutral"),
    [
        ("/v1/chat/completions", {"messages": user("x"), "max_tokens": 2, "stop": "a", "logprobs": True}, "best_of"),
        (
            "/v1/completions",
            {"prompt": "x", "max_tokens": 2, "logprobs": 2, "stop": ["a"], "method": "exact"},
            "suffix",
        ),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2, "temperature": 0.5}, "truncation"),
        ("/v1/messages", {"messages": user("x"), "max_tokens": 2, "stop_sequences": ["a"]}, "mcp_servers"),
    ],
)
def test_its_schemas_hold(service, described, path, body, neutral):
    """Bodies that the service accepts validate against the schema; a wrong type or an unknown field does not, and is
    refused."""
    whole = {"$ref": f"#/components/schemas/{_name(described, path)}", "components": described["components"]}
    checks = jsonschema.Draft202012Validator(whole)
    assert post(service, json.dumps(body).encode(), path).status == 200
    checks.validate(body | {"service_tier": "auto"})
    for wrong in ({"stream": 3}, {"none_such": 1}, {neutral: "b"}):
        assert (
            not checks.is_valid(body | wrong) and post(service, json.dumps(body | wrong).encode(), path).status == 400
        )


def _name(described, path) -> str:
    (reference,) = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"].values()
    return reference.rpartition("/")[2]


def test_every_reference_leads_somewhere(described):
    found = re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(described))
    assert found and set(found) <= described["components"]["schemas"].keys()


def test_the_page_is_whole_and_loads_nothing(service):
    with urllib.request.urlopen(service.url.removesuffix("/v1") + "/docs", timeout=60) as reply:
        text = reply.read().decode()
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert reply.headers.get_content_type() == "text/html"
    assert "POST <code>/v1/responses</code>" in text and "<code>continue_final_message</code>" in text
    assert not re.search(r"<script|src=|https?://", text)
