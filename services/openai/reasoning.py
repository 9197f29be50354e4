"""Reasoning: what a model writes between <think> and </think> before its answer. Knows nothing about requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from smc.model.tokenizer import Tokenizer

BEGIN, END = "<think>", "</think>"
_TAIL = 8
"""Tokens at the end of a prompt in which a template opens or closes the reasoning itself."""


@dataclass(frozen=True)
class Reasoning:
    """Of an answer that is expected to reason."""

    end: int
    """Token that ends the reasoning."""
    is_open: bool
    """The prompt has begun it."""

    @staticmethod
    def of(tokenizer: Tokenizer, prompt: Sequence[int]) -> Reasoning | None:
        """By the chat template and the end of the prompt; None: the answer does not reason."""
        end, begin = tokenizer.id_of(END), tokenizer.id_of(BEGIN)
        if END not in (tokenizer.chat_template or "") or end is None or not tokenizer.bytes_of(end):
            return None
        tail = prompt[-_TAIL:]
        return None if end in tail else Reasoning(end, begin in tail)


class _ReasoningState(Enum):
    BEGINNING = 0
    REASONING = 1
    ENDED = 2
    """What follows may begin with blanks, which belong to neither."""
    ANSWER = 3


class ReasoningReader:
    """Divides the text of one answer as it comes."""

    def __init__(self, is_open: bool) -> None:
        self._state = _ReasoningState.REASONING if is_open else _ReasoningState.BEGINNING
        self._kept = ""

    def push(self, text: str) -> tuple[str, str]:
        """More of the reasoning, and of the answer."""
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
                # What may become the mark is kept.
                size = next((n for n in range(len(END) - 1, 0, -1) if reasoning.endswith(END[:n])), 0)
                reasoning, self._kept = reasoning[: len(reasoning) - size], reasoning[len(reasoning) - size :]
        if self._state is _ReasoningState.ENDED:
            self._kept = self._kept.lstrip()
            if self._kept:
                self._state = _ReasoningState.ANSWER
        answer = ""
        if self._state is _ReasoningState.ANSWER:
            answer, self._kept = self._kept, ""
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """What is left, at the end."""
        kept, self._kept = self._kept, ""
        return (kept, "") if self._state is _ReasoningState.REASONING else ("", kept)
