"""Random requests of all kinds: every method and verification, with random settings; and random sizes of rounds."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from smc.api.engine_config import EngineConfig
from smc.api.request import Request
from smc.api.sampling_params import SamplingParams
from smc.scheduler.planner import NODE_SHARES, DraftSize
from smc.scheduler.tree_policy import LatencyTreePolicy, TreeRequest

Settings = dict[str, Any]

WAYS: tuple[Settings, ...] = (
    {"method": "smc", "population": "distinct"},
    {"method": "smc", "population": "independent"},
    {"method": "exact"},
    {"method": "exact", "verification": "rejection"},
    {"method": "target"},
    {"method": "draft"},
)
TRUNCATED: tuple[Settings, ...] = (
    {},
    {},
    {"top_p": 0.9},
    {"top_k": 9},
    {"temperature": 0.5, "min_p": 0.1},
    {"top_k": 40, "top_p": 0.9},
)
BIASES = (1, 30, 300)
"""Possible numbers of tokens with a logit bias."""
CHAINS = 4
"""Maximum number of chains of a request with `verification=rejection`."""


def some_request(draw: random.Random, number: int, vocab: int, rows: int = 8) -> Request:
    """A random request with at most `rows` rows (rejection: at most `CHAINS`) and at most 60 answer tokens."""
    way, tokens = draw.choice(WAYS), draw.randint(1, 60)
    given = way | draw.choice(TRUNCATED) | _more(draw, way["method"], tokens) | {"seed": number, "max_tokens": tokens}
    params = SamplingParams(**given)
    if params.particles:
        most = min(CHAINS, rows) if params.verification == "rejection" else rows
        params = SamplingParams(**given, particles=draw.randint(1, most))
    prompt, negative = (
        tuple(draw.randrange(vocab) for _ in range(length)) for length in (draw.choice((5, 60, 700)), 9)
    )
    return Request(str(number), prompt, params, negative_prompt=negative if params.guided else None)


def _more(draw: random.Random, method: str, tokens: int) -> Settings:
    """Rarely used settings, each with a small probability; each works with any truncation."""
    given: Settings = {}
    if method == "smc" and draw.random() < 0.3:
        given["alpha"] = 2.0
    if method != "draft" and draw.random() < 0.3:
        given["guidance_scale"] = 1.5
    if draw.random() < 0.25:
        given["logit_bias"] = dict.fromkeys(range(draw.choice(BIASES)), 1.0)
    if draw.random() < 0.15:
        given["min_tokens"] = draw.randint(1, tokens)
    if method != "draft" and draw.random() < 0.15:
        given |= {"logprobs": True, "top_logprobs": draw.randint(0, 5)}
    elif draw.random() < 0.15:
        given |= {"repetition_penalty": 1.3, "presence_penalty": 0.5}
    return given


class AnySize(LatencyTreePolicy):
    """Drafts any size that the latency model might choose."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._config, self._draw = config, random.Random(0)

    def draft_size(self, trees: Iterable[TreeRequest], batch_size: int, *_given: object) -> DraftSize:
        config, (steps, branches, redrafted) = self._config, self._draw.choice(self._config.draft_sizes)
        tokens = batch_size * config.scored(steps)
        nodes = int(self._draw.choice((0.0, *NODE_SHARES)) * tokens) if batch_size > len(list(trees)) else 0
        return DraftSize(branches, None if steps == config.block else steps, nodes, redrafted)
