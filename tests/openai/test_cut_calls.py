"""Calls and what ends an answer: required calls are completed, and a call within which an answer ends is never reported
as complete, in chats, responses and messages, whole and streamed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest

from services.openai.anthropic import MESSAGES
from services.openai.bodies import CHAT
from services.openai.responses import RESPONSES
from tests.openai.asking import ADD, events, post, user

pytestmark = pytest.mark.xdist_group("tools")
PATHS = (CHAT, RESPONSES, MESSAGES)
WRITTEN = '<tool_call>\n{"name": "add", "arguments": {"a": 22, "b": true}}\n</tool_call>'
LAST = {CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}


@dataclass
class Ending:
    """How an answer ended, in the terms of its API."""

    reason: str
    """The finish reason, the response's status, or the stop reason."""
    arguments: list[str]
    """Arguments of the calls."""
    text: str
    statuses: tuple[str, ...] = ()
    """Of the output items that are calls."""


def ended(service, path: str, stream: bool, **more: Any) -> Ending:
    """Ask for a call of `add`."""
    tool: dict[str, Any] = {"name": "add"} | ({"input_schema": ADD} if path == MESSAGES else {"parameters": ADD})
    if path == CHAT:
        tool = {"type": "function", "function": tool}
    elif path == RESPONSES:
        tool["type"] = "function"
    more = {LAST[path] if name == "max_tokens" else name: value for name, value in more.items()}
    body = {LAST[path]: 200, "tools": [tool], "seed": 4, "method": "target", "stream": stream} | more
    body["input" if path == RESPONSES else "messages"] = user("x")
    said = post(service, json.dumps(body).encode(), path)
    assert said.status == 200, said.data
    return {CHAT: chat_ending, RESPONSES: response_ending, MESSAGES: message_ending}[path](said, stream)


def chat_ending(said, stream: bool) -> Ending:
    if not stream:
        (choice,) = said.json["choices"]
        calls = choice["message"].get("tool_calls", ())
        texts = [call["function"]["arguments"] for call in calls]
        return Ending(choice["finish_reason"], texts, choice["message"]["content"] or "")
    text, calls, reason = "", [], None
    for event in events(said.data)[:-1]:
        (choice,) = event["choices"]
        text += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                calls.append("")
            calls[-1] += call["function"]["arguments"]
        reason = choice["finish_reason"]
    return Ending(reason, calls, text)


def response_ending(said, stream: bool) -> Ending:
    response = named(said)[-1]["response"] if stream else said.json
    if stream:
        assert named(said)[-1]["type"] == f"response.{response['status']}"
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    text = "".join(item["content"][0]["text"] for item in response["output"] if item["type"] == "message")
    reason = (response["incomplete_details"] or {"reason": response["status"]})["reason"]
    return Ending(reason, [call["arguments"] for call in calls], text, tuple(call["status"] for call in calls))


def message_ending(said, stream: bool) -> Ending:
    if not stream:
        blocks = said.json["content"]
        calls = [json.dumps(block["input"]) for block in blocks if block["type"] == "tool_use"]
        return Ending(said.json["stop_reason"], calls, "".join(block.get("text", "") for block in blocks))
    calls, text, reason = [], "", None
    for event in named(said):
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls.append("")
        elif event["type"] == "content_block_delta":
            calls[-1:] = [call + event["delta"].get("partial_json", "") for call in calls[-1:]]
            text += event["delta"].get("text", "")
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    return Ending(reason, calls, text)


def named(said) -> list[dict]:
    lines = said.data.decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def stops(path: str, *strings: str) -> dict[str, Any]:
    if path == MESSAGES:
        return {"stop_sequences": list(strings)}
    return {"stop": list(strings)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_required_call_is_completed(tool_service, path: str, stream: bool):
    """Neither strings nor tokens within a required call stop it; it is one call."""
    choice = {"type": "any"} if path == MESSAGES else "required"
    comma = tool_service.pair.tokenizer.encode(":", add_special=False)
    how = stops(path, "\n", "{", "}", '"') | {"stop_token_ids": comma, "tool_choice": choice}
    end = ended(tool_service, path, stream, **how)
    assert end.reason == {CHAT: "tool_calls", RESPONSES: "completed", MESSAGES: "tool_use"}[path]
    (arguments,) = end.arguments
    jsonschema.validate(json.loads(arguments), ADD)
    assert not end.text and end.statuses in ((), ("completed",))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_required_call_cut_in_its_head_is_no_text(tool_service, path: str, stream: bool):
    choice = {"type": "any"} if path == MESSAGES else "required"
    for size in (1, 6, 12):
        end = ended(tool_service, path, stream, tool_choice=choice, max_tokens=size)
        assert end.reason == {CHAT: "length", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}[path]
        assert not end.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_call_that_a_stop_cuts_is_not_complete(tool_service, path: str, stream: bool):
    """Under `auto`: the constraint has the model write a call. A stop after the arguments leaves the call complete."""
    how = {"constraint": {"choice": [WRITTEN]}}
    cut = ended(tool_service, path, stream, **how, **stops(path, ', "b'))
    assert cut.reason == {CHAT: "stop", RESPONSES: "stop", MESSAGES: "stop_sequence"}[path]
    assert cut.arguments == ['{"a": 22}' if path == MESSAGES and not stream else '{"a": 22'] and not cut.text
    assert cut.statuses == (("incomplete",) if path == RESPONSES else ())
    # The first token with a 2 is within the arguments.
    tokenizer = tool_service.pair.tokenizer
    twos = [token for token in range(tokenizer.size) if b"2" in tokenizer.bytes_of(token)]
    cut = ended(tool_service, path, stream, **how, stop_token_ids=twos)
    assert cut.reason == {CHAT: "stop", RESPONSES: "stop", MESSAGES: "end_turn"}[path]
    assert len(cut.arguments) == 1 and "22" not in cut.arguments[0] and not cut.text
    assert cut.statuses == (("incomplete",) if path == RESPONSES else ())
    whole = ended(tool_service, path, stream, **how, **stops(path, "</tool"))
    assert whole.reason == {CHAT: "tool_calls", RESPONSES: "completed", MESSAGES: "tool_use"}[path]
    assert [json.loads(text) for text in whole.arguments] == [{"a": 22, "b": True}] and not whole.text
