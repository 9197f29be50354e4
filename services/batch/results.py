"""Lines of the output: an answer, or why there is none, as OpenAI's batch files have them. Knows nothing about
files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from services.backend import ServingPair
from services.batch.lines import CHAT, Line
from services.errors import status_of
from services.openai.answers import Heading, choice, response
from smc.api.outputs import Answer
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams

ENGINE_FIELDS = ("form", "block", "branches", "defensive_share")
"""Settings of the engine that answers depend on."""


def fingerprint(pair: ServingPair, dtypes: str) -> str:
    """What answers depend on besides the request: two runs of the same fingerprint give the same answers to the same
    seeds."""
    settings = {name: getattr(pair.engine, name) for name in ENGINE_FIELDS}
    models = [(model.name, model.parameters) for model in (pair.target, pair.draft)]
    # What a line leaves out has the library's defaults.
    return "smc_" + _digest([models, settings, asdict(SamplingParams()), pair.context, dtypes])


def record_id(line: Line) -> str:
    """Tells whether a record answers this very line."""
    return f"batch_req_{line.digest}"


def answered(
    line: Line, request: Request, answer: Answer, pair: ServingPair, fingerprint: str, created: int
) -> dict[str, Any]:
    """`created`: seconds since the epoch."""
    chat = line.url == CHAT
    heading = Heading(line.digest, created, pair.target.name, chat, fingerprint)
    body = response(
        heading, [choice(0, answer, request.params, chat, pair.tokenizer, _echo(line, request, pair))], [answer]
    )
    said = {"status_code": 200, "request_id": f"req_{line.digest}", "body": body}
    return {"id": record_id(line), "custom_id": line.custom_id, "response": said, "error": None}


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
