"""Unknown fields: refused by name, or with `--unknown-fields ignore` logged once and ignored."""

from __future__ import annotations

import json
import logging

import pytest

from services.gateway.config import GatewayConfig
from tests.gateway.harness import serving
from tests.openai.asking import post, user

PART = {"type": "text", "text": "x", "colour": "red"}
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": [PART]}], "max_tokens": 3, "frobnicate": [1]},
    "/v1/completions": {"prompt": "x", "max_tokens": 3, "frobnicate": None, "twist": 1},
    "/v1/responses": {"input": [{"role": "user", "content": "x", "mood": 1}], "max_output_tokens": 3, "twist": {}},
    "/v1/messages": {"messages": user("x"), "max_tokens": 3, "twist": "a", "tool_choice": {"type": "auto", "to": 1}},
    "/tokenize": {"prompt": "x", "twist": 1},
}


@pytest.mark.parametrize("path", BODIES)
def test_they_are_refused_by_name(service, path):
    said = post(service, json.dumps(BODIES[path]).encode(), path)
    assert said.status == 400 and "is not a field" in said.json["error"]["message"], said.data


def test_they_are_ignored_and_logged_once(pair, caplog):
    caplog.set_level(logging.WARNING, "services.openai.requests")
    with serving(pair, http_port=0, unknown_fields="ignore", served_model_names=("demo",)) as service:
        for _ in range(2):
            for path, body in BODIES.items():
                said = post(service, json.dumps(body).encode(), path)
                assert said.status == 200, (path, said.data)
        many = {"messages": user("x"), "max_tokens": 3, "a": 1} | {f"f{n}": n for n in range(5000)}
        assert post(service, json.dumps(many).encode()).status == 200
        wrong = post(service, json.dumps({"messages": user("x"), "temperature": -1, "twist": 1}).encode())
        assert wrong.status == 400 and wrong.error["param"] == "temperature"
    logged = [record.args[0] for record in caplog.records if "is unknown" in record.getMessage()]
    assert {"frobnicate", "colour", "mood", "twist", "to"} <= set(logged)
    assert len(logged) == len(set(logged)) == 256


def test_tools_of_other_kinds_are_left_out_and_logged_once(pair, caplog):
    caplog.set_level(logging.WARNING, "services.openai.requests")
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    bodies = {
        "/v1/messages": {"messages": user("x"), "max_tokens": 3, "tools": [search], "tool_choice": {"type": "auto"}},
        "/v1/responses": {"input": "x", "max_output_tokens": 3, "tools": [search, {"type": "mcp"}]},
        "/v1/chat/completions": {"messages": user("x"), "max_tokens": 3, "tools": [{"type": "custom"}]},
    }
    with serving(pair, http_port=0, unknown_fields="ignore") as service:
        for _ in range(2):
            for path, body in bodies.items():
                said = post(service, json.dumps(body).encode(), path)
                assert said.status == 200, (path, said.data)
    logged = [record.args[0] for record in caplog.records if "left out" in record.getMessage()]
    assert sorted(logged) == ["custom", "mcp", "web_search_20250305"]


def test_the_setting_is_checked():
    with pytest.raises(ValueError, match="unknown_fields='drop'; allowed: refuse, ignore"):
        GatewayConfig(unknown_fields="drop")
