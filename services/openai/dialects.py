"""Dialects: how the APIs of this port read bodies and write answers and errors. A `Dialect` makes an `ApiCall` of a
body, with which an `AnswerWriter` writes the answers; the functions are what APIs write alike. Knows nothing about
connections and decoding."""

from __future__ import annotations

import codecs
import json
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from services.openai.bodies import Refusal, refusal
from services.openai.parts import PartEvent, PartReader, Reasoning
from services.openai.requests import CompletionRequest, Served
from smc.api.request import Alternatives, Answer, FinishReason, Output, Particle, Request
from smc.api.sampling_params import SamplingParams
from smc.model.tokenizer import Tokenizer

OPENAI_FINISH = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIME_BUDGET: "length",
    FinishReason.QUEUE_TIME: "length",
}


@dataclass(frozen=True)
class ApiCall:
    """The request of a body, and how its answers are written."""

    completion: CompletionRequest
    make_writer: Callable[[AnsweredCall], AnswerWriter]


class Dialect(ABC):
    """How one API reads bodies and writes errors."""

    prompt: str
    """The field that holds the prompt."""
    id_headers: tuple[str, ...] = ("x-request-id",)
    """Headers of a reply that hold the call's id."""

    @abstractmethod
    def read(self, document: Any, served: Served) -> ApiCall:
        """Read a body. Raises BadRequest naming the field, the value and what is allowed."""

    def refusal(self, error: Exception, request_id: str | None = None) -> Refusal:
        """Return what a caller is sent instead of an answer. `request_id`: the call's id."""
        return refusal(error)


@dataclass(frozen=True)
class AnswerHeading:
    """Fields at the head of a response, which are the same in every event of a stream."""

    id: str
    created: int
    """Seconds since the epoch."""
    model: str
    chat: bool
    fingerprint: str

    def fields(self, chunk: bool = False) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(frozen=True)
class AnsweredCall:
    """What the answers of one call are written with."""

    heading: AnswerHeading
    completion: CompletionRequest
    requests: Sequence[Request]
    tokenizer: Tokenizer
    reasoning: Reasoning | None
    """Reasoning that answers are expected to begin with."""


class AnswerWriter(ABC):
    """Writes the answers of one call as its API has them: all of them whole, or as server-sent events. In every API,
    these come from the same sequence of `PartEvent`s."""

    def __init__(self, call: AnsweredCall) -> None:
        self._call, self._heading, self._completion = call, call.heading, call.completion
        self._requests, self._tokenizer, self._reasoning = call.requests, call.tokenizer, call.reasoning
        self._readers = [PartReader(call.completion.syntax, call.reasoning) for _ in call.requests]
        self._begun: set[int] = set()

    def update(self, index: int, output: Output) -> bytes:
        """Return the events for an update of one answer."""
        data, reader = b"", self._readers[index]
        if index not in self._begun:
            self._begun.add(index)
            data += self._begin(index)
        data += self._more(index, output, reader.push(output.text))
        return data if output.answer is None else data + self._end(index, output.answer, reader.finish())

    def finish(self, answers: Sequence[Answer]) -> bytes:
        """Return the events after the last update of all answers."""
        return b""

    @abstractmethod
    def whole(self, answers: Sequence[Answer]) -> bytes:
        """Return the whole response as a document, without events."""

    @abstractmethod
    def error(self, body: dict[str, Any]) -> bytes:
        """Return the events that end a stream with an error. `body`: the body of the refusal."""

    @abstractmethod
    def _begin(self, index: int) -> bytes:
        """Return the events before an answer."""

    @abstractmethod
    def _more(self, index: int, output: Output, parts: Iterable[PartEvent]) -> bytes:
        """Return the events for new tokens of an answer. `parts`: events that are certain by now; text that may
        become a mark or a call is kept back."""

    @abstractmethod
    def _end(self, index: int, answer: Answer, parts: Iterable[PartEvent]) -> bytes:
        """Return the last events of an answer. `parts`: what is certain at its end."""


def usage(answers: Sequence[Answer], prompts: int) -> dict[str, Any]:
    """Return the token counts of a response. A prompt counts once, whatever the number of its answers; its cached
    tokens are those that every answer found cached."""
    each = len(answers) // prompts
    prompt_tokens = sum(answer.prompt_tokens for answer in answers[::each])
    # One answer computes what the others then find cached. It has the minimum: what was cached before.
    cached = sum(
        min(answer.cached_tokens for answer in answers[start : start + each]) for start in range(0, len(answers), each)
    )
    written = sum(len(answer.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": written,
        "total_tokens": prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def smc_block(params: SamplingParams, answer: Answer) -> dict[str, Any]:
    """Return the field `smc`: the results for which OpenAI has no fields."""
    statistics = None
    if not params.method.plain:
        statistics = {name: finite(value) for name, value in asdict(answer.statistics).items()}
    particles = None if answer.particles is None else [_particle(one) for one in answer.particles]
    return {
        "method": params.method.value,
        "finish_reason": answer.finish_reason.value,
        "matched": answer.matched,
        "seed": answer.seed,
        "seconds": finite(round(answer.seconds, 6)),
        "times": {part: round(seconds, 6) for part, seconds in vars(answer.times).items()},
        "statistics": statistics,
        "token_ids": None if answer.logprobs is None else list(answer.tokens),
        "particles": particles,
    }


def _particle(particle: Particle) -> dict[str, Any]:
    fields = {"text": particle.text, "token_ids": list(particle.tokens), "finish_reason": particle.finish_reason.value}
    return fields | {"weight": particle.weight}


def chat_logprobs(
    tokens: Sequence[int],
    values: Sequence[float],
    top_logprobs: Sequence[Alternatives] | None,
    tokenizer: Tokenizer,
) -> list[dict[str, Any]]:
    """Return log-probabilities in the form of chats: one entry a token."""
    # Cached, because the same tokens are among the likeliest again and again.
    text = cache(lambda token: (tokenizer.decode([token]), list(tokenizer.bytes_of(token))))

    def entry(token: int, value: float) -> dict[str, Any]:
        name, data = text(token)
        return {"token": name, "logprob": finite(value), "bytes": data}

    each = zip(tokens, values, top_logprobs or [()] * len(tokens))
    return [
        entry(token, value) | {"top_logprobs": [entry(*top) for top in likeliest]} for token, value, likeliest in each
    ]


class TextOffsets:
    """Computes where the tokens of an answer begin in its text, in characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.end = 0
        """Where the next token begins."""

    def push(self, tokens: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self.end)
            self.end += len(self._utf8.decode(self._tokenizer.bytes_of(token)))
        return offsets


class TextLogprobs:
    """Finds the log-probabilities of an answer's tokens that belong to a text within the answer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._offsets = TextOffsets(tokenizer)
        self._waiting: deque[tuple[int, int, dict[str, Any]]] = deque()
        """Where tokens that were not taken begin and end, and their log-probabilities."""

    def add(self, tokens: Sequence[int], entries: Sequence[dict[str, Any]]) -> None:
        """Add the log-probabilities of the next tokens."""
        begins = self._offsets.push(tokens)
        self._waiting += zip(begins, [*begins[1:], self._offsets.end], entries)

    def take(self, begin: int, end: int | None) -> list[dict[str, Any]]:
        """Return the log-probabilities of tokens that a text from `begin` to `end` (None: the end of the answer) has.
        Those before it are dropped. A token at the end of two texts belongs to the first."""
        found = []
        while self._waiting and (end is None or self._waiting[0][0] < end):
            first, last, entry = self._waiting.popleft()
            if first >= begin or last > begin:
                found.append(entry)
        return found


def finite(value: Any) -> Any:
    """Return the value; None instead of a number that JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def written(document: Any, depth: int = 5) -> str:
    """Return a document as JSON, joined from the pieces at `depth` levels below, such as one token's log-probabilities.
    Long documents are written in a thread, and no other thread runs while `json` writes a piece."""
    if not depth or not isinstance(document, (dict, list)):
        return json.dumps(document, allow_nan=False)
    if isinstance(document, list):
        return f"[{', '.join(written(item, depth - 1) for item in document)}]"
    return f"{{{', '.join(f'{json.dumps(name)}: {written(value, depth - 1)}' for name, value in document.items())}}}"


def named_event(fields: dict[str, Any]) -> bytes:
    """Return a server-sent event whose name is the `type` of its data."""
    return f"event: {fields['type']}\ndata: {written(fields, depth=7)}\n\n".encode()
