"""Converts a line of the input to requests, and their answers to a line of the output, in the format of OpenAI's batch
files. Knows nothing about files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from services.backend import ServingPair
from services.errors import status_of
from services.openai.bodies import CHAT, COMPLETIONS, BadRequest, kind_of, parse
from services.openai.completions import check_reports, echoes, response
from services.openai.dialects import AnsweredCall, AnswerHeading
from services.openai.requests import CompletionRequest, Served, derived_seed, understood
from smc.api.limits import DEFAULT_MAX_TOKENS
from smc.api.request import Answer, Request
from smc.api.sampling_params import SamplingParams

URLS = (COMPLETIONS, CHAT)
FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class Line:
    """One request line, valid or not."""

    number: int
    """Position in the file, from 1, blank lines included. In a part of a file, counted in `unit`."""
    digest: str
    """Digest of file name, number and text: lines with the same digest are the same line."""
    custom_id: str | None = None
    """None: it could not be read."""
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    mistake: str | None = None
    """Why the line is not a request; None if it is one. The body is not checked here."""
    file: str = ""
    """Name of the line's file, if there are several."""
    unit: str = "line"
    """Unit of `number`: `line`, `byte` (bytes before the line) or `row`."""

    @property
    def name(self) -> str:
        """Name of the line in messages."""
        return f"{self.file}, {self.unit} {self.number}" if self.file else f"{self.unit} {self.number}"


@dataclass(frozen=True)
class Kept:
    """A record of an earlier run that replaces its line; the line is not decoded again."""

    record: dict[str, Any]


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of every line that is not blank. Holds one line at a time in memory."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield number, raw


def parse_line(number: int, raw: bytes, file: str = "", unit: str = "line") -> Line:
    """Parse a line. Never raises: `Line.mistake` says why a line is not a request."""
    before = f"{file}:".encode("utf-8", "surrogateescape") if file else b""
    digest = blake2b(before + b"%d:%b" % (number, raw.strip()), digest_size=12).hexdigest()
    line = partial(Line, number, digest, file=file, unit=unit)
    try:
        document = parse(raw)
    except ValueError as error:
        return line(mistake=str(error))
    if not isinstance(document, dict):
        return line(mistake=f"this is {kind_of(document)}; allowed: a JSON object with {', '.join(FIELDS)}")
    custom_id = document.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return line(mistake=f"custom_id={custom_id!r}; allowed: a string that names this line")
    if mistake := _mistake(document):
        return line(custom_id, mistake=mistake)
    return line(custom_id, document["url"], document["body"])


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
    """Builds the requests of a line for one pair of models."""

    def __init__(self, pair: ServingPair, seed: int) -> None:
        """`seed`: see `BatchConfig.seed`."""
        self._pair, self._seed = pair, seed

    def build(self, line: Line) -> tuple[Request, ...]:
        """Return one request for each answer. Raises ValueError naming the field, the value and what is allowed."""
        if line.mistake is not None:
            raise ValueError(line.mistake)
        completion = _understood(line, self._pair)
        _check_is_for_a_file(completion)
        tokenizer, context = self._pair.tokenizer, self._pair.context
        negative = completion.negative_tokens(tokenizer, context - 1)
        completion = replace(completion, settings=completion.settings | {"seed": self.seed_of(line)})

        def default_length(params: SamplingParams, prompt: int, negative: int) -> int:
            return min(DEFAULT_MAX_TOKENS, max(1, context - max(prompt, negative)))

        requests: list[Request] = []
        seeds, name = completion.seeds(), line.name if line.file else str(line.number)
        for each in completion.prompts:
            prompt = tuple(each.encode(tokenizer, context - 1))
            requests += completion.requests(name, prompt, negative, seeds, tokenizer, default_length)
        if (constraint := requests[0].params.constraint) is not None:
            from smc.constraints import Compiler  # imports torch
            from smc.stops import TokenBytes

            Compiler.of(TokenBytes.of(tokenizer)).check(constraint)
        check_reports(completion, requests)
        return tuple(requests)

    def seed_of(self, line: Line) -> int:
        """Return the seed of this line: its own, otherwise one derived from the run's seed and its custom_id, so that
        it is the same in every run and on every machine."""
        own = line.body.get("seed")
        return own if own is not None else derived_seed(f"{self._seed}:{line.custom_id}")


def _understood(line: Line, pair: ServingPair) -> CompletionRequest:
    served = Served((pair.target.name,), pair.tokenizer, defaults=pair.sampling)
    return understood(line.body, line.url == CHAT, served).with_tool_format(pair.tokenizer)


def _check_is_for_a_file(completion: CompletionRequest) -> None:
    """Raise BadRequest for fields of a service that have no effect in a file, unless they have their default value."""
    for name, value, fixed, why in (
        ("stream", completion.body.stream, False, "an answer is one line"),
        ("request_id", completion.body.request_id, None, "a line has a custom_id"),
        ("priority", completion.body.priority, 0, "lines are decoded in their order"),
        ("timeout", completion.body.timeout, None, "no client waits for a line"),
    ):
        if value != fixed:
            raise BadRequest(f"{name}={value!r}; allowed: {fixed!r}, {why}; or leave it out", name)


def record_id(line: Line) -> str:
    """Return the id of the record that answers this line. Another line has another id."""
    return f"batch_req_{line.digest}"


def answered(
    line: Line,
    requests: Sequence[Request],
    answers: Sequence[Answer],
    pair: ServingPair,
    fingerprint: str,
    created: int,
) -> dict[str, Any]:
    """Return the record of a line that was answered. `created`: seconds since the epoch."""
    chat, tokenizer = line.url == CHAT, pair.tokenizer
    heading = AnswerHeading(line.digest, created, pair.target.name, chat, fingerprint)
    completion = _understood(line, pair)
    reasoning = completion.reasoning(tokenizer, requests[0].prompt)
    texts = echoes(completion, tokenizer)
    body = response(AnsweredCall(heading, completion, requests, tokenizer, reasoning), answers, texts)
    line_response = {"status_code": 200, "request_id": f"req_{line.digest}", "body": body}
    return {"id": record_id(line), "custom_id": line.custom_id, "response": line_response, "error": None}


def refused(line: Line, error: Exception) -> dict[str, Any]:
    """Return the record of a line that has no answer because of an error."""
    status = status_of(error)
    return {
        "id": record_id(line),
        "custom_id": line.custom_id,
        "response": None,
        "error": {"code": status.cause, "message": f"{line.name}: {status.message}"},
    }
