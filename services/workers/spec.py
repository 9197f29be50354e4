"""Start parameters of a rank: the models that it holds a part of, and its place among the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.link.connect import Rendezvous
from smc.api.engine_config import EngineConfig
from smc.calibration.warm_up import UsualSampling
from smc.model.draft_vocab import DraftVocab
from smc.model.parallel import Shard
from smc.model.source import ModelSource
from smc.types import ModelRole


@dataclass(frozen=True)
class ModelSpec:
    """How a rank loads one model."""

    source: ModelSource
    shard: Shard
    """The rank's part of the model."""
    dtype: str
    """Name of the data type; for a draft also `auto`."""
    draft_vocab: DraftVocab | None
    """For a draft that proposes only some tokens by its own likelihood: those tokens. Otherwise None."""
    or_shard: Shard | None = None
    """Another part of a draft, which the rank loads instead if a step with it is faster; None: there is no choice."""


@dataclass(frozen=True)
class RankSpec:
    """A rank's start parameters."""

    rendezvous: Rendezvous
    name: str
    """Of the ranks that belong together: `draft` or `target`, or `shared` if they hold both models."""
    place: Shard
    """The rank among these."""
    models: dict[ModelRole, ModelSpec]
    vocabulary: ModelSource
    """Source of the target model; its tokenizer serves both models."""
    device: str
    """`cpu` or `cuda`: the one GPU that this process sees."""
    context: int
    """Tokens of the longest sequence."""
    shares_gpu: bool
    """A rank of the other model, in another process, is on the same GPU."""
    vocab_size: int
    timeout: float
    """Seconds to wait for a command; the coordinator's heartbeats are more frequent."""
    threads: int
    engine: EngineConfig
    sampling: UsualSampling
    outlives_peer: bool
    """Whether this rank goes on when the other model is lost."""

    @property
    def leads(self) -> bool:
        return self.place.rank == 0

    @property
    def between(self) -> torch.device | None:
        """Device of the tensors between the leaders: a GPU (NCCL) if they are on different GPUs, else the CPU. None: no
        other leader has a model."""
        if len(self.models) > 1:
            return None
        return torch.device("cpu" if self.shares_gpu else self.device)
