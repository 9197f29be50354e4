"""Requests of all kinds, at random."""

from __future__ import annotations

import random
from typing import Any

from smc.engine.request import Request
from smc.engine.sampling_params import SamplingParams
from smc.engine.warm_up import BIASED, RARE

COMMON: tuple[dict[str, Any], ...] = (
    {},
    {"method": "exact"},
    {"method": "target"},
    {"top_p": 0.9},
    {"method": "exact", "top_k": 9},
    {"temperature": 0.5, "min_p": 0.1},
)


def some_request(draw: random.Random, number: int, vocab: int) -> Request:
    biased = [kind | {"logit_bias": dict.fromkeys(range(draw.choice((1, 30, 300))), 1.0)} for kind in BIASED]
    kind = dict(draw.choice([*COMMON, *RARE, *biased]))
    size = draw.choice((5, 60, 700))
    params = SamplingParams(seed=number, max_tokens=draw.randint(1, 60), **kind)
    if params.particles:
        most = 4 if params.verification == "rejection" else 8
        params = SamplingParams(seed=number, max_tokens=params.max_tokens, particles=draw.randint(1, most), **kind)
    prompt, negative = (tuple(draw.randrange(vocab) for _ in range(length)) for length in (size, 9))
    return Request(str(number), prompt, params, negative_prompt=negative if params.guided else None)
