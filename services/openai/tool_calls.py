"""Calls of tools: how chat templates have models write them, what must be written where a call is required, and calls
read from the text of an answer as it comes. Knows nothing about requests and how answers are sent.

    Hermes (Qwen)   <tool_call>{"name": .., "arguments": {..}}</tool_call>, once for each call, with text before it
    Llama 3         {"name": .., "parameters": {..}}, and others after a semicolon
    Mistral         [TOOL_CALLS] [{"name": .., "arguments": {..}}, ..]"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from smc.model.tokenizer import Tokenizer

MISTRAL_MARK, HERMES_MARK, HERMES_END = "[TOOL_CALLS]", "<tool_call>", "</tool_call>"
BLANKS = {"x-guidance": {"whitespace_pattern": "\\x20"}}
"""Of a schema: between tokens of JSON there is a blank at most, as models write calls."""
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_BEGINS = {"llama": re.compile(r'\s*\{\s*"name"'), "mistral": re.compile(r'\s*\[\s*\{\s*"name"')}
_BLANK = re.compile(r'[\s\[{"name]*')
"""What may become a beginning."""


class ToolFormat(StrEnum):
    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL = "mistral"

    @staticmethod
    def of(template: str) -> ToolFormat | None:
        """By what a chat template tells the model to write; None: it is none of these."""
        if MISTRAL_MARK in template:
            return ToolFormat.MISTRAL
        if HERMES_MARK in template:
            return ToolFormat.HERMES
        return ToolFormat.LLAMA if '"parameters"' in template and "ipython" in template else None

    @property
    def arguments(self) -> str:
        return "parameters" if self is ToolFormat.LLAMA else "arguments"

    def written(self, name: str, arguments: str) -> str:
        """A call as the model writes it."""
        call = f'{{"name": {json.dumps(name)}, "{self.arguments}": {arguments}}}'
        if self is ToolFormat.HERMES:
            return f"{HERMES_MARK}\n{call}\n{HERMES_END}"
        return f"{MISTRAL_MARK} [{call}]" if self is ToolFormat.MISTRAL else call

    def grammar(self, tools: Sequence[dict[str, Any]], parallel: bool, tokenizer: Tokenizer) -> str:
        """Of answers that are calls of these functions, each with `name` and `parameters`, at least one and without
        `parallel` no other."""
        call = json.dumps({"anyOf": [self._schema(tool) for tool in tools]} | BLANKS)
        if self is ToolFormat.HERMES:
            more = " (/\\n?/ call)*" if parallel else ""
            begin, end = (_literal(mark, tokenizer) for mark in (HERMES_MARK, HERMES_END))
            return f'start: call{more}\ncall: {begin} "\\n" object "\\n" {end}\nobject: %json {call}\n'
        if self is ToolFormat.LLAMA:
            more = ' (";" object)*' if parallel else ""
            return f"start: object{more}\nobject: %json {call}\n"
        bounds = {"minItems": 1} | ({} if parallel else {"maxItems": 1})
        return f"start: {_literal(MISTRAL_MARK, tokenizer)} list\nlist: %json " + json.dumps(
            {"type": "array", "items": json.loads(call), **bounds, **BLANKS}
        )

    def _schema(self, tool: dict[str, Any]) -> dict[str, Any]:
        parameters = tool.get("parameters") or {"type": "object"}
        return {
            "type": "object",
            "properties": {"name": {"const": tool["name"]}, self.arguments: parameters},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }


def _literal(mark: str, tokenizer: Tokenizer) -> str:
    """In a grammar: a token, if there is one of this text that stands for no text, or the text."""
    token = tokenizer.id_of(mark)
    return f"<[{token}]>" if token is not None and not tokenizer.bytes_of(token) else json.dumps(mark)


@dataclass(frozen=True)
class Delta:
    """More of an answer's message: text, a call that begins, or more of the arguments of the last one."""

    content: str = ""
    reasoning: str = ""
    name: str | None = None
    arguments: str = ""


class ToolCallReader:
    """Reads the text of one answer. The arguments of a call come as they are written, so that they are JSON once they
    are complete."""

    def __init__(self, format: ToolFormat) -> None:
        self._format = format
        self._state = self._content if format is ToolFormat.HERMES else self._beginning
        self._kept = self._before = ""
        """Not read yet; and what has been read of a call before its head, which is text if none follows."""
        self._depth, self._in_string, self._escaped = 0, False, False
        self.calls = 0
        """That have begun."""

    def push(self, text: str) -> list[Delta]:
        """What is known with more text."""
        self._kept += text
        return list(self._read())

    def finish(self) -> list[Delta]:
        """What is left, at the end."""
        kept, self._kept = self._kept, ""
        is_text = self._state in (self._content, self._beginning, self._head)
        kept = self._before + kept if self._state == self._head else kept
        blank = self.calls and not kept.strip()
        return [Delta(content=kept)] if kept and is_text and not blank else []

    def _read(self) -> Iterator[Delta]:
        while True:
            before = (self._state, self._kept)
            yield from self._state()
            if (self._state, self._kept) == before:
                return

    def _content(self) -> Iterator[Delta]:
        text, mark, self._kept = *self._kept.partition(HERMES_MARK)[:2], self._kept.partition(HERMES_MARK)[2]
        if mark:
            self._state, self._before = self._head, text[len(text.rstrip()) :] + mark
        else:
            # What may become the mark is kept, and blanks that may stand before it.
            sizes = (n for n in range(len(HERMES_MARK) - 1, 0, -1) if text.endswith(HERMES_MARK[:n]))
            size = next(sizes, 0)
            text, self._kept = text[: len(text) - size], text[len(text) - size :]
            blank = len(text) - len(text.rstrip())
            self._kept = text[len(text) - blank :] + self._kept
            text = text[: len(text) - blank]
        if text.strip():
            yield Delta(content=text.rstrip() if mark else text)

    def _beginning(self) -> Iterator[Delta]:
        """The whole answer is calls, or text."""
        if _BEGINS[self._format].match(self._kept):
            if self._format is ToolFormat.MISTRAL:
                at = self._kept.index("[") + 1
                self._before, self._kept = self._kept[:at], self._kept[at:]
            self._state = self._head
        elif not _BLANK.fullmatch(self._kept):
            self._state = self._text
        yield from ()

    def _text(self) -> Iterator[Delta]:
        text, self._kept = self._kept, ""
        if text:
            yield Delta(content=text)

    def _head(self) -> Iterator[Delta]:
        found = _HEAD.match(self._kept)
        name = None if found is None else _name(found[1])
        if found is not None and name is not None:
            self._before, self._kept = "", self._kept[found.end() :]
            self.calls += 1
            self._depth, self._in_string, self._escaped = 0, False, False
            self._state = self._arguments
            yield Delta(name=name)

    def _arguments(self) -> Iterator[Delta]:
        """Up to the brace that closes them."""
        end = len(self._kept)
        for at, character in enumerate(self._kept):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if not self._depth:
                    end, self._state = at + 1, self._after
                    break
        text, self._kept = self._kept[:end], self._kept[end:]
        if text:
            yield Delta(arguments=text)

    def _after(self) -> Iterator[Delta]:
        """What stands between calls."""
        if self._format is ToolFormat.HERMES:
            _, mark, rest = self._kept.partition(HERMES_END)
            if mark:
                self._kept, self._state = rest, self._content
        else:
            found = re.match(r"[\s}]*[,;]", self._kept)
            if found is not None:
                self._kept, self._state = self._kept[found.end() :], self._head
        yield from ()


def _name(written: str) -> str | None:
    """What a string of JSON holds; None: this is none, or holds half of a surrogate pair."""
    try:
        name: str = json.loads(written)
        name.encode()
    except ValueError:
        return None
    return name


def call(call_id: str, index: int, name: str) -> dict[str, Any]:
    """As its message has it when it begins."""
    return {"id": f"call_{call_id}_{index}", "type": "function", "function": {"name": name, "arguments": ""}}
