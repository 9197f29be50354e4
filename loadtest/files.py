"""Files that say what to ask, and when: prompts (JSONL), traces (JSONL or CSV). A field that is unknown is refused, not
ignored."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.client import Message, Prompt


@dataclass(frozen=True)
class Asked:
    """What a line asks for; None is left to the settings of the run."""

    prompt: Prompt | None = None
    prompt_tokens: int | None = None
    """Length of a prompt of random tokens, where the line has no prompt."""
    max_tokens: int | None = None
    time: float = 0.0
    """Of a trace: seconds since its start."""


def read_prompts(path: Path) -> list[Asked]:
    """One JSON object a line: `prompt` (text or token ids) or `messages`, and `max_tokens` if it has one of its own."""
    asked = [_asked(values, where, ("prompt", "messages", "max_tokens")) for where, values in _json_lines(path)]
    if missing := next((index for index, line in enumerate(asked, 1) if line.prompt is None), 0):
        raise ValueError(f"{path}: entry {missing} has neither prompt nor messages; give one of them")
    return _not_empty(asked, path)


def read_trace(path: Path) -> list[Asked]:
    """One request a line, JSONL or, by the file's name, CSV with a header; in the order of their times."""
    lines = _csv_lines(path) if path.suffix == ".csv" else _json_lines(path)
    asked = [
        _asked(values, where, ("time", "prompt", "messages", "prompt_tokens", "max_tokens")) for where, values in lines
    ]
    return sorted(_not_empty(asked, path), key=lambda line: line.time)


def _asked(values: dict[str, Any], where: str, allowed: tuple[str, ...]) -> Asked:
    if unknown := values.keys() - set(allowed):
        raise ValueError(f"{where}: {min(unknown)} is not known; allowed: {', '.join(allowed)}")
    time = values.get("time", 0.0 if "time" not in allowed else None)
    if not isinstance(time, (int, float)) or isinstance(time, bool) or not 0 <= time < math.inf:
        raise ValueError(f"{where}: time={time!r}; allowed: seconds since the start, from 0")
    for name in ("prompt_tokens", "max_tokens"):
        value = values.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{where}: {name}={value!r}; allowed: a whole number from 1")
    if sum(values.get(name) is not None for name in ("prompt", "messages", "prompt_tokens")) > 1:
        raise ValueError(f"{where}: gives more than one of prompt, messages and prompt_tokens; give one")
    return Asked(_prompt(values, where), values.get("prompt_tokens"), values.get("max_tokens"), float(time))


def _prompt(values: dict[str, Any], where: str) -> Prompt | None:
    prompt, messages = values.get("prompt"), values.get("messages")
    if messages is not None:
        try:
            return [Message(role=str(message["role"]), content=str(message["content"])) for message in messages]
        except (TypeError, KeyError):
            raise ValueError(
                f"{where}: messages={messages!r}; allowed: a list of objects with role and content"
            ) from None
    is_ids = (
        isinstance(prompt, list) and prompt and all(isinstance(token, int) and 0 <= token < 2**31 for token in prompt)
    )
    if prompt is not None and not isinstance(prompt, str) and not is_ids:
        raise ValueError(f"{where}: prompt={prompt!r}; allowed: text, or a list of token ids")
    return prompt


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: {error}; give one JSON object a line") from error
        if not isinstance(values, dict):
            raise ValueError(f"{where}: {line.strip()[:40]!r} is no JSON object; give one a line")
        yield where, values


def _csv_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Cells that are empty are not given."""
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            where = f"{path}, line {number}"
            if None in row or None in row.values():
                raise ValueError(f"{where} has another number of cells than the header")
            kinds = {"time": float, "prompt_tokens": int, "max_tokens": int}
            try:
                yield where, {name: kinds.get(name, str)(cell) for name, cell in row.items() if cell}
            except ValueError as error:
                raise ValueError(f"{where}: {error}; time is in seconds, counts are whole numbers") from error


def _not_empty(asked: list[Asked], path: Path) -> list[Asked]:
    if not asked:
        raise ValueError(f"{path} is empty; give at least one line")
    return asked
