"""The message of an answer, read from its text: reasoning, content and calls of tools."""

from __future__ import annotations

from typing import Any

from services.openai.reasoning import Reasoning, ReasoningReader
from services.openai.tool_calls import Delta, ToolCallReader, ToolFormat, call


class MessageReader:
    """Reads the text of one answer as it comes."""

    def __init__(self, tool_format: ToolFormat | None, reasoning: Reasoning | None) -> None:
        self._reasoning = None if reasoning is None else ReasoningReader(reasoning.is_open)
        self._calls = None if tool_format is None else ToolCallReader(tool_format)

    @property
    def has_calls(self) -> bool:
        return self._calls is not None and self._calls.calls > 0

    def push(self, text: str) -> list[Delta]:
        """What is known with more text."""
        return self._deltas(*(("", text) if self._reasoning is None else self._reasoning.push(text)))

    def finish(self) -> list[Delta]:
        """What is left, at the end."""
        deltas = [] if self._reasoning is None else self._deltas(*self._reasoning.finish())
        return deltas + ([] if self._calls is None else self._calls.finish())

    def _deltas(self, reasoning: str, text: str) -> list[Delta]:
        found = [Delta(reasoning=reasoning)] if reasoning else []
        if self._calls is not None:
            return found + self._calls.push(text)
        return found + ([Delta(content=text)] if text else [])


def message_of(text: str, tool_format: ToolFormat | None, reasoning: Reasoning | None, call_id: str) -> dict[str, Any]:
    """A whole answer as a message. `call_id`: what ids of calls begin with."""
    reader = MessageReader(tool_format, reasoning)
    content = thoughts = ""
    calls: list[dict[str, Any]] = []
    for delta in (*reader.push(text), *reader.finish()):
        content, thoughts = content + delta.content, thoughts + delta.reasoning
        if delta.name is not None:
            calls.append(call(call_id, len(calls), delta.name))
        if delta.arguments:
            calls[-1]["function"]["arguments"] += delta.arguments
    message: dict[str, Any] = {"role": "assistant", "content": content or None if calls else content}
    if thoughts:
        message["reasoning_content"] = thoughts
    return message | ({"tool_calls": calls} if calls else {})
