"""Sources of models: files of a directory, random weights of a published shape, or a small model padded to such a
shape.

A source knows a model's configuration before the model is loaded. Torch is imported only for loading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smc.model.check import require_pair
from smc.model.config import ModelConfig, default_dtype
from smc.model.draft_vocab import DraftVocab
from smc.model.fingerprint import fingerprint
from smc.model.hub import HubModel
from smc.model.parallel import WHOLE, Reduce, Shard
from smc.model.presets import NoText, preset
from smc.model.tokenizer import Tokenizer
from smc.model.weight_map import count_parameters
from smc.types import ModelRole

if TYPE_CHECKING:
    import torch

    from smc.model.decoder import Decoder

LOADS = ("files", "random", "grown")
"""Kinds of sources, as the option `--load` names them. `grown` is a padded model (`smc.model.padded`)."""


def pair_dtypes(
    dtype: str | None, target: str | None, draft: str | None, device: str, directories: tuple[Path, Path]
) -> dict[str, str]:
    """Model role -> name of its type in `smc.model.linear.DTYPES`: `target` or `draft` if given, otherwise `dtype` if
    given, otherwise `default_dtype`. A draft's `auto` stays, until it is loaded (`smc.draft_dtype`)."""
    of_target, of_draft = (dtype or default_dtype(each, device) for each in directories)
    return {ModelRole.TARGET: target or of_target, ModelRole.DRAFT: draft or of_draft}


def name_dtypes(dtypes: dict[str, str]) -> str:
    """Both types as text: one name if they are equal, otherwise `TARGET <- DRAFT`."""
    target, draft = dtypes[ModelRole.TARGET], dtypes[ModelRole.DRAFT]
    return target if target == draft else f"{target} <- {draft}"


@dataclass(frozen=True)
class ModelSource:
    """Description of one model that a worker can load. Contains no weights."""

    kind: str
    """One of `LOADS`."""
    location: Path
    """Directory of the model; with `random` and `grown`, the name of a shape."""
    config: ModelConfig
    parameters: int
    """Number of weights; a tied matrix counts once."""
    small: Path | None = None
    """With `grown`, the directory of the small model. Must exist under the same path on every host."""
    hub: HubModel | None = None
    """The model that `location` is a snapshot of. A host where there is no such directory downloads the same commit."""

    @property
    def _small(self) -> Path:
        """Directory of the small model that is padded."""
        assert self.small is not None
        return self.small

    @property
    def name(self) -> str:
        if self.hub:
            return self.hub.repository.split("/")[-1]
        return self.location.name if self.kind == "files" else str(self.location)

    @property
    def directory(self) -> Path:
        """Directory of the model on this host."""
        return self.hub.download() if self.hub and not self.location.is_dir() else self.location

    def load(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        shard: Shard = WHOLE,
        reduce: Reduce | None = None,
        beside: Decoder | None = None,
        progress: Callable[[float], None] = lambda share: None,
    ) -> Decoder:
        """Load the model, or one rank's shard of it, onto a device. `beside`, `progress`: as of `load_model`; of files
        only."""
        from smc.model.loader import load_model

        where: dict[str, Any] = {"dtype": dtype, "device": device, "shard": shard, "reduce": reduce}
        if self.kind == "random":
            from smc.model.random_model import random_model

            return random_model(self.config, **where)
        if self.kind == "grown":
            from smc.model.padded import padded_model

            return padded_model(load_model(self._small), preset(str(self.location)), **where)
        return load_model(self.directory, **where, beside=beside, progress=progress)

    @property
    def tokenizer_files(self) -> Path | None:
        """Directory of the tokenizer's files; None for random weights."""
        return {"files": self.directory, "grown": self.small}.get(self.kind)

    def fingerprint(self) -> str:
        """Fingerprint of the weights (`smc.model.fingerprint`). Padded models have that of the small model, random
        models the word `random`."""
        if self.kind == "random":
            return self.kind
        return fingerprint(self._small if self.kind == "grown" else self.directory)

    def tokenizer(self) -> Tokenizer:
        if self.kind == "random":
            return NoText(self.config.vocab_size)
        if self.kind == "files":
            return Tokenizer.load(self.directory)
        from smc.model.padded import padded_tokenizer

        return padded_tokenizer(self._small, self.config)


@dataclass(frozen=True)
class SourcePair:
    """A target and a draft with the same vocabulary."""

    target: ModelSource
    draft: ModelSource
    max_context: int
    """The shorter maximum context of the two, in tokens."""
    draft_vocab: DraftVocab | None = None
    """Reduced vocabulary of the draft; None if its head covers the full vocabulary."""

    def with_draft_vocab(self, size: int | None, text: Path | None) -> SourcePair:
        """Add the reduced vocabulary `DraftVocab.of`; unchanged if `size` is None. Raises ValueError as that does, and
        for a text without a size."""
        if size is None:
            if text is not None:
                raise ValueError(f"draft_vocab_text={str(text)!r} has no effect without draft_vocab; leave it out")
            return self
        draft = self.draft.directory if self.draft.kind == "files" else None
        return replace(self, draft_vocab=DraftVocab.of(size, text, self.target.tokenizer(), draft))

    @staticmethod
    def of(load: str, target: Path, draft: Path, small: tuple[Path, Path] | None = None) -> SourcePair:
        """Describe a pair without loading it. `target` and `draft` are directories, or names of shapes unless `load` is
        `files`. `small`: for `grown`, the directories of both small models. Raises ValueError if the two cannot serve
        as a pair."""
        if load not in LOADS:
            raise ValueError(f"load={load!r}; allowed: {', '.join(LOADS)}")
        if load == "files":
            report = require_pair(target, draft)
            assert report.target is not None and report.draft is not None, "no problem was found"
            of_target, of_draft = (
                ModelSource(load, directory, each.config, each.parameters, hub=HubModel.of_snapshot(directory))
                for directory, each in ((target, report.target), (draft, report.draft))
            )
            return SourcePair(of_target, of_draft, max_context=report.max_context)
        shapes = [preset(str(name)) for name in (target, draft)]
        if shapes[0].vocab_size != shapes[1].vocab_size:
            raise ValueError(
                f"vocabularies of {shapes[0].vocab_size} and {shapes[1].vocab_size} tokens; a pair shares one"
            )
        directories: tuple[Path | None, Path | None] = (None, None)
        if load == "grown":
            assert small is not None, "load=grown needs the small models"
            directories, report = small, require_pair(*small)
            assert report.target is not None and report.draft is not None, "no problem was found"
            shapes = [
                _padded_config(name, one.config, shape)
                for name, one, shape in zip((target, draft), (report.target, report.draft), shapes)
            ]
        target_source, draft_source = (
            ModelSource(load, Path(name), config, count_parameters(config), directory)
            for name, config, directory in zip((target, draft), shapes, directories)
        )
        return SourcePair(target_source, draft_source, max_context=min(config.max_context for config in shapes))

    def of_role(self, role: ModelRole) -> ModelSource:
        return self.draft if role == ModelRole.DRAFT else self.target


def _padded_config(name: Path, small: ModelConfig, shape: ModelConfig) -> ModelConfig:
    from smc.model.padded import padded_config

    try:
        return padded_config(small, shape)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
