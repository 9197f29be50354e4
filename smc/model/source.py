"""Where a model comes from: files of a directory, random weights of a published shape, or a small model grown into such
a shape.

Says what it is before it is loaded, and imports torch only then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smc.model.check import require_pair
from smc.model.config import ModelConfig
from smc.model.draft_vocab import DraftVocab
from smc.model.fingerprint import fingerprint
from smc.model.parallel import WHOLE, Reduce, Shard
from smc.model.presets import NoText, preset
from smc.model.tokenizer import Tokenizer
from smc.model.weight_map import count_parameters
from smc.types import ModelRole

if TYPE_CHECKING:
    import torch

    from smc.model.decoder import Decoder

LOADS = ("files", "random", "grown")


def pair_dtypes(dtype: str, target: str | None, draft: str | None) -> dict[str, str]:
    """Side -> the type its model has, of `smc.model.linear.DTYPES`: its own, or that of both."""
    return {ModelRole.TARGET: target or dtype, ModelRole.DRAFT: draft or dtype}


def name_dtypes(dtypes: dict[str, str]) -> str:
    """In one word, if they are the same."""
    target, draft = dtypes[ModelRole.TARGET], dtypes[ModelRole.DRAFT]
    return target if target == draft else f"{target} <- {draft}"


@dataclass(frozen=True)
class Source:
    """One model; small, and can be sent to whoever loads it."""

    kind: str
    """One of `LOADS`."""
    place: Path
    """Directory; with `random` and `grown` the name of a shape."""
    config: ModelConfig
    parameters: int
    """Number of weights; a tied matrix counts once."""
    small: Path | None = None
    """Directory of the model that is grown; must exist on every host, under the same path."""

    @property
    def _small(self) -> Path:
        """Of a grown model."""
        assert self.small is not None
        return self.small

    @property
    def name(self) -> str:
        return self.place.name

    def load(
        self, *, dtype: torch.dtype, device: torch.device | str, shard: Shard = WHOLE, reduce: Reduce | None = None
    ) -> Decoder:
        """The model, or one rank's share of it, on a device."""
        from smc.model.loader import load_model

        where: dict[str, Any] = {"dtype": dtype, "device": device, "shard": shard, "reduce": reduce}
        if self.kind == "random":
            from smc.model.random_model import random_model

            return random_model(self.config, **where)
        if self.kind == "grown":
            from smc.model.padded import grown_model

            return grown_model(load_model(self._small), preset(str(self.place)), **where)
        return load_model(self.place, **where)

    @property
    def tokenizer_files(self) -> Path | None:
        """Directory of the tokenizer's files; None: it has none."""
        return {"files": self.place, "grown": self.small}.get(self.kind)

    def fingerprint(self) -> str:
        """`smc.model.fingerprint` of its weights; of random ones that they are, of grown ones that of the small
        model."""
        if self.kind == "random":
            return self.kind
        return fingerprint(self._small if self.kind == "grown" else self.place)

    def tokenizer(self) -> Tokenizer:
        if self.kind == "random":
            return NoText(self.config.vocab_size)
        if self.kind == "files":
            return Tokenizer.load(self.place)
        from smc.model.padded import grown_tokenizer

        return grown_tokenizer(self._small, self.config)


@dataclass(frozen=True)
class SourcePair:
    """A target and a draft that go together."""

    target: Source
    draft: Source
    max_context: int
    """The shorter of both contexts, in tokens."""
    draft_vocab: DraftVocab | None = None
    """What the draft proposes, if not every token by its own likelihood."""

    def with_draft_vocab(self, size: int | None, text: Path | None) -> SourcePair:
        """`DraftVocab.of`, with the pair's tokenizer; None: as it is. Raises ValueError for a text without a size,
        too."""
        if size is None:
            if text is not None:
                raise ValueError(f"draft_vocab_text={str(text)!r} has no effect without draft_vocab; leave it out")
            return self
        return replace(self, draft_vocab=DraftVocab.of(size, text, self.target.tokenizer()))

    @staticmethod
    def of(load: str, target: Path, draft: Path, small: tuple[Path, Path] | None = None) -> SourcePair:
        """Raises ValueError if they cannot serve as a pair; nothing is loaded. `small`: for grown, directories of
        target and draft."""
        if load not in LOADS:
            raise ValueError(f"load={load!r}; allowed: {', '.join(LOADS)}")
        if load == "files":
            report = require_pair(target, draft)
            assert report.target is not None and report.draft is not None, "no problem was found"
            return SourcePair(
                Source(load, target, report.target.config, report.target.parameters),
                Source(load, draft, report.draft.config, report.draft.parameters),
                max_context=report.max_context,
            )
        shapes = [preset(str(name)) for name in (target, draft)]
        if shapes[0].vocab_size != shapes[1].vocab_size:
            raise ValueError(
                f"vocabularies of {shapes[0].vocab_size} and {shapes[1].vocab_size} tokens; a pair shares one"
            )
        places: tuple[Path | None, Path | None] = (None, None)
        if load == "grown":
            assert small is not None, "what is to be grown?"
            places, report = small, require_pair(*small)
            assert report.target is not None and report.draft is not None, "no problem was found"
            shapes = [
                _grown(name, one.config, shape)
                for name, one, shape in zip((target, draft), (report.target, report.draft), shapes)
            ]
        its_target, its_draft = (
            Source(load, Path(name), config, count_parameters(config), place)
            for name, config, place in zip((target, draft), shapes, places)
        )
        return SourcePair(its_target, its_draft, max_context=min(config.max_context for config in shapes))

    def of_role(self, role: ModelRole) -> Source:
        return self.draft if role == ModelRole.DRAFT else self.target


def _grown(name: Path, small: ModelConfig, shape: ModelConfig) -> ModelConfig:
    from smc.model.padded import grown_config

    try:
        return grown_config(small, shape)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
