"""Reads the message of an answer from its text: reasoning, which a model writes between <think> and </think> before its
answer, content, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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


class PartKind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass
class MessagePart:
    """A part of an answer."""

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
    part: MessagePart
    text: str
    begin: int | None = None
    """Where `text` begins in the text of the whole answer, in characters; None: the part is no text."""


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
        self._reasoning = None if reasoning is None else ReasoningReader(reasoning.is_open)
        self._calls = None if syntax is None else ToolCallReader(syntax)
        self._size = 0
        """Number of characters that were read."""
        self._begin: int | None = None
        """Where the answer proper begins; None: not yet."""
        self.parts: list[MessagePart] = []

    @property
    def has_calls(self) -> bool:
        """Whether the answer has calls, and all of them are complete: at its end, whether it ended to call tools."""
        return self._calls is not None and self._calls.calls > 0 and self._calls.is_complete

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended within a call."""
        return self._calls is not None and not self._calls.is_complete

    def push(self, text: str) -> Iterator[PartEvent]:
        """Add text. Yields what is certain now."""
        self._size += len(text)
        yield from self._read(*(("", text) if self._reasoning is None else self._reasoning.push(text)))

    def finish(self) -> Iterator[PartEvent]:
        """Yield the rest, at the end of the text."""
        if self._reasoning is not None:
            yield from self._read(*self._reasoning.finish())
        if self._calls is not None:
            yield from self._more(self._calls.finish())
        if not self.parts:
            yield from self._open(MessagePart(PartKind.TEXT))
        yield from self._close(is_last=True)

    def _read(self, reasoning: str, text: str) -> Iterator[PartEvent]:
        begin = self._size - len(text)
        self._begin = begin if text and self._begin is None else self._begin
        yield from self._grow(PartKind.REASONING, reasoning)
        if self._calls is None:
            yield from self._grow(PartKind.TEXT, text, begin)
        else:
            yield from self._more(self._calls.push(text))

    def _more(self, deltas: Iterable[Delta]) -> Iterator[PartEvent]:
        for delta in deltas:
            if delta.name is not None:
                yield from self._open(MessagePart(PartKind.CALL, delta.name))
            yield from self._grow(PartKind.TEXT, delta.content, (self._begin or 0) + delta.begin)
            yield from self._grow(PartKind.CALL, delta.arguments)

    def _grow(self, kind: PartKind, text: str, begin: int | None = None) -> Iterator[PartEvent]:
        if not text:
            return
        if not self.parts or self.parts[-1].kind is not kind:
            yield from self._open(MessagePart(kind))
        part = self.parts[-1]
        part.text += text
        yield PartGrows(len(self.parts) - 1, part, text, begin)

    def _open(self, part: MessagePart) -> Iterator[PartEvent]:
        yield from self._close()
        self.parts.append(part)
        yield PartBegins(len(self.parts) - 1, part)

    def _close(self, is_last: bool = False) -> Iterator[PartEvent]:
        if self.parts:
            yield PartEnds(len(self.parts) - 1, self.parts[-1], is_last, is_last and self.is_cut)


def message_of(text: str, reader: PartReader, call_id: str) -> dict[str, Any]:
    """Return a whole answer as a chat's message. `reader`: a new one, which has then read the answer; `call_id`: prefix
    of the ids of its calls."""
    for _ in (*reader.push(text), *reader.finish()):
        pass
    content, thoughts = (
        "".join(part.text for part in reader.parts if part.kind is kind) for kind in (PartKind.TEXT, PartKind.REASONING)
    )
    named = [part for part in reader.parts if part.kind is PartKind.CALL]
    calls = [call(call_id, number, part.name, part.text) for number, part in enumerate(named)]
    message: dict[str, Any] = {"role": "assistant", "content": content or None if calls else content}
    if thoughts:
        message["reasoning_content"] = thoughts
    return message | ({"tool_calls": calls} if calls else {})
