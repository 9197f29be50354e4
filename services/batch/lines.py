"""A line of the input, the request that it stands for, and the line of the output that answers it, as in OpenAI's batch
files. Knows nothing about files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from services.backend import ServingPair
from services.errors import status_of
from services.openai.reasoning import Reasoning
from services.openai.requests import (
    CHAT,
    COMPLETIONS,
    BadRequest,
    CompletionRequest,
    derived_seed,
    kind_of,
    parse,
    understood,
)
from services.openai.responses import ResponseHeader, choice, response
from smc.api.limits import DEFAULT_MAX_TOKENS
from smc.api.outputs import Answer
from smc.api.request import Request

URLS = (COMPLETIONS, CHAT)
FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class Line:
    """One request line, right or wrong."""

    number: int
    """In the file, from 1; blank lines count, though they hold nothing."""
    digest: str
    """Of its number and its text: two lines of the same digest are the same line."""
    custom_id: str | None = None
    """None: it could not be read."""
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    mistake: str | None = None
    """Why the line is not a request; None if it is one. The body is not checked here."""


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and content of every line that is not blank. Holds one line at a time."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield number, raw


def parse_line(number: int, raw: bytes) -> Line:
    """Never raises: `Line.mistake` says why a line is not a request."""
    digest = blake2b(b"%d:%b" % (number, raw.strip()), digest_size=12).hexdigest()
    try:
        document = parse(raw)
    except ValueError as error:
        return Line(number, digest, mistake=str(error))
    if not isinstance(document, dict):
        return Line(
            number, digest, mistake=f"this is {kind_of(document)}; allowed: a JSON object with {', '.join(FIELDS)}"
        )
    custom_id = document.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return Line(number, digest, mistake=f"custom_id={custom_id!r}; allowed: a string that names this line")
    if mistake := _mistake(document):
        return Line(number, digest, custom_id, mistake=mistake)
    return Line(number, digest, custom_id, document["url"], document["body"])


def _mistake(document: dict[str, Any]) -> str | None:
    if unknown := [name for name in document if name not in FIELDS]:
        return f"{unknown[0]} is not a field of a request line; allowed: {', '.join(FIELDS)}"
    if document.get("method") != "POST":
        return f"method={document.get('method')!r}; allowed: 'POST'"
    if document.get("url") not in URLS:
        return f"url={document.get('url')!r}; allowed: {', '.join(URLS)}"
    if not isinstance(document.get("body"), dict):
        return f"body={document.get('body')!r}; allowed: an object with the request"
    return None


class RequestReader:
    """Makes requests for one pair of models."""

    def __init__(self, pair: ServingPair, seed: int) -> None:
        """`seed`: see `BatchConfig.seed`."""
        self._pair, self._seed = pair, seed

    def build(self, line: Line) -> Request:
        """Raises ValueError naming the field, the value and what is allowed."""
        if line.mistake is not None:
            raise ValueError(line.mistake)
        completion = _understood(line, self._pair)
        _check_is_for_a_file(completion)
        prompt = tuple(completion.prompts[0].encode(self._pair.tokenizer, self._pair.context - 1))
        negative = completion.negative_tokens(self._pair.tokenizer, self._pair.context - 1)
        longest = min(DEFAULT_MAX_TOKENS, max(1, self._pair.context - max(len(prompt), len(negative or ()))))
        if completion.may_reason:
            completion = completion.after_reasoning(Reasoning.of(self._pair.tokenizer, prompt))
        params = completion.params(longest, self.seed_of(line))
        if params.constraint is not None:
            from smc.constraints import Compiler  # imports torch
            from smc.stops import TokenBytes

            Compiler.of(TokenBytes.of(self._pair.tokenizer)).check(params.constraint)
        return Request(str(line.number), prompt, params, completion.cache_salt, negative_prompt=negative)

    def seed_of(self, line: Line) -> int:
        """The seed of this line: its own, or else one that is the same whenever and wherever it is decoded."""
        own = line.body.get("seed")
        return own if own is not None else derived_seed(f"{self._seed}:{line.custom_id}")


def _understood(line: Line, pair: ServingPair) -> CompletionRequest:
    names = (pair.target.name,)
    completion = understood(line.body, line.url == CHAT, names, pair.tokenizer.size, defaults=pair.sampling)
    return completion.with_tool_format(pair.tokenizer)


def _check_is_for_a_file(completion: CompletionRequest) -> None:
    """Of what a service has, one value only is possible here. Raises BadRequest."""
    for name, value, fixed, why in (
        ("n", completion.n * len(completion.prompts), 1, "one answer a line"),
        ("stream", completion.stream, False, "an answer is one line"),
        ("request_id", completion.request_id, None, "a line has a custom_id"),
        ("priority", completion.priority, 0, "lines are decoded in their order"),
        ("timeout", completion.timeout, None, "no client waits for a line"),
    ):
        if value != fixed:
            raise BadRequest(f"{name}={value!r}; allowed: {fixed!r}, {why}; or leave it out", name)


def record_id(line: Line) -> str:
    """Tells whether a record answers this very line."""
    return f"batch_req_{line.digest}"


def answered(
    line: Line, request: Request, answer: Answer, pair: ServingPair, fingerprint: str, created: int
) -> dict[str, Any]:
    """`created`: seconds since the epoch."""
    chat = line.url == CHAT
    heading = ResponseHeader(line.digest, created, pair.target.name, chat, fingerprint)
    form = _understood(line, pair).tool_format if (line.body or {}).get("tools") else None
    echo = _echo(line, request, pair)
    reasoning = Reasoning.of(pair.tokenizer, request.prompt) if chat else None
    one = choice(0, answer, request.params, chat, pair.tokenizer, echo, form, reasoning, line.digest)
    body = response(heading, [one], [answer])
    line_response = {"status_code": 200, "request_id": f"req_{line.digest}", "body": body}
    return {"id": record_id(line), "custom_id": line.custom_id, "response": line_response, "error": None}


def refused(line: Line, error: Exception) -> dict[str, Any]:
    status = status_of(error)
    return {
        "id": record_id(line),
        "custom_id": line.custom_id,
        "response": None,
        "error": {"code": status.cause, "message": f"line {line.number}: {status.message}"},
    }


def _echo(line: Line, request: Request, pair: ServingPair) -> str:
    if not line.body.get("echo"):
        return ""
    prompt = line.body["prompt"]
    return prompt if isinstance(prompt, str) else pair.tokenizer.decode(request.prompt)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]
