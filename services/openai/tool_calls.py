"""Calls of tools: the formats in which chat templates have models write them, and the grammars that make calls valid.
Knows nothing about requests and how answers are sent.

    Hermes (Qwen)   <tool_call>{"name": .., "arguments": {..}}</tool_call>, once for each call, with text before it
    Llama 3         {"name": .., "parameters": {..}}, and further calls after a semicolon
    Mistral         [TOOL_CALLS] [{"name": .., "arguments": {..}}, ..]"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from smc.api.constraint import schema_text
from smc.model.tokenizer import Tokenizer

MISTRAL_MARK, HERMES_MARK, HERMES_END = "[TOOL_CALLS]", "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
"""Mark with which Llama begins some calls."""
BLANK, BLANKS = " ?", r"[ \t\n\r]*"
"""Regular expressions of blanks between tokens of JSON: as models write calls, and as calls are read."""
MOST_CALLS = 32
"""Maximum number of calls of an answer that must consist of calls."""
MORE_CALLS = f"{{0,{MOST_CALLS - 1}}}"
"""How often a rule of a grammar may repeat a call after the first."""
ANY = "/(?s:.*)/"
"""A regular expression of any text."""
_STRING = r'"(?:[^"\\]|\\.)*"'
_KEY = rf'"(id|type|call_id)"{BLANKS}:{BLANKS}'
FURTHER = rf'({_KEY}"[^"\\\x00-\x1F]*"{BLANKS},{BLANKS})*'
"""A regular expression of members of a call without effect, as they may be written before its name."""
_ANY_FURTHER = rf"({_KEY}({_STRING}|[-+.\w]+){BLANKS},{BLANKS})*"
"""The same as they are read, and more."""
_OTHERS = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "dependentSchemas"}
    | {"anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef"}
)
"""Keywords by which a schema can describe properties that its `properties` does not name."""


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
        """Return the grammar of answers that call these functions only. `tools`: each with `name` and `parameters`,
        None for no arguments; `parallel`: allow more than one call; `required`: the answer consists of 1 to
        `MOST_CALLS` calls. Otherwise the answer is any text in which calls are valid once they begin: text that would
        be read as another call is not allowed."""
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
        self._names = "|".join(_exactly(text) for tool in tools for text in written_names(tool["name"]))
        self._lines: list[str] = []
        for number, tool in enumerate(tools):
            self.add(f"NAME_{number}", " | ".join(map(json.dumps, written_names(tool["name"]))))
            self.add(arguments_rule(number), _arguments(tool["parameters"]))
        self.heads("HEAD", "", BLANK)
        self.add("call", self.calls("HEAD"))

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"

    def add(self, name: str, body: str) -> None:
        self._lines.append(f"{name}: {body}")

    def heads(self, name: str, begin: str, blank: str, further: str = "") -> None:
        """Add a terminal for each function: the part of its calls before their arguments. It is read as one token of
        the grammar, so the function is certain at its end. `begin`: what may precede the call; `blank`: blanks between
        tokens of JSON; `further`: members that may precede the name."""
        self.add(f"{name}_BEGIN", rf'/{begin}\{{{blank}{further}"name"{blank}:{blank}/')
        self.add(f"{name}_END", f'/{blank},{blank}"{self._arguments}"{blank}:{blank}/')
        for number in range(self._count):
            self.add(f"{name}_{number}", f"{name}_BEGIN NAME_{number} {name}_END")

    def calls(self, head: str, end: str = rf"{BLANK}\}}") -> str:
        """Return the body of a rule for a call of any function. `head`: name of the terminals before the arguments;
        `end`: what follows them."""
        calls = " | ".join(f"{head}_{number} {arguments_rule(number)}" for number in range(self._count))
        return f"({calls}) /{end}/"

    def text(self, terminal: str, begin: str, names: str = _STRING) -> None:
        """Add the terminal of any text, except text that would be read as a call. `begin`: what may precede a call;
        `names`: a regular expression of names, as JSON."""
        key = '"(arguments|parameters)"'
        name = f'"name"{BLANKS}:{BLANKS}({names}){BLANKS},{BLANKS}'
        call = rf"{begin}\{{{BLANKS}{_ANY_FURTHER}{name}{_ANY_FURTHER}{key}{BLANKS}:{BLANKS}"
        self.add(terminal, rf"{ANY} & ~/(?s:{call}(\{{.*)?)/")

    def hermes(self, tokenizer: Tokenizer, parallel: bool, required: bool) -> None:
        mark, end = (_literal(mark, tokenizer) for mark in (HERMES_MARK, HERMES_END))
        if required:
            self.add("tagged", f'{mark} "\\n" call "\\n" {end}')
            self.add("start", "tagged" + (f" (/\\n?/ tagged){MORE_CALLS}" if parallel else ""))
            return
        # Some models leave out the marks: a call with which the answer begins is one without them, as are those that
        # follow. The end of a fence is part of what follows, since a lexeme that may go on over blanks, but need not,
        # could not be followed by blanks.
        fenced = rf"{BLANKS}(```{BLANKS})?(```(json|tool_call)?{BLANKS})?"
        self.heads("FIRST", fenced, BLANKS, FURTHER)
        self.add("unmarked", self.calls("FIRST", rf"{BLANKS}\}}"))
        self.text("BEGIN", fenced, self._names)
        self.add("TEXT", ANY)
        is_token = mark.startswith("<")
        for name, text in (("opened", "BEGIN"), ("later", "TEXT")):
            self.add(name if is_token else f"{name}[lazy]", f"{text} {mark}")
        self.add("tagged", f"/\\n?/ call /\\n?/ {end}")
        if parallel:
            self.add("start", "unmarked* (BEGIN | opened tagged (later tagged)* TEXT)")
            return
        no_mark = "" if is_token else f" & ~(TEXT {mark} TEXT)"
        self.add("REST", f"TEXT{no_mark}")
        self.add("AFTER", f"BEGIN{no_mark}")
        self.add("start", "BEGIN | opened tagged REST | unmarked AFTER")

    def llama(self, tokenizer: Tokenizer, parallel: bool, required: bool) -> None:
        if required:
            self.add("start", "call" + (f' (";" call){MORE_CALLS}' if parallel else ""))
            return
        more = f" (/{BLANK};{BLANK}/ call)*" if parallel else ""
        self.heads("FIRST", BLANKS, BLANKS, FURTHER)
        self.add("first", self.calls("FIRST"))
        self.text("TEXT", BLANKS)
        tag = _literal(PYTHON_TAG, tokenizer)
        tagged = f"{tag}? " if tag.startswith("<") else ""
        self.add("start", f"{tagged}(TEXT | first{more})")

    def mistral(self, tokenizer: Tokenizer, parallel: bool, required: bool) -> None:
        mark = _literal(MISTRAL_MARK, tokenizer)
        more = (f" (/{BLANK},{BLANK}/ call){MORE_CALLS if required else '*'}" if parallel else "") + rf" /{BLANK}\]/"
        if required:
            begin, blank, further = rf"{BLANK}\[{BLANK}", BLANK, ""
        else:
            is_token = mark.startswith("<")
            begin = rf"{BLANKS}\[{BLANKS}" if is_token else rf"{BLANKS}(\[TOOL_CALLS\]{BLANKS})?\[{BLANKS}"
            blank, further = BLANKS, FURTHER
            self.text("TEXT", begin)
        self.heads("FIRST", begin, blank, further)
        self.add("first", self.calls("FIRST"))
        if required:
            self.add("start", f"{mark} first{more}")
        else:
            self.add("start", f"TEXT | {mark}? first{more}" if is_token else f"TEXT | first{more}")


def written_names(name: str) -> list[str]:
    """Return a function's name as JSON, as it may be written in constrained calls."""
    return sorted({json.dumps(name), json.dumps(name, ensure_ascii=False)})


def _exactly(text: str) -> str:
    """Return a regular expression of this text alone."""
    return "".join(letter if letter.isascii() and letter.isalnum() else f"\\x{{{ord(letter):X}}}" for letter in text)


def arguments_rule(number: int) -> str:
    """Return the name of the rule for the arguments of a function."""
    return f"arguments_{number}"


def _arguments(parameters: dict[str, Any] | None) -> str:
    """Return the body of a rule for arguments that follow a schema; None: there are none."""
    if parameters is None:
        return '"{}"'
    schema = {"x-guidance": {"whitespace_pattern": "\\x20"}, "type": "object"} | _closed(parameters)
    return f"%json {schema_text(schema)}"


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with objects limited to the properties that it names, unless it says something about others.
    Few schemas of tools do, and models keep writing properties where they may. A schema with `allOf` is not changed."""
    return parameters if '"allOf"' in json.dumps(parameters) else _closed_part(parameters)


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
class CallSyntax:
    """How the calls of an answer are written."""

    format: ToolFormat
    names: frozenset[str] = frozenset()
    """Names of the offered functions."""
    constrained: bool = False
    """Whether a grammar (`ToolFormat.grammar`) says where calls begin and how they are written."""
    required: bool = False
    """Whether the answer consists of calls alone."""


def call(call_id: str, index: int, name: str, arguments: str = "") -> dict[str, Any]:
    """Return a call as a chat's message has it, with the `arguments` so far."""
    return {"id": f"call_{call_id}_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
