"""LangChain's own test suite for chat models, over langchain-openai. With tools the model has 135 million parameters;
it does not choose tools by itself and does not end unconstrained JSON, so `test_agent_loop` and `test_json_mode` fail.
Tests of structured output pass with PENALTY=1.2 in the environment, tests of tools without it."""

from __future__ import annotations

import os
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

TOOLS = bool(os.environ["SMCSERVE_TOOLS"])
"""Whether the model's chat template renders tools."""


class TestSmcserve(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        params = {
            "model": "demo",
            "base_url": os.environ["SMCSERVE_URL"],
            "api_key": "none",
            "seed": 1,
            "max_tokens": 40,
        }
        if TOOLS:
            # The model repeats calls, if allowed, and words. PENALTY=1.2 makes its texts end, but spoils text that it
            # copies.
            penalty = float(os.environ.get("PENALTY", "1"))
            params |= {"max_tokens": 120, "temperature": 0, "model_kwargs": {"parallel_tool_calls": False}}
            params |= {"extra_body": {"repetition_penalty": penalty}}
        return params | {"stream_usage": True}

    @property
    def has_tool_calling(self) -> bool:
        return TOOLS

    @property
    def has_structured_output(self) -> bool:
        return TOOLS

    @property
    def supports_json_mode(self) -> bool:
        return TOOLS

    @property
    def model_override_value(self) -> str:
        return "demo"
