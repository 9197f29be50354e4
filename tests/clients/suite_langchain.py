"""LangChain's own suite for chat models, over langchain-openai."""

from __future__ import annotations

import os
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


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
        return params | {"stream_usage": True}

    @property
    def has_tool_calling(self) -> bool:
        """Templates may offer tools; what the model writes about them is text."""
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def model_override_value(self) -> str:
        return "demo"
