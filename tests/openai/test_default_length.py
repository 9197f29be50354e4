"""Answers without `max_tokens` have a default length that the service sets."""

from __future__ import annotations

import json

import pytest

from services.gateway.config import GatewayConfig
from smc.api.limits import DEFAULT_MAX_TOKENS
from tests.gateway.harness import serving
from tests.openai.asking import post, user


def test_a_chat_without_max_tokens_has_the_default_length(pair):
    """In chats, responses and messages; `max_tokens`, and `min_tokens` if it is more, replace the default. A completion
    has a default of its own."""
    same = {"ignore_eos": True, "method": "target", "seed": 1}
    with serving(pair, http_port=0, default_max_tokens=7) as service, service.client() as client:

        def length(path: str, **fields: object) -> int:
            said = post(service, json.dumps(same | fields).encode(), f"/v1/{path}")
            assert said.status == 200, said.data
            usage = said.json["usage"]
            return usage.get("output_tokens", usage.get("completion_tokens"))

        messages = {"messages": user("x")}
        assert length("chat/completions", **messages) == length("messages", **messages) == 7
        assert length("responses", input="x") == 7
        assert length("chat/completions", **messages, max_tokens=9) == 9
        assert length("chat/completions", **messages, min_tokens=11) == 11
        assert length("completions", prompt="x") == DEFAULT_MAX_TOKENS
        assert client.server_info().default_max_tokens == 7


@pytest.mark.parametrize("given", [0, -1, 2.0, True, "8"])
def test_other_defaults_are_refused(given):
    with pytest.raises(ValueError, match=rf"default_max_tokens={given!r}; allowed: (an integer, )?1\.\."):
        GatewayConfig(default_max_tokens=given)
