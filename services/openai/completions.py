"""OpenAI's completions and chats (`/v1/completions`, `/v1/chat/completions`): reads their bodies and writes their
responses and streamed chunks. Knows nothing about how they are sent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from services.openai.bodies import CHAT, COMPLETIONS, BadRequest
from services.openai.dialects import (
    OPENAI_FINISH,
    AnsweredCall,
    AnswerWriter,
    ApiCall,
    Dialect,
    TextOffsets,
    chat_logprobs,
    finite,
    smc_block,
    usage,
    written,
)
from services.openai.parts import PartBegins, PartEnds, PartEvent, PartKind, PartReader, message_of
from services.openai.requests import CompletionRequest, Served, understood
from services.openai.tool_calls import call
from smc.api.request import Alternatives, Answer, FinishReason, Output, PromptToken, Request, check_scored
from smc.api.sampling_params import SamplingParams
from smc.model.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
MOST_ECHOED = 1 << 20
"""Maximum number of characters of prompts that are repeated in all answers together."""


@dataclass(frozen=True)
class ScoredPrompt:
    """A prompt with the log-probabilities of its tokens, to be listed in an answer."""

    tokens: tuple[int, ...]
    scores: tuple[PromptToken, ...]
    """Scores of all tokens but the first; empty if there was no time to compute them."""

    @staticmethod
    def of(
        completion: CompletionRequest, requests: Sequence[Request], answers: Sequence[Answer]
    ) -> list[ScoredPrompt | None]:
        """Return the scored prompt of each answer; None: scores were not requested. Answers to one prompt share the
        scores of the first."""
        found: list[ScoredPrompt | None] = []
        for first in range(0, len(answers), completion.n):
            scored = None
            if requests[first].params.prompt_logprobs is not None:
                scored = ScoredPrompt(requests[first].prompt, answers[first].prompt_logprobs or ())
            found += [scored] * completion.n
        return found

    def fields(self, count: int | None, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return vLLM's field of a response, if the prompt's tokens are to be listed. `count`: see
        `CompletionRequest.prompt_logprobs`."""
        return {} if count is None else {"prompt_logprobs": self._by_id(count, tokenizer)}

    def _by_id(self, count: int, tokenizer: Tokenizer) -> list[dict[str, Any] | None] | None:
        """Return for every token its own log-probability and those of the `count` likeliest at its position, by token
        id; the first token has none. None: there was no time to compute them."""
        if len(self.scores) != len(self.tokens) - 1:
            return None
        text = cache(lambda token: tokenizer.decode([token]))
        listed: list[dict[str, Any] | None] = [None]
        for token, score in zip(self.tokens[1:], self.scores):
            ranked = {token: (score.logprob, score.rank)}
            ranked |= {one: (logprob, rank) for rank, (one, logprob) in enumerate(score.likeliest[:count], 1)}
            listed.append(
                {
                    str(one): {"logprob": finite(logprob), "rank": rank, "decoded_token": text(one)}
                    for one, (logprob, rank) in ranked.items()
                }
            )
        return listed

    def then(self, answer: Answer, count: int) -> tuple[list[int], list[float | None], list[Alternatives] | None]:
        """Return the tokens of the prompt and of an answer, their log-probabilities, and the likeliest tokens at their
        positions, `count` for each token of the prompt. The first token has no log-probabilities."""
        values: list[float | None] = [None, *(score.logprob for score in self.scores)]
        values += [None] * (len(self.tokens) - len(values))
        likeliest = None
        if answer.top_logprobs is not None:
            likeliest = [(), *(score.likeliest[:count] for score in self.scores), *answer.top_logprobs]
        return [*self.tokens, *answer.tokens], [*values, *(answer.logprobs or ())], likeliest


def check_reports(completion: CompletionRequest, requests: Sequence[Request]) -> None:
    """Check how many log-probabilities of prompts will be listed: a completion lists those of its prompt with each of
    its answers. Raises ValueError if there are more than allowed."""
    check_scored(requests[:: completion.n], times=1 if completion.chat else completion.n)


def echoes(completion: CompletionRequest, tokenizer: Tokenizer) -> list[str]:
    """Return the text before each answer: its prompt, if the request asks for that."""
    texts = [prompt.written(tokenizer) if completion.echo else "" for prompt in completion.prompts]
    return [text for text in texts for _ in range(completion.n)]


def response(call: AnsweredCall, answers: Sequence[Answer], echoes: Sequence[str]) -> dict[str, Any]:
    """Return a whole response. `echoes`: text before each answer."""
    heading, completion, requests, tokenizer = call.heading, call.completion, call.requests, call.tokenizer
    if completion.only_prompts:
        answers = list(map(_without_token, answers))
    prompts, count = ScoredPrompt.of(completion, requests, answers), completion.prompt_logprobs
    choices = []
    for index, (answer, request, scored) in enumerate(zip(answers, requests, prompts, strict=True)):
        echoed = scored if completion.echo and request.params.logprobs else None
        logprobs = _answer_logprobs(answer, heading.chat, tokenizer, echoed, request.params.top_logprobs)
        ending = _ending(answer, request.params, logprobs)
        content: dict[str, Any]
        if heading.chat:
            reader = PartReader(completion.syntax, call.reasoning)
            content = {"message": message_of(answer.text, reader, f"{heading.id}_{index}")}
            ending |= _finish(ending, reader)
        else:
            content = {"text": echoes[index] + answer.text}
            ending |= scored.fields(count, tokenizer) if scored is not None else {}
        choices.append({"index": index} | content | ending)
    body = heading.fields() | {"choices": choices, "usage": usage(answers, len(completion.prompts))}
    return body | (prompts[0].fields(count, tokenizer) if heading.chat and prompts[0] is not None else {})


def _without_token(answer: Answer) -> Answer:
    """Return the answer to a request of prompts only, without the one token that was decoded."""
    if not answer.tokens:
        return answer
    return replace(
        answer,
        tokens=(),
        text="",
        finish_reason=FinishReason.LENGTH,
        matched=None,
        logprobs=None if answer.logprobs is None else (),
        top_logprobs=None if answer.top_logprobs is None else (),
    )


def _finish(ending: dict[str, Any], reader: PartReader) -> dict[str, Any]:
    """Return the finish reason of an answer with calls, if calls change it: not if it ended within one."""
    return {"finish_reason": "tool_calls"} if reader.has_calls and ending["finish_reason"] == "stop" else {}


class CompletionWriter(AnswerWriter):
    """Writes the answers of chats and completions: see `AnswerWriter`."""

    def __init__(self, call: AnsweredCall) -> None:
        """Raises ValueError if more text or log-probabilities of prompts would be repeated than allowed."""
        super().__init__(call)
        self._chat = call.heading.chat
        self._echoes = echoes(call.completion, call.tokenizer)
        if (size := sum(map(len, self._echoes))) > MOST_ECHOED:
            raise BadRequest(
                f"echo=true asks for {size} characters of prompts; allowed: at most {MOST_ECHOED} in all answers",
                "echo",
            )
        check_reports(call.completion, call.requests)
        self._left: dict[int, dict[str, Any]] = {}
        """Log-probabilities for the last event of an answer, by its index."""
        self._offsets: dict[int, TextOffsets] = {}
        """Text offsets of a completion with log-probabilities, by the answer's index."""
        self._fields = call.heading.fields(chunk=True)
        self._tokens = [0] * len(call.requests)
        """Number of tokens of each answer that have been written."""
        head = json.dumps(self._fields)[:-1]
        # Events of text are frequent and differ only in index and text, so they are assembled from prepared parts.
        self._before = f'data: {head}, "choices": [{{"index": '
        self._between = ', "delta": {"content": ' if self._chat else ', "text": '
        self._after = ("}" if self._chat else "") + ', "logprobs": null, "finish_reason": null}]'

    def _usage(self, index: int) -> dict[str, Any]:
        """Return the field with the usage of an event about an answer, if the request asks for such a field."""
        completion = self._completion
        if completion.continuous_usage:
            prompt, new = len(self._requests[index].prompt), self._tokens[index]
            return {"usage": {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}}
        return {"usage": None} if completion.include_usage else {}

    def finish(self, answers: Sequence[Answer]) -> bytes:
        if not self._completion.include_usage:
            return DONE
        counts = usage(answers, len(self._completion.prompts))
        return _event(self._fields | {"choices": [], "usage": counts}) + DONE

    def whole(self, answers: Sequence[Answer]) -> bytes:
        return written(response(self._call, answers, self._echoes)).encode()

    def error(self, body: dict[str, Any]) -> bytes:
        return _event(body)

    def _begin(self, index: int) -> bytes:
        if self._chat:
            return self._piece(index, {"delta": {"role": "assistant", "content": ""}})
        return self._text(index, self._echoes[index]) if self._echoes[index] else b""

    def _logprobs(self, index: int, tokens: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
        """Return the log-probabilities of the next tokens of an answer, in the form of the API."""
        if self._chat:
            return {"content": chat_logprobs(tokens, values, None, self._tokenizer), "refusal": None}
        offsets = self._offsets.setdefault(index, TextOffsets(self._tokenizer))
        return _completion_logprobs(tokens, values, None, self._tokenizer, offsets)

    def _more(self, index: int, output: Output, parts: Iterable[PartEvent]) -> bytes:
        self._tokens[index] += len(output.tokens)
        logprobs = None
        if output.logprobs and not self._requests[index].params.top_logprobs:
            logprobs = self._logprobs(index, output.tokens, output.logprobs)
        data = b""
        for event in parts:
            if new := self._part(index, event, logprobs):
                data, logprobs = data + new, None
        if logprobs is None:
            return data
        if output.text or output.answer is None:
            return data + self._text(index, "", logprobs)
        self._left[index] = logprobs
        return data

    def _part(self, index: int, event: PartEvent, logprobs: dict[str, Any] | None = None) -> bytes:
        if isinstance(event, PartEnds) or (isinstance(event, PartBegins) and event.part.kind is not PartKind.CALL):
            return b""
        text = "" if isinstance(event, PartBegins) else event.text
        if event.part.kind is PartKind.TEXT:
            return self._text(index, text, logprobs)
        if event.part.kind is PartKind.REASONING:
            return self._piece(index, {"delta": {"reasoning_content": text}}, logprobs)
        number = sum(part.kind is PartKind.CALL for part in self._readers[index].parts) - 1
        more: dict[str, Any] = {"function": {"arguments": text}}
        if isinstance(event, PartBegins):
            more = call(f"{self._heading.id}_{index}", number, event.part.name)
        return self._piece(index, {"delta": {"tool_calls": [{"index": number, **more}]}}, logprobs)

    def _text(self, index: int, text: str, logprobs: dict[str, Any] | None = None) -> bytes:
        if logprobs is not None:
            return self._piece(index, {"delta": {"content": text}} if self._chat else {"text": text}, logprobs)
        usage = "".join(f', "{name}": {json.dumps(value)}' for name, value in self._usage(index).items())
        return f"{self._before}{index}{self._between}{json.dumps(text)}{self._after}{usage}}}\n\n".encode()

    def _end(self, index: int, answer: Answer, parts: Iterable[PartEvent]) -> bytes:
        # The likeliest tokens are known only now; if they were requested, all log-probabilities come here.
        params, logprobs = self._requests[index].params, self._left.get(index)
        if params.top_logprobs:
            logprobs = _answer_logprobs(answer, self._chat, self._tokenizer)
        data = b"".join(self._part(index, event) for event in parts)
        ending = _ending(answer, params, logprobs)
        ending |= _finish(ending, self._readers[index])
        content: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        return data + self._choice({"index": index, **content} | ending)

    def _piece(self, index: int, content: dict[str, Any], logprobs: dict[str, Any] | None = None) -> bytes:
        return self._choice({"index": index, **content, "logprobs": logprobs, "finish_reason": None})

    def _choice(self, choice: dict[str, Any]) -> bytes:
        return _event(self._fields | {"choices": [choice]} | self._usage(choice["index"]))


def _event(document: dict[str, Any]) -> bytes:
    return f"data: {written(document)}\n\n".encode()


def _ending(answer: Answer, params: SamplingParams, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "logprobs": logprobs,
        "finish_reason": OPENAI_FINISH[answer.finish_reason],
        "smc": smc_block(params, answer),
    }


def _answer_logprobs(
    answer: Answer, chat: bool, tokenizer: Tokenizer, echoed: ScoredPrompt | None = None, count: int = 0
) -> dict[str, Any] | None:
    """Return the log-probabilities of a whole answer; None: they were not requested. `echoed`: the prompt, whose tokens
    precede the answer's, each with `count` of the likeliest."""
    if answer.logprobs is None:
        return None
    scored = (answer.tokens, answer.logprobs, answer.top_logprobs)
    if chat:
        return {"content": chat_logprobs(*scored, tokenizer), "refusal": None}
    if echoed is not None:
        return _completion_logprobs(*echoed.then(answer, count), tokenizer, TextOffsets(tokenizer))
    return _completion_logprobs(*scored, tokenizer, TextOffsets(tokenizer))


def _completion_logprobs(
    tokens: Sequence[int],
    values: Sequence[float | None],
    top_logprobs: Sequence[Alternatives] | None,
    tokenizer: Tokenizer,
    offsets: TextOffsets,
) -> dict[str, Any]:
    """Return log-probabilities in the form of completions. A token without a value has no likeliest tokens either."""
    likeliest = None
    if top_logprobs is not None:
        likeliest = [
            None if value is None else _named(token, value, likely, tokenizer)
            for token, value, likely in zip(tokens, values, top_logprobs)
        ]
    return {
        "tokens": [tokenizer.decode([token]) for token in tokens],
        "token_logprobs": [finite(value) for value in values],
        "top_logprobs": likeliest,
        "text_offset": offsets.push(tokens),
    }


def _named(token: int, value: float, likeliest: Alternatives, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the log-probabilities of the likeliest tokens and of the answer's own token, by text, likeliest first. Of
    tokens with the same text, the likeliest counts."""
    named: dict[str, Any] = {}
    for one, logprob in (*likeliest, (token, value)):
        named.setdefault(tokenizer.decode([one]), finite(logprob))
    return named


@dataclass(frozen=True)
class CompletionDialect(Dialect):
    """The dialect of chats, or of completions."""

    chat: bool
    prompt: str

    def read(self, document: Any, served: Served) -> ApiCall:
        return ApiCall(understood(document, self.chat, served).with_tool_format(served.tokenizer), CompletionWriter)


COMPLETION_DIALECTS: dict[str, Dialect] = {
    CHAT: CompletionDialect(True, "messages"),
    COMPLETIONS: CompletionDialect(False, "prompt"),
}
