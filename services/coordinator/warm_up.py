"""What a gang runs before it serves anybody."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from smc.engine.admission import pages_needed
from smc.engine.config import EngineConfig
from smc.engine.request import Method, Request, SamplingParams
from smc.resident.plan import SHORT

TURNS = 3
"""Rounds of each kind: the first compiles its kernels, the second is recorded, the third replayed."""
TRUNCATION = {"top_k": 20, "top_p": 0.95, "min_p": 0.02}
"""Processors; every set of them has kernels of its own."""


def first_rounds(config: EngineConfig, context: int, vocab: int) -> list[Request]:
    """One short request through both models."""
    tokens = min(2 * config.block + 2, context - 4)
    return [_request(0, 4, vocab, particles=min(2, config.max_slots), max_tokens=tokens)]


def usual_rounds(config: EngineConfig, context: int, vocab: int, pages: dict[str, int]) -> Iterator[list[Request]]:
    """Requests side by side whose rounds are of the kinds that requests of usual settings ask for: SMC-SD and the target alone, in short
    contexts and long ones, of every number of groups that rounds are padded to. Of every kind of truncated law one request, which has its
    kernels compiled; what is left then, to record rounds of more groups, takes little. `pages`: of each pool."""
    tokens, particles = TURNS * (config.block + 1) + 1, min(8, config.max_slots)
    longest = min(SHORT, context - tokens)
    prompts = [4] if longest >= 4 else []
    if longest + tokens + config.block > SHORT:
        prompts.append(longest)
    smc, plain = {"particles": particles}, {"method": Method.TARGET}

    def side_by_side(prompt: int, settings: dict[str, object], most: int) -> Iterator[list[Request]]:
        one = _request(0, prompt, vocab, max_tokens=tokens, **settings)
        needed = pages_needed(one, config)
        fit = min(config.max_slots // one.params.rows, *(pages[side] // count for side, count in needed.items()))
        for count in _counts(min(fit, most)):
            yield [_request(number, prompt, vocab, max_tokens=tokens, **settings) for number in range(count)]

    for prompt in prompts:
        for settings in (smc, plain):
            yield from side_by_side(prompt, settings, config.max_slots)
    truncated = [{**smc, **law} for law in _truncated()] + [{**plain, **TRUNCATION}]
    for settings in truncated if prompts else []:
        yield from side_by_side(prompts[0], settings, 1)


def _truncated() -> list[dict[str, float]]:
    """A law of every set of processors."""
    sets = (names for size in range(1, len(TRUNCATION) + 1) for names in combinations(TRUNCATION, size))
    return [{name: TRUNCATION[name] for name in names} for names in sets]


def _counts(most: int) -> list[int]:
    """Powers of two up to `most`, and `most`, which is padded to the next."""
    return sorted({1 << i for i in range(most.bit_length())} | {most}) if most else []


def _request(number: int, prompt: int, vocab: int, **params: object) -> Request:
    tokens = tuple((number + i) % vocab for i in range(prompt))
    return Request(f"warm-up {number}", tokens, SamplingParams(seed=number, ignore_eos=True, **params))
