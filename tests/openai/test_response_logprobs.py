"""Log-probabilities in `/v1/responses`: every text has those of its own tokens, whatever stands before and after it, in
a whole response and in a stream, with and without likeliest tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from services.openai.dialects import AnsweredCall, AnswerHeading
from services.openai.parts import END, Reasoning
from services.openai.requests import Served, understood
from services.openai.responses import ResponsesBody, ResponsesWriter
from services.openai.tool_calls import CallSyntax, ToolFormat
from smc.api.request import Answer, FinishReason, Output, Request, Statistics
from smc.api.sampling_params import SamplingParams
from smc.model.tokenizer import Tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CUT = CALL[:46]
OTHER = '<tool_call>{"arguments": "{\\"a\\": 22}", "name": "add"}</tool_call>'
ANSWERS = {
    "only a text": ("Let me see.",),
    "characters of several bytes": ("Sí ☃ 🙂 é",),
    "a call after a text": ("Let me see.", CALL),
    "a text after a call": (CALL, "That is 23."),
    "texts between calls": ("First.", CALL, "Then x < y.", OTHER, "Done."),
    "text that looks like a call": ("Write <tool_call>x or <tool", "_call> twice."),
    "a call cut by the end": ("Let me see.", CUT),
    "reasoning": ("Hm, 1 < 2." + END, "Let me see.", CALL),
}
"""Texts of answers, in pieces: each is a part of the answer, or stands beside one."""


def is_text(piece: str) -> bool:
    return piece not in (CALL, OTHER, CUT) and END not in piece


def cut(tokenizer: Tokenizer, pieces: Sequence[str]) -> tuple[tuple[int, ...], list[list[float]]]:
    """Return the tokens of an answer, each within a piece, and their numbers, as log-probabilities, for each of its
    texts; text beside text is one."""
    tokens: list[int] = []
    texts: list[list[float]] = []
    for before, piece in pairwise((CALL, *pieces)):
        new = tokenizer.encode(piece, add_special=False)
        if is_text(piece):
            if not is_text(before):
                texts.append([])
            texts[-1] += [-float(len(tokens) + number) for number in range(len(new))]
        tokens += new
    return tuple(tokens), texts


class Written:
    """One answer, written whole and as a stream."""

    def __init__(self, tokenizer: Tokenizer, pieces: Sequence[str], count: int) -> None:
        tokens, self.texts = cut(tokenizer, pieces)
        values = tuple(-float(number) for number in range(len(tokens)))
        likeliest = tuple(((token, value),) for token, value in zip(tokens, values)) if count else None
        text = "".join(pieces)
        params = SamplingParams(logprobs=True, top_logprobs=count)
        self.answer = Answer("a", tokens, text, FinishReason.LENGTH, None, 1, 1, Statistics(1), 0.0, values, likeliest)
        reasoning = Reasoning(tokens[0], True) if END in text else None
        request = understood({"messages": [{"role": "user", "content": "x"}]}, True, Served(("demo",), tokenizer))
        self.tokenizer = tokenizer
        self.call = AnsweredCall(
            AnswerHeading("a", 0, "demo", True, ""),
            replace(request, syntax=CallSyntax(ToolFormat.HERMES, frozenset({"add"}))),
            [Request("a", (0,), params)],
            tokenizer,
            reasoning,
        )

    def writer(self) -> ResponsesWriter:
        return ResponsesWriter(ResponsesBody.model_validate({"input": "x"}), self.call)

    def whole(self) -> dict[str, Any]:
        return json.loads(self.writer().whole([self.answer]))

    def stream(self, each: int) -> list[dict[str, Any]]:
        """Return the events of a stream with `each` tokens an update."""
        data = b"".join(self.updates(each, self.writer()))
        return [json.loads(line.removeprefix(b"data: ")) for line in data.split(b"\n") if line.startswith(b"data: ")]

    def updates(self, each: int, writer: ResponsesWriter) -> Iterator[bytes]:
        tokens, values = self.answer.tokens, self.answer.logprobs
        sent = 0
        for begin in range(0, len(tokens), each):
            end = begin + each
            text = self.tokenizer.decode(tokens[:end]).rstrip("\ufffd") if end < len(tokens) else self.answer.text
            sent, text = len(text), text[sent:]
            yield writer.update(0, Output("a", tokens[begin:end], text, logprobs=values[begin:end]))
        yield writer.update(0, Output("a", answer=self.answer))


def scored(response: dict[str, Any]) -> list[list[float]]:
    """Return the log-probabilities of each text of a response."""
    items = [item for item in response["output"] if item["type"] == "message"]
    return [[entry["logprob"] for entry in item["content"][0]["logprobs"]] for item in items]


@pytest.mark.parametrize("each", [1, 3, 1000])
@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("name", ANSWERS)
def test_every_text_has_those_of_its_tokens(pair, name: str, count: int, each: int):
    written = Written(pair.tokenizer, ANSWERS[name], count)
    whole, events = written.whole(), written.stream(each)
    assert scored(whole) == written.texts
    ended = events[-1]["response"]
    assert ended["output"] == whole["output"], "a stream ends with the whole response"
    deltas: dict[int, list[Any]] = {}
    for event in events:
        if event["type"] == "response.output_text.delta":
            deltas.setdefault(event["output_index"], []).extend(event["logprobs"])
        elif event["type"] == "response.output_text.done":
            assert event["logprobs"] == deltas[event["output_index"]]
        elif event["type"] == "response.output_item.done" and event["item"]["type"] == "message":
            assert event["item"]["content"][0]["logprobs"] == deltas[event["output_index"]]
            assert event["item"] == whole["output"][event["output_index"]]
    assert [[entry["logprob"] for entry in one] for one in deltas.values()] == written.texts
    assert all(len(entry["top_logprobs"]) == count for one in deltas.values() for entry in one)
