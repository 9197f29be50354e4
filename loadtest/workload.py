"""The plan of a run: every request, in the order of its time, drawn from the run's seed. Knows nothing about how
requests are sent.

What a request asks depends on the seed and its number alone, so that two runs at different rates ask the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from loadtest import arrivals, files
from loadtest.files import Asked
from loadtest.record import Planned
from loadtest.settings import WITH_PARTICLES, Settings
from services.client import Message, ModelInfo, Prompt
from smc.demo import problems

DEMO_PROBLEMS = 256
"""Different questions; then they come again."""
ARRIVALS, REQUESTS = 0, 1
"""What a stream of random numbers is for."""


class Workload:
    """Reads the files once. Raises ValueError for what is in them, OSError if they cannot be read."""

    def __init__(self, settings: Settings, model: ModelInfo) -> None:
        self._settings, self._model = settings, model
        self._token_ids = np.setdiff1d(np.arange(model.vocab_size), model.eos_token_ids)
        self._trace = files.read_trace(settings.trace) if settings.trace else None
        if settings.prompts:
            self._asked = files.read_prompts(settings.prompts)
        elif settings.prompt_length is None:
            self._asked = [
                Asked(self._question(p.question)) for p in problems.generate(settings.seed, DEMO_PROBLEMS, "test")
            ]
        else:
            self._asked = [Asked()]

    def plan(self) -> Iterator[Planned]:
        """As long as the settings say; `requests` counts those after the warm-up."""
        settings = self._settings
        end = np.inf if settings.duration is None else settings.warm_up + settings.duration
        limit = settings.requests
        counted = 0
        for index, (at, asked) in enumerate(self._arrivals()):
            if at >= end or (limit is not None and counted >= limit):
                return
            counted += at >= settings.warm_up
            yield self._request(index, at, asked)

    def _arrivals(self) -> Iterator[tuple[float, Asked]]:
        if self._trace is not None:
            for line in self._trace:
                yield line.time, line
            return
        for at in self._times():
            yield at, Asked()

    def _times(self) -> Iterator[float]:
        """Without a trace. What each kind of arrivals needs, `Settings` has asked for."""
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

    def _request(self, index: int, at: float, asked: Asked) -> Planned:
        settings = self._settings
        rng = np.random.default_rng((settings.seed, REQUESTS, index))
        # Everything is drawn, whether it is used or not: an option changes nothing but what it is about.
        seed, method = int(rng.integers(2**63)), settings.method.draw(rng)
        particles = settings.particles.draw(rng) if settings.particles else None
        kind, drawn_tokens = rng.random(), settings.output_length.draw(rng)
        prompt, max_tokens = self._prompt(index, asked, rng)
        max_tokens = max_tokens or drawn_tokens
        sampling = {"method": method, "seed": seed, "max_tokens": max_tokens, "ignore_eos": settings.ignore_eos or None}
        if particles is not None and method in WITH_PARTICLES:
            sampling["particles"] = int(particles)
        cancelled = kind < settings.cancel_share
        abort = settings.cancel_by is not None and settings.cancel_by.draw(rng) == "abort"
        slow = not cancelled and kind < settings.cancel_share + settings.slow_share
        pause = settings.slow_pause if slow else 0.0
        assert pause is not None, "a share of slow readers comes with their pause"
        return Planned(
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

    def _prompt(self, index: int, asked: Asked, rng: np.random.Generator) -> tuple[Prompt, int | None]:
        """And the longest answer, if the line that the prompt is from says so."""
        if asked.prompt is None and asked.prompt_tokens is None:
            own = asked
            asked = self._asked[index % len(self._asked)]
            max_tokens = own.max_tokens or asked.max_tokens
        else:
            max_tokens = asked.max_tokens
        if asked.prompt is not None:
            return asked.prompt, max_tokens
        length = asked.prompt_tokens
        if not length:
            assert self._settings.prompt_length is not None, "what is asked has a prompt otherwise"
            length = self._settings.prompt_length.draw(rng)
        return rng.choice(self._token_ids, size=min(length, self._model.max_context - 1)).tolist(), max_tokens

    def _question(self, text: str) -> Prompt:
        return [Message("user", text)] if self._model.has_chat_template else text
