"""Grammars in llguidance's form of Lark before they are compiled: takes out alternatives that produce no text. Knows
nothing about the library that compiles them, except its syntax.

The text is edited in place and otherwise kept as it is. Terminals are regular expressions, whose own alternatives the
library handles: only a whole terminal that matches nothing is a dead end. A grammar that this module cannot read is
left to the library."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Set
from typing import NamedTuple

from smc.grammar.json_schema import Unsatisfiable
from smc.grammar.productions import Productions

START = "start"
_LEXEME = re.compile(
    r"""(?P<blank>[ \t]+|(?:\#|//)[^\n]*)|(?P<newline>(?:\r?\n)+[ \t]*)
    |(?P<string>"(?:\\[^\n]|[^"\\\n])*"i?)|(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)|(?P<special><[^<>\s]+>)
    |(?P<rule>!?[_?]?[a-z][_a-z0-9\-]*)|(?P<token>_?[A-Z][_A-Z0-9\-]*)|(?P<keyword>%[a-z]+)|(?P<grammar>@[\w\-]+)
    |(?P<number>[+-]?[0-9]+(?:\.(?!\.)[0-9]*)?)|(?P<mark>->|\.\.|[:,.=|&~(){}\[\]+*?])""",
    re.VERBOSE | re.DOTALL,
)
_EXCLUDES = re.compile(r"&&|--|~~|\[\^|\\[pP]")
"""What a regular expression that matches nothing has: operators on classes of characters."""
_RULE_LINE = re.compile(r"^[ \t]*[!?_]*[A-Za-z][^\n:]*:", re.MULTILINE)
ENDS = ("|", ")", "]", "->")
"""Marks after an alternative."""
Edit = tuple[int, int, str]
"""Replaces the characters between two positions."""
MOST_NESTED = 1000
"""Maximum depth of rules within rules, with the groups around them: the library calls itself for each, and a stack of
8 MiB ends beyond 2,500."""


class Lexeme(NamedTuple):
    kind: str
    text: str
    begin: int
    end: int


class _Unreadable(Exception):
    """The grammar has syntax that this module does not know."""


class _Alternatives(NamedTuple):
    """The alternatives of a rule or a group."""

    symbol: Hashable
    spans: list[tuple[int, int]]
    """First and last character of each."""
    bars: list[tuple[int, int]]
    """The bars between them."""


class TooDeep(ValueError):
    """A grammar is nested more deeply than the library can read."""


class LarkGrammar:
    """A grammar, and what its rules need to produce a text."""

    def __init__(self, text: str) -> None:
        """Raises ValueError if this module cannot read the text, TooDeep if the library cannot."""
        self._text = text
        self.schemas: list[tuple[str, int, int]] = []
        """JSON schemas: the rule that has each, and its position."""
        self._rule_name = ""
        self._productions = Productions()
        self._defined: set[str] = set()
        self._named: set[str] = set()
        self._lists: list[_Alternatives] = []
        self._optional: list[tuple[Hashable, int, int]] = []
        """Symbols that may be left out, and their positions."""
        self._terminals: dict[str, list[Lexeme]] = {}
        self._expressions: set[str] = set()
        """Regular expressions within rules that may match nothing."""
        self._groups = 0
        self._depth = 0
        """Groups around the current position."""
        self._uses: dict[str, list[tuple[str, int]]] = {}
        """Rules and terminals that each names, in their order, each with the number of groups around it."""
        try:
            self._lexemes = [*_lexemes(text), *2 * [Lexeme("end", "", len(text), len(text))]]
            self._at = 0
            self._read()
        except (_Unreadable, RecursionError, json.JSONDecodeError) as error:
            if len(_RULE_LINE.findall(text)) > MOST_NESTED:
                raise TooDeep(f"it has more than {MOST_NESTED} rules, and its depth is not known") from error
            raise ValueError("the grammar cannot be read") from error
        self._check_depth()

    def _check_depth(self) -> None:
        """Raise TooDeep if the library would call itself too often: it reads a rule where it is first named."""
        seen = {START}
        path = [(0, iter(self._uses.get(START, ())))]
        while path:
            depth, uses = path[-1]
            name, groups = next(uses, ("", 0))
            if not name:
                path.pop()
            elif name not in seen:
                seen.add(name)
                depth += 1 + groups
                path.append((depth, iter(self._uses.get(name, ()))))
                if depth > MOST_NESTED:
                    raise TooDeep(f"{name} is within more than {MOST_NESTED} other rules and groups")

    def without_dead_ends(self, is_empty: Callable[[str], bool], cut_schema: Callable[[str, str], str]) -> str:
        """Return the grammar without alternatives that produce no text; the same text if it has none. `is_empty`: tells
        whether a grammar that is one terminal matches nothing; `cut_schema`: the same function as this one, for a JSON
        schema, given the name of its rule. Raises Unsatisfiable if nothing is left."""
        edits, empty = [], set(self._empty_terminals(is_empty))
        reasons = [f"{name} matches no text" for name in sorted(empty)]
        for name in self._named - self._defined - empty:
            self._productions.add(name)  # a terminal, imported, or unknown to the library, too
        for expression in sorted(self._expressions):
            if is_empty(f"start: {expression}"):
                reasons.append(f"{expression:.60} matches no text")
            else:
                self._productions.add(expression)
        for rule, begin, end in self.schemas:
            try:
                edits.append((begin, end, cut_schema(rule, self._text[begin:end])))
                self._productions.add(begin)
            except Unsatisfiable as error:
                reasons.append(f"the JSON schema of {rule}: {error}")
        productive = self._productions.productive()
        if START in self._defined and START not in productive:
            raise Unsatisfiable(next(iter(reasons), "every text contains another one, without end"))
        edits += self._cuts(productive)
        return _edited(self._text, edits)

    def _empty_terminals(self, is_empty: Callable[[str], bool]) -> Iterator[str]:
        """Yield the terminals that match no text."""
        text = "\n".join(self._text[part[0].begin : part[-1].end] for part in self._terminals.values())
        waiting = [name for name, lexemes in self._terminals.items() if any(map(_may_be_empty, lexemes))]
        users: dict[str, list[str]] = {}
        for name, lexemes in self._terminals.items():
            for lexeme in lexemes[1:]:
                if lexeme.kind == "token":
                    users.setdefault(lexeme.text, []).append(name)
        found = set(waiting)
        while waiting:
            new = [name for name in users.get(waiting.pop(), ()) if name not in found]
            found.update(new)
            waiting += new
        for name in self._terminals:
            if name in found and is_empty(f"{text}\nstart: {name}"):
                yield name

    def _cuts(self, productive: Set[Hashable]) -> Iterator[Edit]:
        for symbol, begin, end in self._optional:
            if symbol not in productive:
                yield begin, end, '""'
        for symbol, spans, bars in self._lists:
            lives = [(symbol, number) in productive for number in range(len(spans))]
            if all(lives) or not any(lives):
                continue
            first = lives.index(True)
            for number, (begin, end) in enumerate(spans):
                if not lives[number]:
                    yield (bars[number - 1][0], end, "") if number > first else (begin, bars[number][1], "")

    def _read(self) -> None:
        while (lexeme := self._next("newline")).kind != "end":
            if lexeme.kind == "rule":
                self._rule(lexeme.text.lstrip("!?"))
            elif lexeme.kind == "token":
                self._terminals[lexeme.text] = [lexeme, *self._definition()]
                self._uses[lexeme.text] = list(_uses(self._terminals[lexeme.text][1:]))
            elif lexeme.text in ("%ignore", "%import", "%declare", "%llguidance"):
                self._definition()
            else:
                raise _Unreadable

    def _definition(self) -> list[Lexeme]:
        """Skip the rest of a definition."""
        begin = self._at
        while not self._is_over():
            self._at += 1
        return [one for one in self._lexemes[begin : self._at] if one.kind != "newline"]

    def _is_over(self) -> bool:
        """Return whether no further alternative of the definition begins here."""
        if self._lexemes[self._at].kind not in ("newline", "end"):
            return False
        at = self._at
        while self._lexemes[at].kind == "newline":
            at += 1
        return self._lexemes[at].text != "|"

    def _rule(self, name: str) -> None:
        self._rule_name = name
        self._defined.add(name)
        if self._accept("."):
            self._expect("number")
        if self._accept("["):
            while not self._accept("]"):
                self._next()
        self._expect(":")
        self._alternatives(name)
        if not self._is_over():
            raise _Unreadable

    def _alternatives(self, symbol: Hashable) -> None:
        spans, bars = [self._alternative(symbol, 0)], []
        while not self._is_over():
            bar = self._next("newline")
            if bar.text != "|":
                self._at -= 1
                break
            bars.append((bar.begin, bar.end))
            spans.append(self._alternative(symbol, len(spans)))
        self._lists.append(_Alternatives(symbol, spans, bars))

    def _alternative(self, symbol: Hashable, number: int) -> tuple[int, int]:
        begin = end = self._lexemes[self._at].begin
        needed: list[Hashable] = []
        while (lexeme := self._lexemes[self._at]).kind not in ("newline", "end") and lexeme.text not in ENDS:
            needed += self._expression()
            end = self._lexemes[self._at - 1].end
        if self._accept("->"):
            end = self._expect("rule").end
        self._productions.add((symbol, number), needed)
        self._productions.add(symbol, [(symbol, number)])
        return begin, end

    def _expression(self) -> list[Hashable]:
        """Read an atom and how often it is repeated. Return the symbols that it needs."""
        begin = self._lexemes[self._at].begin
        needed, is_optional = self._atom()
        if self._lexemes[self._at].text in ("+", "*", "?"):
            is_optional |= self._next().text != "+"
        elif self._accept("~"):
            is_optional |= not int(self._expect("number").text)
            if self._accept(".."):
                self._expect("number")
        elif self._accept("{"):
            is_optional |= self._lexemes[self._at].text in (",", "0")
            while not self._accept("}"):
                if self._next().kind not in ("number", "mark"):
                    raise _Unreadable
        if is_optional:
            end = self._lexemes[self._at - 1].end
            self._optional += [(symbol, begin, end) for symbol in needed]
            return []
        return needed

    def _atom(self) -> tuple[list[Hashable], bool]:
        """Return the symbols that an atom needs, and whether it may be left out."""
        lexeme = self._next()
        if lexeme.text in ("(", "["):
            self._groups += 1
            group = -self._groups
            self._depth += 1
            self._alternatives(group)
            self._depth -= 1
            self._expect(")" if lexeme.text == "(" else "]")
            return [group], lexeme.text == "["
        if lexeme.kind == "string" and self._accept(".."):
            self._expect("string")
        elif lexeme.kind == "regex" and _may_be_empty(lexeme):
            self._expressions.add(lexeme.text)
            return [lexeme.text], False
        elif lexeme.text in ("%json", "%regex"):
            value = self._expect("json")
            if lexeme.text == "%json":
                self.schemas.append((self._rule_name, value.begin, value.end))
                return [value.begin], False
        elif lexeme.kind in ("rule", "token"):
            brace, after = self._lexemes[self._at : self._at + 2]
            if brace.text == "{" and after.kind != "number" and after.text != ",":
                raise _Unreadable  # a template
            self._named.add(lexeme.text)
            self._uses.setdefault(self._rule_name, []).append((lexeme.text, self._depth))
            return [lexeme.text], False
        elif lexeme.kind not in ("string", "regex", "special", "grammar"):
            raise _Unreadable
        return [], False

    def _next(self, skipped: str = "") -> Lexeme:
        """Return the next lexeme that is not of the kind `skipped`."""
        while (lexeme := self._lexemes[self._at]).kind == skipped:
            self._at += 1
        if lexeme.kind == "end" and not skipped:
            raise _Unreadable
        self._at += 1
        return lexeme

    def _accept(self, text: str) -> bool:
        found = self._lexemes[self._at].text == text
        self._at += found
        return found

    def _expect(self, what: str) -> Lexeme:
        """Return the next lexeme, which must have this text or be of this kind."""
        lexeme = self._next()
        if what not in (lexeme.text, lexeme.kind):
            raise _Unreadable
        return lexeme


def _uses(lexemes: list[Lexeme]) -> Iterator[tuple[str, int]]:
    """Yield the names in a terminal, each with the number of groups around it."""
    depth = 0
    for lexeme in lexemes:
        depth += (lexeme.text in ("(", "[")) - (lexeme.text in (")", "]"))
        if lexeme.kind == "token":
            yield lexeme.text, depth


def _may_be_empty(lexeme: Lexeme) -> bool:
    if lexeme.kind == "mark":
        return lexeme.text in ("&", "~")
    return lexeme.kind == "regex" and may_match_nothing(lexeme.text)


def may_match_nothing(expression: str) -> bool:
    """Return False if a regular expression surely matches some text."""
    return _EXCLUDES.search(expression) is not None


def _lexemes(text: str) -> Iterator[Lexeme]:
    at, decoder = 0, json.JSONDecoder()
    while at < len(text):
        found = _LEXEME.match(text, at)
        if found is None:
            raise _Unreadable
        kind, at = str(found.lastgroup), found.end()
        if kind != "blank":
            yield Lexeme(kind, found[0], *found.span())
        if found[0] in ("%json", "%regex", "%llguidance"):
            begin = at + len(text[at:]) - len(text[at:].lstrip())
            _, at = decoder.raw_decode(text, begin)
            yield Lexeme("json", text[begin:at], begin, at)


def _edited(text: str, edits: Iterable[Edit]) -> str:
    """Return the text with replacements. Those within a larger one are ignored."""
    parts, at = [], 0
    for begin, end, new in sorted(edits, key=lambda edit: (edit[0], -edit[1])):
        if begin >= at:
            parts += [text[at:begin], new]
            at = end
    return "".join((*parts, text[at:]))
