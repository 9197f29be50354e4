"""Helpers that write request lines, and a batch run in which a function of this process gives the answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from services.backend import ServingPair
from services.batch.lines import CHAT, COMPLETIONS, Line, RequestReader, parse_line
from services.batch.output_file import OutputFile, Survey, rest, survey
from services.batch.runner import BatchRunner, Limit
from smc.api.request import Answer, FinishReason, Request, Statistics

PRINT = "smc_0"
KINDS = [
    {"method": "smc", "particles": 8, "max_tokens": 30},
    {"method": "smc", "particles": 4, "max_tokens": 50, "ess_threshold": 1.0, "ignore_eos": True},
    {"method": "target", "max_tokens": 40, "temperature": 0},
    {"method": "smc", "particles": 3, "max_tokens": 30, "stop": ["####"], "seed": 7},
]
LOOKAHEAD, LOCKSTEP = {"block": 5, "branches": 2}, {"block": 5, "form": "lockstep"}
OPTIONS = ("-k", 5, "--max-slots", 16, "--seed", 3)


def chat(custom_id: str, content: str = "1 + 1?", **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def completion(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": {"prompt": "1 + 1 =", **body}}


def line(document: Any, number: int = 1) -> Line:
    return parse_line(number, json.dumps(document).encode())


def write_lines(path: Path, documents: Iterable[Any]) -> Path:
    """Write the documents as JSON lines and return the path; strings are written unchanged."""
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in documents))
    return path


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def answer_of(request: Request) -> Answer:
    """Return an answer that depends only on the request."""
    tokens = tuple(request.prompt[:3])
    statistics = Statistics(request.params.rows, rounds=2)
    text = f"{request.params.seed} of {len(request.prompt)}"
    return Answer(
        request.request_id,
        tokens,
        text,
        FinishReason.EOS,
        None,
        request.params.seed,
        len(request.prompt),
        statistics,
        0.5,
    )


async def decode_at_once(request: Request) -> Answer:
    await asyncio.sleep(0)
    return answer_of(request)


def answer_file(
    pair: ServingPair,
    source: Path,
    output: Path,
    decode: Callable[[Request], Awaitable[Answer]] = decode_at_once,
    *,
    seed: int = 0,
    overwrite: bool = False,
    limit: Limit | None = None,
    fingerprint: str = PRINT,
) -> Survey:
    """Do what `services.batch.run.BatchRun` does, without a cluster. Returns what the output held before."""
    requests = RequestReader(pair, seed)
    with OutputFile(output, overwrite) as file:
        before = survey(source, file, requests, fingerprint)
        runner = BatchRunner(pair, requests, decode, fingerprint, limit or Limit(4))
        asyncio.run(runner.run(rest(source, before.done), lambda record, is_new: file.append(record)))
    return before


def essence(record: dict) -> tuple:
    """Return what a test compares of a record: its custom_id, and the answer or the error code."""
    if record["error"] is not None:
        return record["custom_id"], record["error"]["code"]
    body = record["response"]["body"]
    text, count = body["choices"][0]["message"]["content"], body["usage"]["completion_tokens"]
    return (
        record["custom_id"],
        text,
        count,
        body["choices"][0]["smc"]["finish_reason"],
        body["choices"][0]["smc"]["seed"],
    )
