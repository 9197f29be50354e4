"""Compiles constraints with llguidance, after what produces nothing has been taken out. Knows nothing about models and
answers.

What cannot be followed is refused here, before its request is queued: a constraint that nothing satisfies, one whose
first masks fail, and numbers that would become others."""

from __future__ import annotations

import json
import re
import time
from functools import cache, lru_cache, partial
from itertools import groupby
from typing import Any

import llguidance
import numpy as np
from llguidance import gbnf_to_lark

from smc.api.constraint import Constraint, schema_text
from smc.grammar import numbers
from smc.grammar.json_schema import JsonSchema, Unsatisfiable, WideObject
from smc.grammar.lark import LarkGrammar, TooDeep, may_match_nothing

LIMITS = llguidance.LLParserLimits(verbose_errors=False)
"""The library's own limits: a million steps of regular expressions, half a million symbols, 50,000 items a mask, 2,000
items at a position."""
QUICK = llguidance.LLParserLimits(verbose_errors=False, initial_lexer_fuel=100_000)
"""Limits with which long repetitions are tried: the library prepares large expressions with the first mask, which can
take ten seconds."""
WHITESPACE = r"\x20|\x0A[\x20\x09]{0,40}"
"""Maximum whitespace between tokens of JSON: a space, or a line end and an indentation. Small models write blanks for
ever where they are allowed. A schema can change this (`x-guidance`)."""
MOST_FORCED, FORCED_SECONDS = 16, 0.1
"""Maximum number of tokens, and seconds, for which the only possible beginning of a text is followed."""
MOST_COMPILED, MOST_ACCEPTED = 2.0, 10.0
"""Maximum seconds of processor time for compiling a constraint, and for one that another process has accepted. The
library counts steps, not seconds, so the time is checked between its calls."""
WIDE, TOO_WIDE = 300, 1000
"""Numbers of optional properties in a row: up to the first they can be followed, beyond the second they cannot."""
MOST_PATTERNS = 250
"""Maximum number of `patternProperties` of an object: the library needs the third power of the time, 1 to 3 s for
these."""
MOST_ODD, MOST_DIVISOR = 150_000, 1 << 20
"""Maximum sums of the numbers in `multipleOf`, without factors of 2 and 5, and without factors of 10. The library has a
state for each remainder: about a second."""
MOST_GBNF = 1000
"""Maximum number of rules in GBNF: converting them takes the square of the time, a second for these."""
ASCII = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
"""Classes of characters in regular expressions, which mean ASCII as in JSON schemas."""
ONE_OF = (
    "oneOf is supported only where its alternatives exclude each other by their types or by constants of required "
    "properties; write anyOf"
)
UNSATISFIABLE = "Unsatisfiable schema"
"""Beginning of the library's error about a schema that nothing satisfies."""
NO_EXTENSION = "NoExtension"
"""Beginning of the library's error where no token is allowed."""
TOO_COMPLEX = "it is too complex to be followed"
NOTHING = "nothing satisfies it"
_REPEATS = re.compile(r"\{[0-9]*,?[0-9]{3,}")
"""A repetition of 100 times or more."""
_DEAD = re.compile(r"\s*while processing \S*?(#\S*)")
"""The definition that the library names in an error."""
_INNER = re.compile(r"\n +[0-9]+ \| .*\Z|\n?<non-verbose/>.*\Z", re.DOTALL)
"""Lines of the library's own grammar at the end of an error."""
_PLACE = re.compile(r"^(?:at )?[0-9]+\([0-9]+\): ")
_IN_REGEX = re.compile(r'invalid regex ".*?" \(in regex\): ', re.DOTALL)
_PARSE_ERROR = re.compile(r"regex parse error:\n +(.*?)\n.*\nerror: (.*)", re.DOTALL)


class NotCompiled(ValueError):
    """A constraint cannot be compiled."""

    def __init__(self, why: str, rule: str = "") -> None:
        """`rule`: the rule of a grammar whose JSON schema is the cause, if it is one."""
        super().__init__(why)
        self.why, self.rule = why, rule

    @staticmethod
    def of(error: ValueError, rule: str = "") -> NotCompiled:
        if isinstance(error, NotCompiled):
            return error
        return NotCompiled(f"{NOTHING}: {error}" if isinstance(error, Unsatisfiable) else str(error), rule)


class _Clock:
    """The processor time of this thread that is left for compiling a constraint."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._until = seconds, time.thread_time() + seconds

    def check(self) -> None:
        """Raise NotCompiled if no time is left."""
        if time.thread_time() > self._until:
            raise NotCompiled(f"it takes more than {self._seconds:g} s to compile")


def compiled(
    constraint: Constraint,
    vocabulary: llguidance.LLTokenizer,
    limits: llguidance.LLParserLimits,
    seconds: float = MOST_COMPILED,
) -> llguidance.LLMatcher:
    """Return the matcher of a constraint at its beginning. Raises NotCompiled, also after `seconds` of processor
    time."""
    clock = _Clock(seconds)
    try:
        if constraint.kind in ("json_schema", "json_object"):
            cut, matcher = _schema(constraint.text or '{"type": "object"}', vocabulary, limits, clock)
            grammar = _schema_grammar(cut)
        else:
            grammar = _grammar(constraint, clock)
            matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
            if matcher.is_error():
                is_own = constraint.kind == "grammar" and _lark(constraint.text) == constraint.text
                raise ValueError(_in_our_words(matcher.get_error(), is_own))
        tried = matcher.deep_copy()
        if _REPEATS.search(constraint.text):
            quick = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=QUICK)
            tried = tried if quick.is_error() else quick
        _check_beginning(tried)
        clock.check()
    except ValueError as error:
        raise NotCompiled.of(error) from error
    except RecursionError as error:
        raise NotCompiled("it is nested too deeply") from error
    return matcher


def _grammar(constraint: Constraint, clock: _Clock) -> str:
    """Convert a constraint to the library's form. Raises ValueError if it is invalid."""
    if constraint.kind == "choice":
        # As one terminal: as alternatives of a rule there would be an item for each.
        texts = " | ".join(map(json.dumps, constraint.choices))
        return llguidance.grammar_from("lark", f"start: CHOICE\nCHOICE: {texts}")
    if constraint.kind == "regex":
        return llguidance.grammar_from("regex", in_ascii(constraint.text))
    text = _lark(constraint.text)
    try:
        grammar = LarkGrammar(text)
    except TooDeep as error:
        raise ValueError(f"{TOO_COMPLEX}: {error}") from error
    except ValueError:  # the library may know more
        return llguidance.grammar_from("lark", text)
    return llguidance.grammar_from(
        "lark", grammar.without_dead_ends(partial(_is_empty_terminal, clock), partial(_cut_schema, constraint, clock))
    )


def _lark(text: str) -> str:
    """Return a grammar in Lark's syntax, or in GBNF, in Lark's syntax."""
    if not gbnf_to_lark.is_lark_syntax(text) and (rules := text.count("::=")) > MOST_GBNF:
        raise ValueError(f"it has {rules} rules in GBNF; allowed: at most {MOST_GBNF}, or Lark's syntax")
    try:
        return gbnf_to_lark.any_to_lark(text)
    except Exception as error:  # of many kinds
        raise ValueError(f"it is neither in Lark's syntax, with a rule start, nor in GBNF: {error}") from error


def in_ascii(expression: str) -> str:
    """Return a regular expression in which digits and letters of words are those of ASCII."""
    return re.sub(r"\\(.)", lambda found: ASCII.get(found[1], found[0]), expression, flags=re.DOTALL)


def _cut_schema(constraint: Constraint, clock: _Clock, rule: str, text: str) -> str:
    """Return a JSON schema of a grammar without what produces nothing."""
    try:
        return _schema(text, _bytes(), LIMITS, clock)[0]
    except ValueError as error:
        if isinstance(error, Unsatisfiable) and rule not in constraint.fields:
            raise  # other texts of the grammar may have no such value
        raise NotCompiled.of(error, rule) from error


def _schema(
    text: str, vocabulary: llguidance.LLTokenizer, limits: llguidance.LLParserLimits, clock: _Clock
) -> tuple[str, llguidance.LLMatcher]:
    """Return a JSON schema without what produces nothing, and its matcher. Raises ValueError."""
    schema = JsonSchema(text)
    schema.check_numbers()
    _check_sizes(schema, clock)
    for found in schema.wide_objects(WIDE):
        clock.check()
        if found.most > TOO_WIDE or not _can_be_followed(found):
            raise ValueError(
                f"{TOO_COMPLEX}: {found.path} has {found.most} optional properties in a row; make some required, "
                "or divide them among several objects"
            )
    for name, expression in schema.separators():
        if may_match_nothing(expression) and _is_empty(llguidance.LLMatcher.grammar_from_regex(expression)):
            raise ValueError(f"{name} matches no text")
    empty = frozenset(one for one in schema.patterns() if may_match_nothing(one) and _is_empty_pattern(clock, one))
    dead: set[int] = set()
    while True:
        clock.check()
        document = schema.without_dead_ends(dead, empty)
        cut = text if document is schema.document else schema_text(document)
        matcher = llguidance.LLMatcher(vocabulary, _schema_grammar(cut), log_level=0, limits=limits)
        if not matcher.is_error():
            return cut, matcher
        error = matcher.get_error()
        # A definition that nothing satisfies may be one of several alternatives.
        named = _DEAD.search(error) if error.startswith(UNSATISFIABLE) else None
        target = None if named is None else schema.find(named[1])
        if not isinstance(target, dict) or id(target) in dead:
            words = _in_our_words(error)
            raise Unsatisfiable(words) if error.startswith(UNSATISFIABLE) else ValueError(words)
        dead.add(id(target))


def _check_sizes(schema: JsonSchema, clock: _Clock) -> None:
    """Raise ValueError if the library would work on a schema for minutes, which nothing could stop."""
    for path, count in schema.pattern_counts():
        clock.check()
        if count > MOST_PATTERNS:
            raise ValueError(f"{TOO_COMPLEX}: {path} has {count} patternProperties; allowed: at most {MOST_PATTERNS}")
    odd = whole = 0
    for path, divisor in schema.divisors():
        clock.check()
        odd, whole = odd + numbers.without_factors(divisor, 2, 5), whole + divisor
        if odd > MOST_ODD or whole > MOST_DIVISOR:
            raise ValueError(
                f"{TOO_COMPLEX}: multipleOf in {path} has too many remainders; give smaller or rounder numbers"
            )


def _schema_grammar(text: str) -> str:
    defaults: Any = None
    if '"x-guidance"' not in text:
        defaults = {"whitespace_pattern": WHITESPACE}
    return llguidance.LLMatcher.grammar_from_json_schema(text, defaults=defaults)


def _check_beginning(matcher: llguidance.LLMatcher) -> None:
    """Move a matcher along the only possible beginning of a text. Raise ValueError if there is none, or if it cannot be
    continued."""
    until = time.perf_counter() + FORCED_SECONDS
    for step in range(MOST_FORCED):
        mask_W = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        if matcher.is_error() or not mask_W.any():
            raise ValueError(_in_our_words(matcher.get_error()))
        words = np.flatnonzero(mask_W)
        bits = int(mask_W[words[0]])
        if len(words) > 1 or bits & (bits - 1) or matcher.is_stopped() or (step and time.perf_counter() > until):
            return
        matcher.consume_token(32 * int(words[0]) + bits.bit_length() - 1)
        if matcher.is_error():
            raise ValueError(_in_our_words(matcher.get_error()))
        if matcher.is_stopped():
            return


@cache
def _bytes() -> llguidance.LLTokenizer:
    """A vocabulary of all bytes, for questions that do not depend on the model's vocabulary."""
    return llguidance.LLTokenizer("byte")


def _matcher_of_bytes(grammar: str) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(_bytes(), grammar, log_level=0, limits=LIMITS)


def _is_empty_terminal(clock: _Clock, text: str) -> bool:
    """Return whether a grammar, in Lark's syntax, that is one terminal matches nothing."""
    clock.check()
    return _is_empty(llguidance.LLMatcher.grammar_from_lark(text))


def _is_empty(grammar: str) -> bool:
    """Return whether a grammar that is one terminal matches nothing."""
    matcher = _matcher_of_bytes(grammar)
    if matcher.is_error():
        return False
    matcher.compute_bitmask()
    return matcher.get_error().startswith(NO_EXTENSION)


def _is_empty_pattern(clock: _Clock, pattern: str) -> bool:
    """Return whether no name matches a pattern of `patternProperties`."""
    clock.check()
    schema = json.dumps({"type": "string", "pattern": pattern})
    error = _matcher_of_bytes(llguidance.LLMatcher.grammar_from_json_schema(schema)).get_error()
    return error.startswith(UNSATISFIABLE)


@lru_cache(maxsize=64)
def _can_be_followed(found: WideObject) -> bool:
    """Return whether masks can be computed for an object with many optional properties. The most items are needed
    before each run of them."""
    properties = {f"p{number}": {"type": "null"} for number in range(len(found.required))}
    required = [f"p{number}" for number, is_required in enumerate(found.required) if is_required]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": found.is_open}
    matcher = _matcher_of_bytes(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    text, at = "{", 0
    for is_required, run in groupby(found.required):
        size = len(list(run))
        if is_required:
            text += ("" if text.endswith("{") else ",") + ",".join(f'"p{at + i}":null' for i in range(size))
        matcher.try_consume_tokens(list(text.encode()))
        matcher.compute_bitmask()
        if matcher.is_error():
            return False
        matcher.reset()
        at += size
    return True


def _in_our_words(error: str, is_own: bool = False) -> str:
    """Return the library's error without its own grammar. `is_own`: the caller has written the grammar."""
    error = error.strip()
    if not error or error.startswith(NO_EXTENSION):
        return f"{NOTHING}: no text of the model's tokens matches"
    if error.startswith("oneOf constraints are not supported"):
        return ONE_OF
    if error.startswith(("Parser Error", "fuel exhausted")) or "too many" in error.lower():
        return TOO_COMPLEX
    named = _DEAD.search(error)
    error = _INNER.sub("", _DEAD.sub("", error))
    if not is_own:
        error = _IN_REGEX.sub("", _PLACE.sub("", error))
    error = _PARSE_ERROR.sub(lambda found: f"{found[2]} in the regular expression {found[1]:.60}", error)
    error = error.removeprefix(f"{UNSATISFIABLE}: ")
    return error if named is None else f"{error} (in {named[1]})"
