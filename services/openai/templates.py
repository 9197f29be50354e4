"""Messages, calls and tools in the form that chat templates read, and how an answer may use tools. Knows nothing about
bodies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.openai.bodies import BadRequest

REASONING_EFFORT = "reasoning_effort"
"""Name of the template variable."""


@dataclass(frozen=True)
class ToolUse:
    """Tools that a chat offers to the model."""

    functions: tuple[dict[str, Any], ...]
    """The functions, each with `name` and, if it has any, `parameters`."""
    places: tuple[int, ...]
    """Index of each in the caller's list."""
    required: bool
    """Whether the answer must consist of calls of these functions."""
    parallel: bool
    """Whether the answer may have more than one call; if calls are required, at most `MOST_CALLS`."""

    @property
    def limits_calls(self) -> bool:
        """Whether some calls that the model could write are not allowed."""
        return self.required or not self.parallel or any(function.get("strict") for function in self.functions)

    @property
    def checked(self) -> list[dict[str, Any]]:
        """The functions with their `parameters`: the schema that calls must follow, None for no arguments. The
        arguments of a function that is not checked are any object."""
        return [{"name": function["name"], "parameters": self._schema(function)} for function in self.functions]

    def _schema(self, function: dict[str, Any]) -> dict[str, Any] | None:
        if not function.get("parameters"):
            return None
        return function["parameters"] if self.required or function.get("strict") else {"type": "object"}


def tool_use(tools: Sequence[dict[str, Any]], choice: str, name: str | None, parallel: bool | None) -> ToolUse | None:
    """Return how an answer may use tools. `tools`: see `tool`; `choice`: `auto`, `none` or `required`; `name`: the only
    function that may be called; `parallel`: None if the body does not say it. Raises BadRequest."""
    if not tools or choice == "none":
        if choice == "required":
            raise BadRequest("tool_choice requires a call, and tools is missing", "tool_choice")
        return None
    functions = tuple(tool["function"] for tool in tools)
    places = tuple(place for place, function in enumerate(functions) if name in (None, function["name"]))
    if not places:
        names = ", ".join(repr(function["name"]) for function in functions)
        raise BadRequest(f"tool_choice names {name!r}; allowed: {names}", "tool_choice")
    required = choice == "required"
    # Where calls are required, a weak model repeats one until its answer is full: several must be asked for.
    parallel = not required if parallel is None else parallel and name is None
    return ToolUse(tuple(functions[place] for place in places), places, required, parallel)


def tool(name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None) -> dict[str, Any]:
    """Return a tool in the form that chat templates read."""
    function = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def chat_message(role: str, content: str, calls: Sequence[dict[str, Any]] = (), **more: str | None) -> dict[str, Any]:
    """Return a message in the form that chat templates read. `calls`: see `tool_call`; `more`: further fields; those
    that are None are left out."""
    # `developer` is what later models call `system`; templates know the older word.
    read: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    read |= {name: value for name, value in more.items() if value is not None}
    return read | ({"tool_calls": list(calls)} if calls else {})


def tool_call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a call in the form that chat templates read."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_of(text: str, field: str, place: str) -> dict[str, Any]:
    """Return the arguments of a call, an object as JSON. `place`: where the caller's body has them, within `field`.
    Raises BadRequest."""
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{place} is not JSON; allowed: an object, as JSON in a string", field) from error
    if not isinstance(arguments, dict):
        raise BadRequest(f"{place} is not an object; allowed: an object, as JSON in a string", field)
    return arguments
