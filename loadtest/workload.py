"""Plans a run: all requests in the order of their times, drawn from the seed of the run. Reads the files of prompts
(JSONL) and of traces (JSONL or CSV). Knows nothing about how requests are sent.

The content of a request depends only on the seed and its number, so two runs at different rates send the same requests.
An unknown field of a file is refused."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadtest import arrivals
from loadtest.client import PlannedRequest
from loadtest.settings import WITH_PARTICLES, LoadSettings
from services.client import Message, ModelInfo, Prompt
from smc.demo import problems

DEMO_PROBLEMS = 256
"""Number of different questions, which then repeat."""


@dataclass(frozen=True)
class PromptLine:
    """Content of one line of a file. For None, the settings of the run decide."""

    prompt: Prompt | None = None
    prompt_tokens: int | None = None
    """Length of a prompt of random tokens, if the line has no prompt."""
    max_tokens: int | None = None
    time: float = 0.0
    """Seconds since the start of a trace."""


def read_prompts(path: Path) -> list[PromptLine]:
    """Read a file with one JSON object a line: `prompt` (text or token ids) or `messages`, and optionally `max_tokens`.
    Raises ValueError that names the line."""
    lines = [_prompt_line(values, where, ("prompt", "messages", "max_tokens")) for where, values in _json_lines(path)]
    if missing := next((index for index, line in enumerate(lines, 1) if line.prompt is None), 0):
        raise ValueError(f"{path}: entry {missing} has neither prompt nor messages; give one of them")
    return _not_empty(lines, path)


def read_trace(path: Path) -> list[PromptLine]:
    """Read a file with one request a line: CSV with a header if the name ends in .csv, otherwise JSONL. Returns the
    requests in the order of their times."""
    lines = _csv_lines(path) if path.suffix == ".csv" else _json_lines(path)
    requests = [
        _prompt_line(values, where, ("time", "prompt", "messages", "prompt_tokens", "max_tokens"))
        for where, values in lines
    ]
    return sorted(_not_empty(requests, path), key=lambda line: line.time)


def _prompt_line(values: dict[str, Any], where: str, allowed: tuple[str, ...]) -> PromptLine:
    if unknown := values.keys() - set(allowed):
        raise ValueError(f"{where}: {min(unknown)} is not known; allowed: {', '.join(allowed)}")
    time = values.get("time", 0.0 if "time" not in allowed else None)
    if not isinstance(time, (int, float)) or isinstance(time, bool) or not 0 <= time < math.inf:
        raise ValueError(f"{where}: time={time!r}; allowed: seconds since the start, from 0")
    for name in ("prompt_tokens", "max_tokens"):
        value = values.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{where}: {name}={value!r}; allowed: a whole number from 1")
    if sum(values.get(name) is not None for name in ("prompt", "messages", "prompt_tokens")) > 1:
        raise ValueError(f"{where}: gives more than one of prompt, messages and prompt_tokens; give one")
    return PromptLine(_prompt(values, where), values.get("prompt_tokens"), values.get("max_tokens"), float(time))


def _prompt(values: dict[str, Any], where: str) -> Prompt | None:
    prompt, messages = values.get("prompt"), values.get("messages")
    if messages is not None:
        try:
            return [Message(role=str(message["role"]), content=str(message["content"])) for message in messages]
        except (TypeError, KeyError):
            raise ValueError(
                f"{where}: messages={messages!r}; allowed: a list of objects with role and content"
            ) from None
    is_ids = (
        isinstance(prompt, list) and prompt and all(isinstance(token, int) and 0 <= token < 2**31 for token in prompt)
    )
    if prompt is not None and not isinstance(prompt, str) and not is_ids:
        raise ValueError(f"{where}: prompt={prompt!r}; allowed: text, or a list of token ids")
    return prompt


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: {error}; give one JSON object a line") from error
        if not isinstance(values, dict):
            raise ValueError(f"{where}: {line.strip()[:40]!r} is not a JSON object; give one a line")
        yield where, values


def _csv_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows with their positions; empty cells are left out."""
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            where = f"{path}, line {number}"
            if None in row or None in row.values():
                raise ValueError(f"{where} has a different number of cells than the header")
            kinds = {"time": float, "prompt_tokens": int, "max_tokens": int}
            try:
                yield where, {name: kinds.get(name, str)(cell) for name, cell in row.items() if cell}
            except ValueError as error:
                raise ValueError(f"{where}: {error}; time is in seconds, counts are whole numbers") from error


def _not_empty(lines: list[PromptLine], path: Path) -> list[PromptLine]:
    if not lines:
        raise ValueError(f"{path} is empty; give at least one line")
    return lines


ARRIVALS, REQUESTS = 0, 1
"""Streams of random numbers: one for arrival times, one for the contents of requests."""


class Workload:
    """The requests of a run. Reads the files once. Raises ValueError for invalid contents, OSError if they cannot be
    read."""

    def __init__(self, settings: LoadSettings, model: ModelInfo) -> None:
        self._settings, self._model = settings, model
        self._token_ids = np.setdiff1d(np.arange(model.vocab_size), model.eos_token_ids)
        self._trace = read_trace(settings.trace) if settings.trace else None
        if settings.prompts:
            self._lines = read_prompts(settings.prompts)
        elif settings.prompt_length is None:
            self._lines = [
                PromptLine(self._question(p.question)) for p in problems.generate(settings.seed, DEMO_PROBLEMS, "test")
            ]
        else:
            self._lines = [PromptLine()]

    def plan(self) -> Iterator[PlannedRequest]:
        """Yield the requests for the duration of the settings; `requests` counts those after the warm-up."""
        settings = self._settings
        end = np.inf if settings.duration is None else settings.warm_up + settings.duration
        limit = settings.requests
        counted = 0
        for index, (at, line) in enumerate(self._arrivals()):
            if at >= end or (limit is not None and counted >= limit):
                return
            counted += at >= settings.warm_up
            yield self._request(index, at, line)

    def _arrivals(self) -> Iterator[tuple[float, PromptLine]]:
        if self._trace is not None:
            for line in self._trace:
                yield line.time, line
            return
        for at in self._times():
            yield at, PromptLine()

    def _times(self) -> Iterator[float]:
        """Return arrival times if there is no trace. `LoadSettings` has checked that the arguments of each kind of
        arrivals are given."""
        settings, rng = self._settings, np.random.default_rng((self._settings.seed, ARRIVALS))
        rate = settings.rate
        assert rate is not None
        if settings.arrivals == "gamma":
            assert settings.burstiness is not None
            return arrivals.gamma(rate, settings.burstiness, rng)
        if settings.arrivals == "ramp":
            assert settings.rate_end is not None and settings.duration is not None
            return arrivals.ramp(rate, settings.rate_end, settings.warm_up, settings.duration, rng)
        return arrivals.constant(rate) if settings.arrivals == "constant" else arrivals.poisson(rate, rng)

    def _request(self, index: int, at: float, line: PromptLine) -> PlannedRequest:
        settings = self._settings
        rng = np.random.default_rng((settings.seed, REQUESTS, index))
        # Every number is drawn, even if it is not used, so that an option changes only what it is about.
        seed, method = int(rng.integers(2**63)), settings.method.draw(rng)
        particles = settings.particles.draw(rng) if settings.particles else None
        kind, drawn_tokens = rng.random(), settings.output_length.draw(rng)
        prompt, max_tokens = self._prompt(index, line, rng)
        max_tokens = max_tokens or drawn_tokens
        sampling = {"method": method, "seed": seed, "max_tokens": max_tokens, "ignore_eos": settings.ignore_eos or None}
        if particles is not None and method in WITH_PARTICLES:
            sampling["particles"] = int(particles)
        cancelled = kind < settings.cancel_share
        abort = settings.cancel_by is not None and settings.cancel_by.draw(rng) == "abort"
        slow = not cancelled and kind < settings.cancel_share + settings.slow_share
        pause = settings.slow_pause if slow else 0.0
        assert pause is not None, "a share of slow readers comes with their pause"
        return PlannedRequest(
            index=index,
            at=at,
            counted=at >= settings.warm_up,
            prompt=prompt,
            sampling=sampling,
            cancel_after=settings.cancel_after if cancelled else None,
            cancel_after_tokens=settings.cancel_after_tokens if cancelled else None,
            abort=cancelled and abort,
            pause=pause,
        )

    def _prompt(self, index: int, line: PromptLine, rng: np.random.Generator) -> tuple[Prompt, int | None]:
        """Return the prompt, and `max_tokens` if the line has it."""
        if line.prompt is None and line.prompt_tokens is None:
            own = line
            line = self._lines[index % len(self._lines)]
            max_tokens = own.max_tokens or line.max_tokens
        else:
            max_tokens = line.max_tokens
        if line.prompt is not None:
            return line.prompt, max_tokens
        length = line.prompt_tokens
        if not length:
            assert self._settings.prompt_length is not None, "otherwise every line has a prompt"
            length = self._settings.prompt_length.draw(rng)
        return rng.choice(self._token_ids, size=min(length, self._model.max_context - 1)).tolist(), max_tokens

    def _question(self, text: str) -> Prompt:
        return [Message("user", text)] if self._model.has_chat_template else text
