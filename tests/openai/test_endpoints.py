"""Endpoints other than completions: tokenize and detokenize, version, ping and load, and access by web pages of other
origins (CORS)."""

from __future__ import annotations

import importlib.metadata
import json
import urllib.request
from urllib.error import HTTPError

import pytest

from tests.gateway.harness import serving

QUESTION = [{"role": "user", "content": "Ann has 3 pens and buys 4. How many pens does she have?"}]


def ask(url: str, path: str, body: object = None, headers: dict[str, str] | None = None, method: str | None = None):
    """Send a request and return status, JSON and headers of the response."""
    base = url.removesuffix("/v1")
    data = None if body is None else json.dumps(body).encode()
    sent = {"content-type": "application/json"} if data else {}
    request = urllib.request.Request(base + path, data, sent | (headers or {}), method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.loads(reply.read() or "null"), reply.headers
    except HTTPError as error:
        with error:
            return error.code, json.loads(error.read() or "null"), error.headers


def test_texts_become_ids_and_ids_texts(service, pair):
    """`/tokenize` and `/detokenize` agree with the tokenizer, for texts and for chats."""
    text = "Ann has 3 pens."
    status, found, _ = ask(service.url, "/tokenize", {"model": "demo", "prompt": text, "return_token_strs": True})
    expected = pair.tokenizer.encode(text)
    assert status == 200
    assert found == {
        "count": len(expected),
        "max_model_len": pair.max_context,
        "tokens": expected,
        "token_strs": [pair.tokenizer.token(token) for token in expected],
    }
    assert ask(service.url, "/detokenize", {"tokens": expected})[1] == {"prompt": pair.tokenizer.decode(expected)}
    chat = {"messages": QUESTION, "add_special_tokens": False, "add_generation_prompt": True}
    assert ask(service.url, "/tokenize", chat)[1]["tokens"] == pair.tokenizer.chat(QUESTION)


def test_ids_are_those_that_an_answer_is_made_of(service, client):
    """`/tokenize` of a chat counts as many tokens as the prompt of its answer has."""
    answer = client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=3, seed=1)
    counted = ask(service.url, "/tokenize", {"messages": QUESTION})[1]["count"]
    assert answer.usage.prompt_tokens == counted


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/tokenize", {}, "prompt is missing"),
        ("/tokenize", [1], "the body is not a JSON object"),
        ("/tokenize", {"prompt": "a", "stream": True}, "stream is not a field beside prompt; allowed: add_special"),
        ("/tokenize", {"prompt": ["a", "b"]}, "prompt has 2 prompts; allowed: one"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens=False; allowed: true"),
        (
            "/tokenize",
            {"messages": QUESTION, "continue_final_message": True},
            "the last message is of role 'user'; allowed: 'assistant'",
        ),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs=1; allowed: true, false"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model='other'; allowed: 'demo', 'gpt-4o'"),
        ("/tokenize", {"prompt": "word " * 100_000}, "allowed: at most"),
        ("/detokenize", {"tokens": "1"}, "tokens='1'; allowed: a list of token ids"),
        ("/detokenize", {"tokens": [-1]}, "tokens contains -1; allowed: 0 to"),
        ("/detokenize", {"tokens": [True]}, "tokens contains True; allowed: 0 to"),
        ("/detokenize", {"tokens": [], "model": 3}, "model=3; allowed: 'demo', 'gpt-4o'"),
    ],
)
def test_what_is_wrong_is_named(service, path, body, says):
    status, found, _ = ask(service.url, path, body)
    assert status in (400, 404, 413) and says in found["error"]["message"]


def test_version_ping_and_load(service):
    assert ask(service.url, "/version")[1] == {"version": importlib.metadata.version("smcserve")}
    assert ask(service.url, "/ping")[0] == ask(service.url, "/ping", method="POST")[0] == 200
    idle = {"running": 0, "waiting": 0}
    group = {"serving": True, "has_draft": True, **idle}
    assert ask(service.url, "/load")[1] == {"server_load": 0, **idle, "worker_groups": [group]}


def test_load_counts_what_runs(service, client):
    long = {"model": "demo", "messages": QUESTION, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
    stream = client.chat.completions.create(stream=True, **long)
    next(iter(stream))
    assert ask(service.url, "/load")[1]["running"] == 1
    stream.close()


def test_a_token_is_needed_but_for_health(pair, tmp_path):
    (tmp_path / "tokens").write_text("secret\n")
    with serving(pair, http_port=0, auth_token_file=tmp_path / "tokens") as service:
        assert ask(service.url, "/ping")[0] == 200
        for path in ("/version", "/load"):
            assert ask(service.url, path)[0] == 401
            assert ask(service.url, path, headers={"authorization": "Bearer secret"})[0] == 200
        assert ask(service.url, "/tokenize", {"prompt": "a"})[0] == 401


PAGE, OTHER = "https://app.example.com", "https://evil.example.com"


def test_pages_of_allowed_origins_may_read(pair):
    with serving(pair, http_port=0, allow_origins=(PAGE,)) as service:
        asks = {"origin": PAGE, "access-control-request-method": "POST"}
        status, _, headers = ask(service.url, "/v1/chat/completions", headers=asks, method="OPTIONS")
        assert status == 204 and headers["access-control-allow-origin"] == PAGE
        assert "authorization" in headers["access-control-allow-headers"]
        assert "POST" in headers["access-control-allow-methods"]
        body = {"messages": QUESTION, "max_tokens": 3}
        for extra in ({}, {"stream": True}):
            base = urllib.request.Request(
                f"{service.url}/chat/completions",
                json.dumps(body | extra).encode(),
                {"content-type": "application/json", "origin": PAGE},
            )
            with urllib.request.urlopen(base, timeout=60) as reply:
                assert reply.headers["access-control-allow-origin"] == PAGE
                reply.read()
        assert ask(service.url, "/v1/none", headers={"origin": PAGE})[2]["access-control-allow-origin"] == PAGE
        for one in (ask(service.url, "/version", headers={"origin": OTHER}), ask(service.url, "/version")):
            assert "access-control-allow-origin" not in one[2] and one[2]["vary"] == "origin"


SENT = {
    "openai": "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-retry-count",
    "anthropic": "anthropic-beta,anthropic-dangerous-direct-browser-access,anthropic-version,content-type,x-api-key",
}
"""Headers that the vendors' clients for browsers send, as browsers name them in a preflight request."""


@pytest.mark.parametrize("origins", [(PAGE,), ("*",)])
@pytest.mark.parametrize("names", SENT.values(), ids=SENT)
def test_the_vendors_clients_may_run_in_pages(pair, origins, names):
    """All their headers are allowed, and they may read the ids and the hints for retries of replies and errors."""
    with serving(pair, http_port=0, allow_origins=origins) as service:
        asks = {"access-control-request-method": "POST", "access-control-request-headers": names}
        for path in ("/v1/chat/completions", "/v1/messages"):
            status, _, headers = ask(service.url, path, headers={"origin": PAGE, **asks}, method="OPTIONS")
            allowed = headers["access-control-allow-headers"].replace(" ", "").split(",")
            assert status == 204 and set(names.split(",")) <= set(allowed)
            assert {"origin", "access-control-request-headers"} == set(headers["vary"].split(", "))
        refused = ask(service.url, "/v1/none", headers={"origin": PAGE})[2]
        exposed = set(refused["access-control-expose-headers"].split(", "))
        assert exposed == {"x-request-id", "request-id", "retry-after", "x-should-retry"}
        if "*" not in origins:
            other = ask(service.url, path, headers={"origin": OTHER, **asks}, method="OPTIONS")[2]
            assert not any(name.startswith("access-control") for name in other)


def test_no_page_may_read_by_default(service):
    status, _, headers = ask(service.url, "/version", headers={"origin": PAGE})
    assert status == 200 and "access-control-allow-origin" not in headers
    assert ask(service.url, "/v1/chat/completions", headers={"origin": PAGE}, method="OPTIONS")[0] == 405


@pytest.mark.parametrize("origin", ["app.example.com", "https://app.example.com/path", ""])
def test_an_origin_that_no_browser_sends_is_refused(origin):
    """`allow_origins` accepts only "*" and origins in the form that browsers send."""
    from services.gateway.config import GatewayConfig

    with pytest.raises(ValueError, match=r"allow_origins contains .*; allowed: \* or SCHEME://HOST"):
        GatewayConfig(http_port=0, allow_origins=(origin,))
    with pytest.raises(ValueError, match="allow_origins has no effect without http_port"):
        GatewayConfig(allow_origins=("*",))
