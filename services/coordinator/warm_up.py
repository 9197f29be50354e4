"""What a gang runs before it serves anybody: a request through both models, and rounds of nobody of all usual kinds."""

from __future__ import annotations

from smc.engine.request import Request, SamplingParams
from smc.runtime.config import EngineConfig


def first_request(config: EngineConfig, context: int, vocab: int) -> Request:
    """A short one."""
    tokens = min(2 * config.block + 2, context - 4)
    params = SamplingParams(seed=0, ignore_eos=True, particles=min(2, config.max_slots), max_tokens=tokens)
    return Request("warm-up", tuple(i % vocab for i in range(4)), params)
