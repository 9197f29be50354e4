"""Reads content and calls of tools from the text of an answer as it comes, however it is cut into pieces. Knows nothing
about requests and how answers are sent.

    Hermes     <tool_call>CALLS</tool_call>, anywhere; CALLS on a line of their own, also in <tools>..</tools>; if a
               grammar determines the calls, without marks only at the beginning
    Llama 3    CALLS at the beginning, after <|python_tag|>, or on a line of their own
    Mistral    [CALLS] at the beginning, [TOOL_CALLS] with CALLS, [CALLS], f{..} or f[ARGS]{..} anywhere

CALLS are one or more JSON objects, with or without a list, commas, semicolons or a code fence. Their members may have
any order; the arguments may be an object, or one written as a string. Where calls have no mark (and in Llama's and
Mistral's formats do not begin the answer), only offered functions count. Qwen2.5-Coder leaves out the marks that its
template asks for. If a grammar determines the calls, they are read only as it writes them.

Nothing is dropped: what is no call is content. Only the marks of calls, and blanks beside calls, are left out."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from dataclasses import dataclass

from services.openai.tool_calls import (
    HERMES_END,
    HERMES_MARK,
    MISTRAL_MARK,
    PYTHON_TAG,
    CallSyntax,
    ToolFormat,
    written_names,
)

ARGUMENTS = ("arguments", "parameters")
"""Members of a call that hold the arguments."""
FURTHER = ("id", "type", "call_id")
"""Members of a call without effect."""
MISTRAL_ARGS, MISTRAL_ID = "[ARGS]", "[CALL_ID]"
"""Marks between a function's name and its arguments."""
FENCE = "```"
TOOLS_MARK, TOOLS_END = "<tools>", "</tools>"
"""Marks of the list of functions in a Hermes prompt, between which some models write calls."""
KEPT = 1 << 12
"""Number of characters that were read and are kept until they are cut off all at once."""
_BLANK, _WORD = re.compile(r"[ \t\n\r]*"), re.compile(r"[\w.-]*")
_SCALAR = re.compile(r"[-+.\w]*", re.ASCII)
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
"""Characters that stand for themselves in a JSON string."""
_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
"""Characters that matter outside and inside the strings of an object."""
_NOWHERE = re.compile(r"(?!)")
Steps = Generator[None, None, bool]
"""A part of the reading, which pauses where it needs more text. Returns whether it found what it looked for; the text
that it has passed then ends at `_at`."""


@dataclass(frozen=True)
class Delta:
    """An addition to an answer's message: content, a call that begins (`name`), or more of the last call's
    arguments."""

    content: str = ""
    begin: int = 0
    """Where the content begins in the text, in characters."""
    name: str | None = None
    arguments: str = ""


class ToolCallReader:
    """Reads content and calls from the text of one answer. If the name of a call comes before its arguments, these are
    passed on as they are written, so they are JSON only once they are complete."""

    def __init__(self, syntax: CallSyntax) -> None:
        self._syntax, self._format, self._lenient = syntax, syntax.format, not syntax.constrained
        self._text, self._is_over = "", False
        self._from = self._at = 0
        """Where the text begins that is neither content nor part of a call yet, and where reading continues."""
        self._cut_off = 0
        """Number of characters that are no longer in `_text`."""
        self._found: list[Delta] = []
        self._blank = ""
        """Blanks that are content if content follows, or if they follow content."""
        self._is_after_call = False
        self._last = ""
        """The last character of the content; empty at the beginning and after a call."""
        self._line_is_blank, self._in_fence, self._in_tag = True, False, False
        """Whether the content is at a blank line's end, within a code fence, and after a `<tool_call>` with calls."""
        self._begins = _NOWHERE if self._format is not ToolFormat.HERMES and syntax.constrained else self._beginnings()
        self._steps = self._answer()
        self.calls = 0
        """Number of calls that have begun."""
        self.is_complete = True
        """Whether the arguments of the last call are complete."""

    def _beginnings(self) -> re.Pattern[str]:
        """Return a pattern of the characters with which a call may begin."""
        if self._format is ToolFormat.MISTRAL:
            first = "".join(sorted({re.escape(name[0]) for name in self._syntax.names if name}))
            return re.compile(rf"\[|(?<!\w)[{first}]" if first else r"\[")
        if self._format is ToolFormat.LLAMA:
            return re.compile("[{<`]")
        return re.compile(r"[\[{<`]" if self._lenient else "<")

    def push(self, text: str) -> list[Delta]:
        """Add text. Returns the additions to the message that are certain now."""
        self._text += text
        next(self._steps, None)
        found, self._found = self._found, []
        return found

    def finish(self) -> list[Delta]:
        """Return the remaining additions, at the end of the text."""
        self._is_over = True
        return self.push("")

    def _answer(self) -> Steps:
        yield from self._blanks()
        if self._format is not ToolFormat.HERMES:
            if not (yield from self._first()):
                self._give_back()
        elif not self._lenient and not self._syntax.required:
            while (yield from self._region(is_marked=False)) and self._in_tag:
                pass
            self._at = self._from  # marks may stand in what was looked at
        while True:
            found = self._begins.search(self._text, self._from)
            self._give(len(self._text) if found is None else found.start())
            if found is None:
                if not (yield from self._more()):
                    break
            elif not (yield from self._later()):
                self._give_back()
        if self._blank and not self._is_after_call and not self._syntax.required:
            self._found.append(Delta(self._blank, self._cut_off + self._from - len(self._blank)))
        return True

    def _first(self) -> Steps:
        """Read the calls with which an answer begins."""
        if self._format is ToolFormat.LLAMA:
            if self._lenient:
                yield from self._literal(PYTHON_TAG)
            return (yield from self._region(is_marked=True))
        if (yield from self._literal(MISTRAL_MARK)):
            return (yield from self._after_mistral_mark())
        if (yield from self._begins_with("[")):
            return (yield from self._region(is_marked=True))
        return self._lenient and (yield from self._named_call(is_marked=False))

    def _later(self) -> Steps:
        """Read calls after the beginning, where a character of `_begins` stands."""
        if self._format is ToolFormat.HERMES:
            if (yield from self._literal(HERMES_MARK)):
                return (yield from self._region(is_marked=True))
            if self._in_tag and (yield from self._literal(HERMES_END)):
                self._in_tag = False
                self._commit()
                return True
            return self._lenient and (yield from self._unmarked())
        if self._format is ToolFormat.MISTRAL:
            if (yield from self._literal(MISTRAL_MARK)):
                return (yield from self._after_mistral_mark())
            if (yield from self._begins_with("[")):
                return (yield from self._region(is_marked=False))
            is_word = self._from == 0 and re.match(r"\w", self._last)
            return not is_word and (yield from self._named_call(is_marked=False))
        if (yield from self._literal(PYTHON_TAG)):
            return (yield from self._region(is_marked=True))
        if (yield from self._literal(FENCE)):
            return False
        return self._is_at_line and (yield from self._region(is_marked=False))

    @property
    def _is_at_line(self) -> bool:
        """Whether calls without a mark may begin here."""
        return self._line_is_blank and not self._in_fence

    def _unmarked(self) -> Steps:
        """Read calls without the mark that the Hermes format has."""
        if not self._is_at_line:
            yield from self._literal(FENCE)
            return False
        is_tagged = yield from self._literal(TOOLS_MARK)
        if not (yield from self._region(is_marked=False)):
            return False
        if is_tagged:
            yield from self._skip(TOOLS_END)
        return True

    def _after_mistral_mark(self) -> Steps:
        yield from self._blanks()
        if (yield from self._begins_with("[", *(("{", FENCE[0]) if self._lenient else ()))):
            return (yield from self._region(is_marked=True))
        return self._lenient and (yield from self._named_call(is_marked=True))

    def _region(self, is_marked: bool) -> Steps:
        """Read calls that are JSON objects, with everything around them. `is_marked`: a mark, or the beginning of the
        answer, makes calls of any function certain."""
        yield from self._blanks()
        is_fenced = (self._lenient or not is_marked) and (yield from self._literal(FENCE))
        if is_fenced:
            _ = (yield from self._literal("json")) or (yield from self._literal("tool_call"))
            yield from self._blanks()
            is_marked = is_marked and self._format is ToolFormat.HERMES
        is_list = (self._lenient or self._format is ToolFormat.MISTRAL) and (yield from self._literal("["))
        yield from self._blanks()
        if not (yield from self._call(is_marked)):
            return False
        while self._lenient or not (is_marked and self._format is ToolFormat.HERMES):
            if not (yield from self._separator()) or not (yield from self._call(is_marked)):
                if self._is_cut() and self._syntax.required:
                    self._commit()
                self._at = self._from
                break
        ends = ("]" if is_list else "", FENCE if is_fenced else "")
        for end in filter(None, ends):
            yield from self._skip(end)
        if self._format is ToolFormat.HERMES:
            self._in_tag = not (yield from self._skip(HERMES_END))
        return True

    def _separator(self) -> Steps:
        """Pass what stands between two calls."""
        yield from self._blanks()
        if self._format is ToolFormat.HERMES and not self._lenient:
            return True
        is_there = (yield from self._literal(",")) or (yield from self._literal(";"))
        yield from self._blanks()
        if self._is_cut() and is_there:
            self._commit()
        return is_there or self._lenient

    def _skip(self, mark: str) -> Steps:
        """Leave out a mark that ends calls, if it is there; at the end of the text, a part of it."""
        yield from self._blanks()
        begin = self._at
        if (yield from self._literal(mark)) or (self._at > begin and self._is_cut()):
            self._commit()
            return True
        self._at = self._from
        return False

    def _call(self, is_marked: bool) -> Steps:
        """Read a call that is a JSON object."""
        if not (yield from self._literal("{")):
            return False
        name: str | None = None
        arguments: str | None = None
        depth, has_begun = 1, False
        if self._lenient and self._format is ToolFormat.HERMES:
            yield from self._blanks()
            depth += yield from self._literal("{")  # some templates show calls in two pairs of braces
        while depth:
            key = yield from self._key()
            if key in ARGUMENTS and arguments is None:
                if name is not None and (yield from self._begins_with("{")):
                    self._begin(name)
                    has_begun, arguments = True, ""
                    if not (yield from self._object(is_passed_on=True)):
                        return True
                elif not self._lenient or (arguments := (yield from self._held_arguments())) is None:
                    break
            elif key == "function" and self._lenient and name is None and (yield from self._literal("{")):
                depth += 1
                continue
            elif key == "name" or (key == "function" and self._lenient):
                if name is not None or (name := (yield from self._name(is_marked))) is None:
                    break
            elif key not in FURTHER or not (yield from self._scalar()):
                break
            if name is not None and arguments is not None and not has_begun:
                self._begin(name)
                self._complete(arguments)
                has_begun = True
            depth = yield from self._closed(depth)
            if has_begun:
                self._commit()
            if not depth or not (yield from self._literal(",")):
                break
        if not depth and name is not None and not has_begun and is_marked and self._is_certain():
            self._begin(name)
            self._complete("{}")
            has_begun = True
        # Members of a call that has begun, but that no call has, are text.
        self._at = self._from if has_begun else self._at
        return has_begun

    def _is_certain(self) -> bool:
        """Whether even an object with a name alone is a call."""
        return self._lenient and self._format is ToolFormat.HERMES

    def _key(self) -> Generator[None, None, str | None]:
        """Read a member's key and the colon after it; None: there is none."""
        yield from self._blanks()
        key = yield from self._written_string()
        yield from self._blanks()
        if not key or not (yield from self._literal(":")):
            return None
        yield from self._blanks()
        return key[1:-1]

    def _closed(self, depth: int) -> Generator[None, None, int]:
        """Pass braces that close an object. `depth`: number of open objects. Returns how many are open after it."""
        while depth:
            yield from self._blanks()
            if not (yield from self._literal("}")):
                break
            depth -= 1
        return depth

    def _name(self, is_marked: bool) -> Generator[None, None, str | None]:
        """Read the name of a function; None: it is no name, or no offered function where only these count."""
        written = yield from self._written_string()
        name = _string(written)
        if is_marked or name is None:
            return name
        is_offered = name in self._syntax.names and (self._lenient or written in written_names(name))
        return name if is_offered else None

    def _scalar(self) -> Steps:
        """Pass a string, a number, true, false or null."""
        if (yield from self._begins_with('"')):
            return bool((yield from self._written_string()))
        begin = self._at
        yield from self._pattern(_SCALAR)
        return self._at > begin

    def _held_arguments(self) -> Generator[None, None, str | None]:
        """Read arguments whose call is not certain before they are complete: they come before the name, or are written
        as a string, or as null. None: they are not there."""
        if (yield from self._begins_with("{")):
            size = self._at - self._from
            whole = yield from self._object(is_passed_on=False)
            return self._text[self._from + size : self._at] if whole else None
        if (yield from self._literal("null")):
            return "{}"
        text = _string((yield from self._written_string()))
        if text is None or not text.strip():
            return None if text is None else "{}"
        try:
            return text if isinstance(json.loads(text), dict) else None
        except (ValueError, RecursionError):
            return None

    def _named_call(self, is_marked: bool) -> Steps:
        """Read a call that is a name with its arguments after it."""
        begin = self._at - self._from
        while (yield from self._pattern_piece(_WORD)):
            word = self._text[self._from + begin : self._at]
            if not is_marked and not any(name.startswith(word) for name in self._syntax.names):
                return False
        name = self._text[self._from + begin : self._at]
        if not name or not (is_marked or name in self._syntax.names):
            return False
        if (yield from self._literal(MISTRAL_ID)):
            yield from self._pattern(_WORD)
        is_marked = (yield from self._literal(MISTRAL_ARGS)) or is_marked
        yield from self._blanks()
        if not (yield from self._begins_with("{")):
            return False
        if not is_marked and not (yield from self._is_object()):
            return False
        self._begin(name)
        yield from self._object(is_passed_on=True)
        return True

    def _is_object(self) -> Steps:
        """Find out whether the brace here begins a JSON object."""
        size = self._at - self._from
        yield from self._literal("{")
        yield from self._blanks()
        found = yield from self._begins_with('"', "}")
        if found:
            self._at = self._from + size
        return found

    def _object(self, is_passed_on: bool) -> Steps:
        """Pass an object, up to the brace that closes it. `is_passed_on`: it is the last call's arguments."""
        depth, in_string = 0, False
        while True:
            found = (_INSIDE if in_string else _OUTSIDE).search(self._text, self._at)
            is_escape = found is not None and found[0] == "\\"
            if found is None or (is_escape and found.end() == len(self._text)):
                self._at = len(self._text) if found is None or self._is_over else found.start()
                if is_passed_on:
                    self._pass_on()
                if not (yield from self._more()):
                    return False
                continue
            self._at = found.end() + is_escape
            if found[0] == '"':
                in_string = not in_string
            elif not in_string:
                depth += 1 if found[0] in "{[" else -1
            if not depth:
                if is_passed_on:
                    self._pass_on()
                    self.is_complete = True
                return True

    def _written_string(self) -> Generator[None, None, str]:
        """Pass a JSON string and return it as it is written; empty: it is none."""
        begin = self._at - self._from
        if not (yield from self._literal('"')):
            return ""
        while True:
            yield from self._pattern(_PLAIN)
            if (yield from self._literal('"')):
                return self._text[self._from + begin : self._at]
            if not (yield from self._literal("\\")) or not (yield from self._has(1)):
                return ""
            self._at += 1

    def _literal(self, literal: str) -> Steps:
        """Pass this text, if it stands here. If the answer ends within it, what is there of it is passed."""
        for size, character in enumerate(literal):
            if not (yield from self._has(size + 1)):
                self._at = len(self._text)
                return False
            if self._text[self._at + size] != character:
                return False
        self._at += len(literal)
        return True

    def _begins_with(self, *characters: str) -> Steps:
        """Return whether one of these characters stands here. Nothing is passed."""
        return (yield from self._has(1)) and self._text[self._at] in characters

    def _blanks(self) -> Steps:
        return (yield from self._pattern(_BLANK))

    def _pattern(self, pattern: re.Pattern[str]) -> Steps:
        """Pass everything that fits a pattern, which can go on after every character."""
        while (yield from self._pattern_piece(pattern)):
            pass
        return True

    def _pattern_piece(self, pattern: re.Pattern[str]) -> Steps:
        """Pass what fits a pattern, as far as there is text. Returns whether more may fit."""
        if not (yield from self._has(1)):
            return False
        found = pattern.match(self._text, self._at)
        assert found is not None, "the pattern fits an empty text"
        begin, self._at = self._at, found.end()
        return self._at > begin and self._at == len(self._text)

    def _has(self, size: int) -> Steps:
        """Wait for `size` more characters. Returns whether they are there."""
        while len(self._text) - self._at < size:
            if not (yield from self._more()):
                return False
        return True

    def _more(self) -> Steps:
        """Wait for more text. Returns whether some may come."""
        if self._is_over:
            return False
        yield
        return True

    def _is_cut(self) -> bool:
        """Whether the answer ended here, maybe within what was looked for."""
        return self._is_over and self._at == len(self._text)

    def _begin(self, name: str) -> None:
        self.calls += 1
        self.is_complete = False
        self._commit()
        self._found.append(Delta(name=name))

    def _pass_on(self) -> None:
        """Pass on the arguments of the last call, as far as they are read."""
        if self._at > self._from:
            self._found.append(Delta(arguments=self._text[self._from : self._at]))
        self._commit()

    def _complete(self, arguments: str) -> None:
        """Add the arguments of the last call, all of them."""
        self._found.append(Delta(arguments=arguments))
        self.is_complete = True
        self._commit()

    def _commit(self) -> None:
        """Leave out the text up to here, which belongs to a call."""
        self._blank, self._last, self._is_after_call, self._line_is_blank = "", "", True, True
        self._from = self._at
        self._forget()

    def _give_back(self) -> None:
        """Make content of what was read as the beginning of a call: a character at least."""
        if self._is_cut() and self._syntax.required:
            self._commit()
        else:
            self._give(max(self._at, self._from + 1))

    def _give(self, end: int) -> None:
        """Make content of the text up to `end`. Blanks are held back until more content follows."""
        text = self._text[self._from : end]
        begin = self._cut_off + self._from - len(self._blank)
        self._from = self._at = min(end, len(self._text))
        self._forget()
        if not text:
            return
        _, line_end, line = text.rpartition("\n")
        self._line_is_blank = not line.strip() and (bool(line_end) or self._line_is_blank)
        self._in_fence ^= text.count(FENCE) % 2 == 1
        self._last = text[-1]
        content = (self._blank + text).rstrip()
        self._blank = (self._blank + text)[len(content) :]
        if content:
            self._found.append(Delta(content, begin))
            self._is_after_call = False

    def _forget(self) -> None:
        """Cut off text that was read."""
        if self._from == len(self._text) or self._from > KEPT:
            self._text = self._text[self._from :]
            self._cut_off += self._from
            self._at -= self._from
            self._from = 0


def _string(written: str) -> str | None:
    """Return the text of a JSON string; None if it is not valid, or holds half of a surrogate pair."""
    try:
        text: str = json.loads(written)
        text.encode()
    except ValueError:
        return None
    return text
