"""An engine whose workers live in this process. Loads a model pair once; engines of different settings can share it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from smc.engine.config import EngineConfig
from smc.engine.engine import Engine
from smc.engine.messages import SIDES
from smc.engine.worker import ModelWorker
from smc.models.check import require_pair
from smc.models.decoder import Decoder
from smc.models.loader import load_model
from smc.models.tokenizer import Tokenizer
from smc.resident.pair import LocalPair
from smc.resident.sides import Parts


@dataclass(frozen=True)
class ModelPair:
    """Weights of a draft and a target that share one vocabulary."""

    target: Decoder
    draft: Decoder
    tokenizer: Tokenizer
    max_context: int
    """The shorter of both contexts, in tokens."""

    @staticmethod
    def load(target_dir: str | Path, draft_dir: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> ModelPair:
        """Raises ValueError, before reading weights, if the two directories cannot serve as a pair."""
        report = require_pair(target_dir, draft_dir)
        return ModelPair(
            target=load_model(target_dir, dtype=dtype, device=device),
            draft=load_model(draft_dir, dtype=dtype, device=device),
            tokenizer=Tokenizer.load(target_dir),
            max_context=report.max_context,
        )


def local_engine(pair: ModelPair, config: EngineConfig | None = None, **engine_options) -> Engine:
    """An engine over `pair`; `engine_options` are passed on to Engine."""
    config = config or EngineConfig()
    context = config.context(pair.max_context)
    pages = config.pool_pages(context)
    workers = {
        side: ModelWorker(
            side,
            getattr(pair, side),
            rows=config.max_slots,
            width=config.width(context),
            pages=pages,
            vocab_size=pair.tokenizer.size,
        )
        for side in SIDES
    }
    rounds = LocalPair(config, workers, parts_for(workers["target"].device))
    return Engine(config, workers, pair.tokenizer, pair=rounds, pages=dict.fromkeys(SIDES, pages), context=context, **engine_options)


def parts_for(device: torch.device) -> Parts:
    """What rounds are made of on a device: kernels, or the reference on a CPU."""
    if device.type == "cpu":
        return Parts()
    from smc.resident.kernels import gpu_parts  # needs triton

    return gpu_parts()
