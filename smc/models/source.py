"""Where a model comes from: files of a directory, or random weights of a published shape. Says what it is before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from smc.models.check import require_pair
from smc.models.config import ModelConfig
from smc.models.decoder import Decoder
from smc.models.loader import load_model
from smc.models.parallel import WHOLE, Reduce, Shard
from smc.models.presets import NoText, count_parameters, preset, random_model
from smc.models.tokenizer import Tokenizer

LOADS = ("files", "random")


@dataclass(frozen=True)
class Source:
    """One model; small, and can be sent to whoever loads it."""

    place: Path
    """Directory; with `random` the name of a shape."""
    random: bool
    config: ModelConfig
    parameters: int
    """Number of weights; a tied matrix counts once."""

    @property
    def name(self) -> str:
        return self.place.name

    def load(self, *, dtype: torch.dtype, device: torch.device | str, shard: Shard = WHOLE, reduce: Reduce | None = None) -> Decoder:
        """The model, or one rank's share of it, on a device."""
        if self.random:
            return random_model(self.config, dtype=dtype, device=device, shard=shard, reduce=reduce)
        return load_model(self.place, dtype=dtype, device=device, shard=shard, reduce=reduce)

    def tokenizer(self) -> Tokenizer | NoText:
        return NoText(self.config.vocab_size) if self.random else Tokenizer.load(self.place)


@dataclass(frozen=True)
class SourcePair:
    """A target and a draft that go together."""

    target: Source
    draft: Source
    max_context: int
    """The shorter of both contexts, in tokens."""

    @staticmethod
    def of(load: str, target: Path, draft: Path) -> SourcePair:
        """Raises ValueError if they cannot serve as a pair; nothing is loaded."""
        if load not in LOADS:
            raise ValueError(f"load={load!r}; allowed: {', '.join(LOADS)}")
        if load == "files":
            report = require_pair(target, draft)
            sources = [Source(place, False, one.config, one.parameters) for place, one in ((target, report.target), (draft, report.draft))]
            return SourcePair(*sources, max_context=report.max_context)
        shapes = [preset(str(name)) for name in (target, draft)]
        if shapes[0].vocab_size != shapes[1].vocab_size:
            raise ValueError(f"vocabularies of {shapes[0].vocab_size} and {shapes[1].vocab_size} tokens; a pair shares one")
        sources = [Source(Path(name), True, shape, count_parameters(shape)) for name, shape in zip((target, draft), shapes)]
        return SourcePair(*sources, max_context=min(shape.max_context for shape in shapes))

    def of_side(self, side: str) -> Source:
        return self.draft if side == "draft" else self.target
