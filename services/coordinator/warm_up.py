"""What a gang runs before it serves anybody."""

from __future__ import annotations

from collections.abc import Iterator

from smc.engine.admission import pages_needed
from smc.engine.config import EngineConfig
from smc.engine.request import Method, Request, SamplingParams
from smc.resident.plan import SHORT

TURNS = 3
"""Rounds of each kind: the first compiles its kernels, the second is recorded, the third replayed."""


def first_rounds(config: EngineConfig, context: int, vocab: int) -> list[Request]:
    """One short request through both models."""
    tokens = min(2 * config.block + 2, context - 4)
    return [_request(0, 4, vocab, particles=min(2, config.max_slots), max_tokens=tokens)]


def usual_rounds(config: EngineConfig, context: int, vocab: int, pages: dict[str, int]) -> Iterator[list[Request]]:
    """Requests side by side, as many as there is room for, whose rounds are of the kinds that requests of default settings ask for: so
    many groups, short contexts and long ones, SMC-SD and the target alone. `pages`: of each pool."""
    tokens, particles = TURNS * (config.block + 1) + 1, min(8, config.max_slots)
    methods = ({"particles": particles}, {"method": Method.TARGET})
    for prompt in (4, SHORT):
        for settings in methods if prompt + tokens <= context else ():
            count = 1
            while True:
                asked = [_request(i, prompt, vocab, max_tokens=tokens, **settings) for i in range(count)]
                needed = [pages_needed(request, config) for request in asked]
                full = any(sum(each.get(side, 0) for each in needed) > room for side, room in pages.items())
                if full or sum(request.params.rows for request in asked) > config.max_slots:
                    break
                yield asked
                count *= 2


def _request(number: int, prompt: int, vocab: int, **params: object) -> Request:
    tokens = tuple((number + i) % vocab for i in range(prompt))
    return Request(f"warm-up {number}", tokens, SamplingParams(seed=number, ignore_eos=True, **params))
