"""Reads the message of an answer from its text: reasoning, which a model writes between <think> and </think> before its
answer, content, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from services.openai.call_reader import Delta, ToolCallReader
from services.openai.tool_calls import CallSyntax, call
from smc.model.tokenizer import Tokenizer

BEGIN, END = "<think>", "</think>"
_TAIL = 8
"""Number of tokens at the end of a prompt within which some templates open or close the reasoning themselves."""


@dataclass(frozen=True)
class Reasoning:
    """The reasoning that an answer is expected to begin with."""

    end: int
    """Token that ends the reasoning."""
    is_open: bool
    """Whether the prompt has already begun the reasoning."""

    @staticmethod
    def of(tokenizer: Tokenizer, prompt: Sequence[int]) -> Reasoning | None:
        """Determine the reasoning from the chat template and the end of the prompt. None: the answer does not
        reason."""
        end, begin = tokenizer.id_of(END), tokenizer.id_of(BEGIN)
        if END not in (tokenizer.chat_template or "") or end is None or not tokenizer.bytes_of(end):
            return None
        tail = prompt[-_TAIL:]
        return None if end in tail else Reasoning(end, begin in tail)


class _ReasoningState(Enum):
    BEGINNING = 0
    REASONING = 1
    ENDED = 2
    """The reasoning is over. Blanks that follow belong neither to it nor to the answer."""
    ANSWER = 3


class ReasoningReader:
    """Divides the text of one answer into reasoning and the answer proper, as it comes."""

    def __init__(self, is_open: bool) -> None:
        self._state = _ReasoningState.REASONING if is_open else _ReasoningState.BEGINNING
        self._kept = ""

    def push(self, text: str) -> tuple[str, str]:
        """Add text. Returns the new text of the reasoning, and of the answer proper."""
        self._kept += text
        reasoning = ""
        if self._state is _ReasoningState.BEGINNING:
            begun = self._kept.lstrip()
            if begun.startswith(BEGIN):
                self._kept, self._state = begun.removeprefix(BEGIN), _ReasoningState.REASONING
            elif not BEGIN.startswith(begun):
                self._state = _ReasoningState.ANSWER
        if self._state is _ReasoningState.REASONING:
            reasoning, mark, rest = self._kept.partition(END)
            if mark:
                self._kept, self._state = rest, _ReasoningState.ENDED
            else:
                # An end of the text that may become the mark is kept back.
                reasoning = _before_mark(reasoning, END)
                self._kept = self._kept[len(reasoning) :]
        if self._state is _ReasoningState.ENDED:
            self._kept = self._kept.lstrip()
            if self._kept:
                self._state = _ReasoningState.ANSWER
        answer = ""
        if self._state is _ReasoningState.ANSWER:
            answer, self._kept = self._kept, ""
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """Return the rest of the reasoning, and of the answer proper, at the end of the text."""
        kept, self._kept = self._kept, ""
        return (kept, "") if self._state is _ReasoningState.REASONING else ("", kept)


def _before_mark(text: str, mark: str) -> str:
    """Return the text without an end that is the beginning of `mark`."""
    size = next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
    return text[: len(text) - size]


class MessageReader:
    """Reads the message of one answer from its text, as it comes."""

    def __init__(self, syntax: CallSyntax | None, reasoning: Reasoning | None) -> None:
        self._reasoning = None if reasoning is None else ReasoningReader(reasoning.is_open)
        self._calls = None if syntax is None else ToolCallReader(syntax)

    @property
    def has_calls(self) -> bool:
        """Whether the answer has calls, and all of them are complete: at its end, whether it ended to call tools."""
        return self._calls is not None and self._calls.calls > 0 and self._calls.is_complete

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended within a call."""
        return self._calls is not None and not self._calls.is_complete

    def push(self, text: str) -> list[Delta]:
        """Add text. Returns the additions to the message that are certain now."""
        return self._deltas(*(("", text) if self._reasoning is None else self._reasoning.push(text)))

    def finish(self) -> list[Delta]:
        """Return the remaining additions, at the end of the text."""
        deltas = [] if self._reasoning is None else self._deltas(*self._reasoning.finish())
        return deltas + ([] if self._calls is None else self._calls.finish())

    def _deltas(self, reasoning: str, text: str) -> list[Delta]:
        found = [Delta(reasoning=reasoning)] if reasoning else []
        if self._calls is not None:
            return found + self._calls.push(text)
        return found + ([Delta(content=text)] if text else [])


def message_of(text: str, reader: MessageReader, call_id: str) -> dict[str, Any]:
    """Return a whole answer as a chat's message. `reader`: a new one, which has then read the answer; `call_id`: prefix
    of the ids of its calls."""
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


class PartKind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass
class MessagePart:
    """A part of an answer, for APIs whose messages are lists of parts."""

    kind: PartKind
    name: str = ""
    """Name of the called function."""
    text: str = ""
    """Text of the part so far; for a call its arguments, as JSON."""


@dataclass(frozen=True)
class PartBegins:
    index: int
    part: MessagePart


@dataclass(frozen=True)
class PartGrows:
    index: int
    text: str


@dataclass(frozen=True)
class PartEnds:
    index: int
    part: MessagePart
    is_last: bool
    """Whether the answer ends with this part."""
    is_cut: bool
    """Whether the part is a call within which the answer ended."""


PartEvent = PartBegins | PartGrows | PartEnds


class PartReader:
    """Reads the parts of one answer from its text, as it comes; one part is open at a time. An answer without any part
    gets an empty text part."""

    def __init__(self, syntax: CallSyntax | None, reasoning: Reasoning | None) -> None:
        self._reader = MessageReader(syntax, reasoning)
        self.parts: list[MessagePart] = []

    @property
    def has_calls(self) -> bool:
        """See `MessageReader.has_calls`."""
        return self._reader.has_calls

    @property
    def is_cut(self) -> bool:
        """See `MessageReader.is_cut`."""
        return self._reader.is_cut

    def push(self, text: str) -> Iterator[PartEvent]:
        for delta in self._reader.push(text):
            yield from self._more(delta)

    def finish(self) -> Iterator[PartEvent]:
        for delta in self._reader.finish():
            yield from self._more(delta)
        if not self.parts:
            yield from self._open(MessagePart(PartKind.TEXT))
        yield from self._close(is_last=True)

    def _more(self, delta: Delta) -> Iterator[PartEvent]:
        if delta.name is not None:
            yield from self._open(MessagePart(PartKind.CALL, delta.name))
        for kind, text in (
            (PartKind.REASONING, delta.reasoning),
            (PartKind.TEXT, delta.content),
            (PartKind.CALL, delta.arguments),
        ):
            if not text:
                continue
            if not self.parts or self.parts[-1].kind is not kind:
                yield from self._open(MessagePart(kind))
            self.parts[-1].text += text
            yield PartGrows(len(self.parts) - 1, text)

    def _open(self, part: MessagePart) -> Iterator[PartEvent]:
        yield from self._close()
        self.parts.append(part)
        yield PartBegins(len(self.parts) - 1, part)

    def _close(self, is_last: bool = False) -> Iterator[PartEvent]:
        if self.parts:
            yield PartEnds(len(self.parts) - 1, self.parts[-1], is_last, is_last and self.is_cut)
