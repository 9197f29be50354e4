"""Lines of the output: an answer, or why there is none, as OpenAI's batch files have them. Knows nothing about files."""

from __future__ import annotations

import codecs
import hashlib
import json
import math
from dataclasses import asdict
from typing import Any

from services.backend import ServingPair
from services.batch.lines import CHAT, Line
from services.errors import status_of
from smc.engine.request import Answer, FinishReason, Request, SamplingParams
from smc.models.tokenizer import Tokenizer

OPENAI_FINISH = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIME_BUDGET: "length",
    FinishReason.QUEUE_TIME: "length",
}
ENGINE_FIELDS = ("form", "block", "branches", "defensive_share")
"""Settings of the engine that answers depend on."""


def fingerprint(pair: ServingPair, dtypes: str) -> str:
    """What answers depend on besides the request: two runs of the same fingerprint give the same answers to the same seeds."""
    settings = {name: getattr(pair.engine, name) for name in ENGINE_FIELDS}
    models = [(model.name, model.parameters) for model in (pair.target, pair.draft)]
    # What a line leaves out has the library's defaults.
    return "smc_" + _digest([models, settings, asdict(SamplingParams()), pair.context, dtypes])


def record_id(line: Line) -> str:
    """Tells whether a record answers this very line."""
    return f"batch_req_{line.digest}"


def answered(line: Line, request: Request, answer: Answer, pair: ServingPair, fingerprint: str, created: int) -> dict[str, Any]:
    """`created`: seconds since the epoch."""
    name = line.digest
    chat = line.url == CHAT
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": pair.target.name,
        "system_fingerprint": fingerprint,
        "choices": [_choice(answer, chat, pair.tokenizer)],
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": len(answer.tokens),
            "total_tokens": answer.prompt_tokens + len(answer.tokens),
            "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        },
        "smc": _smc(request, answer),
    }
    response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return {"id": record_id(line), "custom_id": line.custom_id, "response": response, "error": None}


def refused(line: Line, error: Exception) -> dict[str, Any]:
    status = status_of(error)
    return {
        "id": record_id(line),
        "custom_id": line.custom_id,
        "response": None,
        "error": {"code": status.cause, "message": f"line {line.number}: {status.message}"},
    }


def _choice(answer: Answer, chat: bool, tokenizer: Tokenizer) -> dict[str, Any]:
    said = {"message": {"role": "assistant", "content": answer.text}} if chat else {"text": answer.text}
    logprobs = None
    if answer.logprobs is not None:
        logprobs = (_chat_logprobs if chat else _completion_logprobs)(answer, tokenizer)
    return {"index": 0, **said, "logprobs": logprobs, "finish_reason": OPENAI_FINISH[answer.finish_reason]}


def _smc(request: Request, answer: Answer) -> dict[str, Any]:
    """What OpenAI has no words for."""
    statistics = None
    if not request.params.method.plain:
        statistics = {name: _finite(value) for name, value in asdict(answer.statistics).items()}
    return {
        "decoding": request.params.method.value,
        "finish_reason": answer.finish_reason.value,
        "matched": answer.matched,
        "seed": answer.seed,
        "seconds": round(answer.seconds, 6),
        "statistics": statistics,
        "token_ids": None if answer.logprobs is None else list(answer.tokens),
    }


def _completion_logprobs(answer: Answer, tokenizer: Tokenizer) -> dict[str, Any]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, offset = [], 0
    for token in answer.tokens:
        offsets.append(offset)
        offset += len(decoder.decode(tokenizer.bytes_of(token)))
    return {
        "tokens": [tokenizer.decode([token]) for token in answer.tokens],
        "token_logprobs": [_finite(value) for value in answer.logprobs],
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _chat_logprobs(answer: Answer, tokenizer: Tokenizer) -> dict[str, Any]:
    content = [
        {"token": tokenizer.decode([token]), "logprob": _finite(value), "bytes": list(tokenizer.bytes_of(token)), "top_logprobs": []}
        for token, value in zip(answer.tokens, answer.logprobs)
    ]
    return {"content": content, "refusal": None}


def _finite(value: Any) -> Any:
    """None for what JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]
