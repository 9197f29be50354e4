"""Calls of tools: the formats in which chat templates have models write them, the grammars that make calls valid, and a
reader that finds calls in the text of an answer as it comes. Knows nothing about requests and how answers are sent.

    Hermes (Qwen)   <tool_call>{"name": .., "arguments": {..}}</tool_call>, once for each call, with text before it
    Llama 3         {"name": .., "parameters": {..}}, and further calls after a semicolon
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
PYTHON_TAG = "<|python_tag|>"
"""Mark with which Llama begins some calls."""
BLANK, BLANKS = " ?", r"[ \t\n\r]*"
"""Regular expressions of blanks between tokens of JSON: as models write calls, and as calls are read."""
ANY = "/(?s:.*)/"
"""A regular expression of any text."""
_NAME = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rf'{BLANKS}\{{{BLANKS}"name"{BLANKS}:{BLANKS}({_NAME}){BLANKS},{BLANKS}"(?:arguments|parameters)"{BLANKS}:{BLANKS}'
    r"(?=\{)"
)
_BEGINS = {
    "llama": re.compile(rf'{BLANKS}\{{{BLANKS}"name"'),
    "mistral": re.compile(rf'{BLANKS}\[{BLANKS}\{{{BLANKS}"name"'),
}
_MAY_BEGIN = re.compile(r'[\s\[{"name]*')
"""Text that may become the beginning of a call."""


class ToolFormat(StrEnum):
    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL = "mistral"

    @staticmethod
    def of(template: str) -> ToolFormat | None:
        """Determine the format from what a chat template tells the model to write. None: it is none of these."""
        if MISTRAL_MARK in template:
            return ToolFormat.MISTRAL
        if HERMES_MARK in template:
            return ToolFormat.HERMES
        return ToolFormat.LLAMA if '"parameters"' in template and "ipython" in template else None

    @property
    def arguments(self) -> str:
        return "parameters" if self is ToolFormat.LLAMA else "arguments"

    def written(self, name: str, arguments: str) -> str:
        """Return a call as the model writes it. `arguments`: as JSON."""
        call = f'{{"name": {json.dumps(name)}, "{self.arguments}": {arguments}}}'
        if self is ToolFormat.HERMES:
            return f"{HERMES_MARK}\n{call}\n{HERMES_END}"
        return f"{MISTRAL_MARK} [{call}]" if self is ToolFormat.MISTRAL else call

    def grammar(self, tools: Sequence[dict[str, Any]], tokenizer: Tokenizer, *, parallel: bool, required: bool) -> str:
        """Return the grammar of answers that call these functions only. `tools`: each with `name` and `parameters`;
        `parallel`: allow more than one call; `required`: the answer consists of calls, at least one. Otherwise the
        answer is any text in which calls are valid once they begin: text that would be read as another call is not
        allowed."""
        rules = _Rules(tools, self.arguments)
        if self is ToolFormat.HERMES:
            rules.hermes(tokenizer, parallel, required)
        elif self is ToolFormat.LLAMA:
            rules.llama(tokenizer, parallel, required)
        else:
            rules.mistral(tokenizer, parallel, required)
        return str(rules)


class _Rules:
    """Collects the rules of a grammar in llguidance's form of Lark. The arguments of each function have a separate
    grammar, so that references within their schema resolve."""

    def __init__(self, tools: Sequence[dict[str, Any]], arguments: str) -> None:
        self._arguments, self._count = arguments, len(tools)
        self._lines: list[str] = []
        for number, tool in enumerate(tools):
            name = json.dumps(tool["name"])
            names = {json.dumps(text) for text in (name, json.dumps(tool["name"], ensure_ascii=False))}
            parameters = _closed(tool.get("parameters") or {})
            schema = {"x-guidance": {"whitespace_pattern": "\\x20"}, "type": "object"} | parameters
            self.add(f"NAME_{number}", " | ".join(sorted(names)))
            self.add(f"arguments_{number}", f"%json {json.dumps(schema)}")
            self.head("HEAD", number, "", BLANK)
        self.add("call", self.calls("HEAD"))

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"

    def add(self, name: str, body: str) -> None:
        self._lines.append(f"{name}: {body}")

    def head(self, name: str, number: int, begin: str, blank: str) -> None:
        """Add the terminal for the part of a call before its arguments. It is read as one token of the grammar, so the
        function is certain at its end. `begin`: what may precede the call; `blank`: blanks between tokens of JSON."""
        before, after = rf'{begin}\{{{blank}"name"{blank}:{blank}', f'{blank},{blank}"{self._arguments}"{blank}:{blank}'
        self.add(f"{name}_{number}", f"/{before}/ NAME_{number} /{after}/")

    def calls(self, head: str) -> str:
        """Return the body of a rule for a call of any function. `head`: name of the terminals before the arguments."""
        return " | ".join(rf"{head}_{number} arguments_{number} /{BLANK}\}}/" for number in range(self._count))

    def text(self, begin: str) -> None:
        """Add the terminal of any text, except text that would be read as a call. `begin`: what may precede a call."""
        key = '"(arguments|parameters)"'
        call = rf'{begin}\{{{BLANKS}"name"{BLANKS}:{BLANKS}{_NAME}{BLANKS},{BLANKS}{key}{BLANKS}:{BLANKS}'
        self.add("TEXT", rf"{ANY} & ~/(?s:{call}(\{{.*)?)/")

    def hermes(self, tokenizer: Tokenizer, parallel: bool, required: bool) -> None:
        mark, end = (_literal(mark, tokenizer) for mark in (HERMES_MARK, HERMES_END))
        if required:
            self.add("tagged", f'{mark} "\\n" call "\\n" {end}')
            self.add("start", "tagged" + (" (/\\n?/ tagged)*" if parallel else ""))
            return
        self.add("TEXT", ANY)
        is_token = mark.startswith("<")
        self.add("begin" if is_token else "begin[lazy]", f"TEXT {mark}")
        self.add("tagged", f"begin /\\n?/ call /\\n?/ {end}")
        if parallel:
            self.add("start", "tagged* TEXT")
        else:
            self.add("REST", "TEXT" if is_token else f"TEXT & ~(TEXT {mark} TEXT)")
            self.add("start", "TEXT | tagged REST")

    def llama(self, tokenizer: Tokenizer, parallel: bool, required: bool) -> None:
        more = ' (";" call)*' if parallel else ""
        if required:
            self.add("start", f"call{more}")
            return
        more = f" (/{BLANK};{BLANK}/ call)*" if parallel else ""
        for number in range(self._count):
            self.head("FIRST", number, BLANKS, BLANKS)
        self.add("first", self.calls("FIRST"))
        self.text(BLANKS)
        tag = _literal(PYTHON_TAG, tokenizer)
        tagged = f"{tag}? " if tag.startswith("<") else ""
        self.add("start", f"{tagged}(TEXT | first{more})")

    def mistral(self, tokenizer: Tokenizer, parallel: bool, required: bool) -> None:
        mark, blank = _literal(MISTRAL_MARK, tokenizer), BLANK if required else BLANKS
        more = (f" (/{BLANK},{BLANK}/ call)*" if parallel else "") + rf" /{BLANK}\]/"
        for number in range(self._count):
            self.head("FIRST", number, rf"{blank}\[{blank}", blank)
        self.add("first", self.calls("FIRST"))
        if required:
            self.add("start", f"{mark} first{more}")
            return
        self.text(rf"{BLANKS}\[{BLANKS}")
        self.add("start", f"TEXT | {mark}? first{more}" if mark.startswith("<") else f"TEXT | first{more}")


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with objects limited to the properties that it names, unless it says something about others.
    Few schemas of tools do, and models keep writing properties where they may. A schema with `allOf` is not changed."""
    return parameters if '"allOf"' in json.dumps(parameters) else _closed_part(parameters)


_OTHERS = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "dependentSchemas"}
    | {"anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef"}
)
"""Keywords by which a schema can describe properties that its `properties` does not name."""


def _closed_part(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for name, value in schema.items():
        if name in ("properties", "$defs", "definitions") and isinstance(value, dict):
            found[name] = {key: _closed_part(part) for key, part in value.items()}
        elif name in ("anyOf", "oneOf", "prefixItems") and isinstance(value, list) and "properties" not in schema:
            found[name] = [_closed_part(part) for part in value]
        elif name == "items":
            found[name] = _closed_part(value)
    if "properties" in schema and not _OTHERS & schema.keys():
        found["additionalProperties"] = False
    return found


def _literal(mark: str, tokenizer: Tokenizer) -> str:
    """Return a mark as it stands in a grammar: a special token with this name if there is one, otherwise text."""
    token = tokenizer.id_of(mark)
    return f"<[{token}]>" if token is not None and not tokenizer.bytes_of(token) else json.dumps(mark)


@dataclass(frozen=True)
class Delta:
    """An addition to an answer's message: content, reasoning, a call that begins (`name`), or more of the last call's
    arguments."""

    content: str = ""
    reasoning: str = ""
    name: str | None = None
    arguments: str = ""


class ToolCallReader:
    """Reads content and calls from the text of one answer. The arguments of a call are passed on as they are written,
    so they are JSON only once they are complete."""

    def __init__(self, format: ToolFormat) -> None:
        self._format = format
        self._state = self._content if format is ToolFormat.HERMES else self._beginning
        self._kept = self._before = ""
        """Text not read yet; and the text before the head of a call, which becomes content if no head follows."""
        self._depth, self._in_string, self._escaped = 0, False, False
        self.calls = 0
        """Number of calls that have begun."""

    def push(self, text: str) -> list[Delta]:
        """Add text. Returns the additions to the message that are certain now."""
        self._kept += text
        return list(self._read())

    def finish(self) -> list[Delta]:
        """Return the remaining additions, at the end of the text."""
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
        text, mark, self._kept = self._kept.partition(HERMES_MARK)
        if mark:
            self._state, self._before = self._head, text[len(text.rstrip()) :] + mark
        else:
            # An end of the text that may become the mark is kept back, with the blanks before it.
            certain = before_mark(text, HERMES_MARK).rstrip()
            text, self._kept = certain, text[len(certain) :]
        if text.strip():
            yield Delta(content=text.rstrip() if mark else text)

    def _beginning(self) -> Iterator[Delta]:
        """Find out whether the whole answer is calls or text."""
        if _BEGINS[self._format].match(self._kept):
            if self._format is ToolFormat.MISTRAL:
                at = self._kept.index("[") + 1
                self._before, self._kept = self._kept[:at], self._kept[at:]
            self._state = self._head
        elif not _MAY_BEGIN.fullmatch(self._kept):
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
        """Yield the arguments, up to the brace that closes them."""
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
        """Skip the text between calls."""
        if self._format is ToolFormat.HERMES:
            _, mark, rest = self._kept.partition(HERMES_END)
            if mark:
                self._kept, self._state = rest, self._content
        else:
            found = re.match(r"[\s}]*[,;]", self._kept)
            if found is not None:
                self._kept, self._state = self._kept[found.end() :], self._head
        yield from ()


def before_mark(text: str, mark: str) -> str:
    """Return the text without an end that is the beginning of `mark`."""
    size = next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
    return text[: len(text) - size]


def _name(written: str) -> str | None:
    """Return the text of a JSON string; None if it is not valid, or holds half of a surrogate pair."""
    try:
        name: str = json.loads(written)
        name.encode()
    except ValueError:
        return None
    return name


def call(call_id: str, index: int, name: str) -> dict[str, Any]:
    """Return a call as a chat's message has it when the call begins."""
    return {"id": f"call_{call_id}_{index}", "type": "function", "function": {"name": name, "arguments": ""}}
