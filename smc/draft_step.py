"""Times a step of a draft, before any weights are loaded: an engine is made in which the draft, with random weights, is
both models. Knows nothing about what follows from the times."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from smc.api.engine_config import EngineConfig
from smc.calibration.latency import Effort
from smc.local_engine import ModelPair, local_engine
from smc.memory.kv_cache import pool_for
from smc.model.config import ModelConfig
from smc.model.linear import DTYPES
from smc.model.loader import random_model
from smc.model.parallel import WHOLE, Reduce, Shard
from smc.model.presets import NoText
from smc.scheduler.engine import Engine
from smc.types import Numerics

ROWS = 8
"""Rows of the step that is timed."""
EFFORT = Effort(seconds=5.0, factor=8, repeats=3, untimed=3, crowd=1, context=64)
BLOCK, PAGES_PER_ROW, MOST_CONTEXT = 5, 512, 4096
Found = TypeVar("Found")


def with_step_engine(
    config: ModelConfig,
    device: torch.device,
    dtype: str,
    measure: Callable[[Engine], Found],
    shard: Shard = WHOLE,
    reduce: Reduce | None = None,
    numerics: Numerics = Numerics.FASTEST,
) -> Found:
    """Return what `measure` returns for the engine; free its memory. `shard` and `reduce`: a rank's part of the draft,
    and the sum over its ranks. Raises torch.OutOfMemoryError if there is no memory for it."""
    try:
        model = random_model(config, dtype=DTYPES[dtype], device=device, shard=shard, reduce=reduce)
        pair = ModelPair(model, model, NoText(config.vocab_size), min(config.max_context, MOST_CONTEXT))
        settings = EngineConfig(
            form="lockstep",
            block=BLOCK,
            max_slots=ROWS,
            pages=pool_for(ROWS * PAGES_PER_ROW),
            drafting="always",
            numerics=numerics,
        )
        return measure(local_engine(pair, settings))
    finally:
        pair = model = None  # type: ignore[assignment]
        free_memory(device)


def free_memory(device: torch.device) -> None:
    """Give back the memory of an engine that nothing refers to any more. After an error its traceback does, so call it
    once more when the error has been handled."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
