"""Sources of models: files of a directory or of the Hugging Face hub, random weights of a published shape, or a small
model padded to such a shape.

A source knows a model's configuration before the model is loaded. Torch is imported only for loading.

On the hub, models have the names `ORG/NAME` or `ORG/NAME@REVISION`. The library huggingface_hub downloads them, resumes
broken downloads and manages the cache, access tokens and offline mode. Its environment variables apply: HF_HOME,
HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and others. Only the files that are needed are downloaded: configuration,
tokenizer, and weights in safetensors format."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smc.api.limits import LOADS
from smc.model.check import PairReport, require_pair
from smc.model.config import ModelConfig, default_dtype
from smc.model.draft_vocab import COUNTS_FILE, DraftVocab
from smc.model.files import INDEX_FILE, SINGLE_FILE, fingerprint, read_json
from smc.model.parallel import WHOLE, Reduce, Shard
from smc.model.presets import NoText, preset
from smc.model.tokenizer import COPIED_TOKENIZER_FILES, Tokenizer
from smc.model.vocabularies import ForeignIds
from smc.model.weight_map import count_parameters
from smc.types import ModelRole

if TYPE_CHECKING:
    import torch

    from smc.model.decoder import Decoder

logger = logging.getLogger(__name__)
NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
SMALL_FILES = (
    "config.json",
    INDEX_FILE,
    "tokenizer.json",
    "tokenizer_config.json",
    *COPIED_TOKENIZER_FILES,
    COUNTS_FILE,
)
"""Files that are read of a model besides its weights, if they exist."""
"""Kinds of sources, as the option `--load` names them. `grown` is a padded model (`smc.model.padded`)."""


@dataclass(frozen=True)
class HubModel:
    """A model of the hub."""

    repository: str
    """ORG/NAME."""
    revision: str | None = None
    """Commit, branch or tag; None: the repository's main branch."""

    @staticmethod
    def parse(text: str) -> HubModel | None:
        """The model that `ORG/NAME[@REVISION]` names; None if the text has another form."""
        match = NAME.fullmatch(text)
        return HubModel(match["repository"], match["revision"]) if match else None

    @staticmethod
    def of_snapshot(directory: Path) -> HubModel | None:
        """Return the model and commit of a snapshot directory in huggingface_hub's cache; None for other
        directories."""
        commit, snapshots, folder = directory.name, directory.parent.name, directory.parent.parent.name
        kind, *name = folder.split("--")
        if snapshots != "snapshots" or kind != "models" or len(name) < 2:
            return None
        return HubModel(f"{name[0]}/{'--'.join(name[1:])}", commit)

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository

    def download(self) -> Path:
        """Download the files that the cache lacks, with progress on standard error. Returns the directory of the model
        in the cache. Raises ValueError that says what to do if the model is not available."""
        sizes = self._sizes()
        directory = self._fetch(SMALL_FILES, self.revision, sizes)
        if not (directory / "config.json").is_file():
            raise ValueError(f"{self} has no config.json on the hub; allowed: repositories of transformers' format")
        shards = _shards(directory / INDEX_FILE)
        # The commit of the first files: a branch may have moved.
        self._fetch(shards or (SINGLE_FILE,), directory.name, sizes)
        missing = [name for name in shards or (SINGLE_FILE,) if not (directory / name).is_file()]
        if missing and shards:
            raise ValueError(f"{self}: {len(missing)} of {len(shards)} shards are not on the hub: {missing[0]} ..")
        if missing:
            raise ValueError(
                f"{self} has no weights in safetensors format on the hub: neither {SINGLE_FILE} nor {INDEX_FILE}. Take "
                "a repository that has them (GGUF files and pytorch_model.bin are not read)"
            )
        return directory

    def _sizes(self) -> dict[str, int]:
        """Return the bytes of the repository's files by name. Empty in offline mode or if the hub does not answer,
        because the cache may have the model."""
        from huggingface_hub import HfApi, constants, errors

        if constants.HF_HUB_OFFLINE:
            return {}
        try:
            info = HfApi().model_info(self.repository, revision=self.revision, files_metadata=True)
        except errors.HfHubHTTPError as error:
            if error.response.status_code >= 500:
                return {}
            raise self._explained(error) from error
        except (errors.HTTPError, OSError):
            return {}
        return {file.rfilename: file.size or 0 for file in info.siblings or ()}

    def _fetch(self, names: tuple[str, ...], revision: str | None, sizes: dict[str, int]) -> Path:
        """Download the files in `names` that the repository has and the cache lacks. Returns the model's directory in
        the cache."""
        from huggingface_hub import constants, errors, snapshot_download, try_to_load_from_cache

        lacking = [
            name
            for name in names
            if name in sizes and not isinstance(try_to_load_from_cache(self.repository, name, revision=revision), str)
        ]
        self._check_room(sum(sizes[name] for name in lacking), Path(constants.HF_HUB_CACHE))
        try:
            return Path(snapshot_download(self.repository, revision=revision, allow_patterns=list(names)))
        except (errors.HTTPError, errors.HFValidationError, OSError) as error:
            raise self._explained(error) from error

    def _explained(self, error: Exception) -> ValueError:
        """Convert an error of huggingface_hub to a ValueError that says what to do."""
        from huggingface_hub import constants, errors

        hub = constants.ENDPOINT
        if isinstance(error, errors.GatedRepoError):
            return ValueError(
                f"{self} is gated: accept its terms on {hub}/{self.repository}, and give an access token of that "
                "account in HF_TOKEN"
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return ValueError(
                f"{self}: there is no such directory, and no such model on {hub}. Check the name; a private model "
                "needs an access token in HF_TOKEN"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return ValueError(f"{self.repository} has no revision {self.revision!r} on {hub}")
        if isinstance(error, errors.LocalEntryNotFoundError):
            why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{hub} does not answer"
            return ValueError(
                f"{self}: there is no such directory, {constants.HF_HUB_CACHE} does not have the model, and it "
                f"cannot be downloaded: {why}"
            )
        return ValueError(f"{self} cannot be downloaded from {hub}: {error}")

    def _check_room(self, needed: int, cache: Path) -> None:
        """Raise ValueError if the disk of the cache has fewer than `needed` bytes free."""
        there = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
        if needed > (free := shutil.disk_usage(there).free):
            raise ValueError(
                f"{self} needs {needed / 2**30:.1f} GiB, and {there} has {free / 2**30:.1f} GiB free; make room, or "
                "name another disk in HF_HOME"
            )


def find_model(name: Path) -> Path:
    """Return the directory of a model: `name` itself if it exists, otherwise that of the hub's model of this name,
    which is downloaded if the cache lacks it. Other names are returned as they are. Raises ValueError as
    `HubModel.download` does."""
    if name.exists() or not (model := HubModel.parse(str(name))):
        return name
    return model.download()


def _shards(index: Path) -> tuple[str, ...]:
    """Return the names of the files in an index of weights; empty without an index."""
    if not index.is_file():
        return ()
    shard_of = read_json(index).get("weight_map")
    return tuple(sorted(set(shard_of.values()))) if isinstance(shard_of, dict) else ()


def pair_dtypes(
    dtype: str | None, target: str | None, draft: str | None, device: str, directories: tuple[Path, Path]
) -> dict[str, str]:
    """Return the name of each model's dtype, as in `smc.model.linear.DTYPES`: `target` or `draft` if given, otherwise
    `dtype` if given, otherwise `default_dtype`. A draft's `auto` is kept until the draft is loaded
    (`smc.draft_dtype`)."""
    of_target, of_draft = (dtype or default_dtype(each, device) for each in directories)
    return {ModelRole.TARGET: target or of_target, ModelRole.DRAFT: draft or of_draft}


def name_dtypes(dtypes: dict[str, str]) -> str:
    """Return both dtypes as text: one name if they are equal, otherwise `TARGET <- DRAFT`."""
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
    """The hub's model of which `location` is a snapshot. A host that lacks this directory downloads the same commit."""
    foreign: ForeignIds | None = None
    """Of a draft, the ids of the target that it does not know, or knows as other tokens."""

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
        """Load the model, or one rank's shard of it, onto a device, and fit it to its foreign ids. `beside` and
        `progress` are those of `load_model`; they have no effect for random and padded weights."""
        from smc.model.loader import load_model, random_model
        from smc.model.padded import padded_model

        where: dict[str, Any] = {"dtype": dtype, "device": device, "shard": shard, "reduce": reduce}
        if self.kind == "random":
            model = random_model(self.config, **where)
        elif self.kind == "grown":
            model = padded_model(load_model(self._small), preset(str(self.location)), **where)
        else:
            model = load_model(self.directory, **where, beside=beside, progress=progress)
        if self.foreign is not None:
            self.foreign.fit(model)
        return model

    @property
    def tokenizer_files(self) -> Path | None:
        """Directory of the tokenizer's files; None for random weights."""
        return {"files": self.directory, "grown": self.small}.get(self.kind)

    def fingerprint(self) -> str:
        """Fingerprint of the weights (`smc.model.files`). Padded models have the fingerprint of the small model, random
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
    """A target and a draft that suits it."""

    target: ModelSource
    draft: ModelSource
    max_context: int
    """The shorter maximum context of the two, in tokens."""
    draft_vocab: DraftVocab | None = None
    """Tokens that the draft proposes by its own likelihood; None: all."""

    def with_draft_vocab(self, size: int | None, text: Path | None) -> SourcePair:
        """Return the pair with the reduced vocabulary that `DraftVocab.of` chooses; unchanged if `size` is None. Raises
        ValueError like `DraftVocab.of`, and for a text without a size."""
        if size is None:
            if text is not None:
                raise ValueError(f"draft_vocab_text={str(text)!r} has no effect without draft_vocab; leave it out")
            return self
        draft = self.draft.directory if self.draft.kind == "files" else None
        foreign = self.draft.foreign.ids if self.draft.foreign else ()
        return replace(self, draft_vocab=DraftVocab.of(size, text, self.target.tokenizer(), draft, foreign))

    def _with_notes_of(self, report: PairReport) -> SourcePair:
        """Return the pair with a draft that is fitted to its foreign ids, and log how the tokenizers differ."""
        for note in report.notes():
            logger.info("%s", note)
        if not report.foreign:
            return self
        ids = ForeignIds(self.target.tokenizer().size, tuple(token.id for token in report.foreign))
        draft = replace(self.draft, foreign=ids)
        return replace(self, draft=draft, draft_vocab=DraftVocab.without(ids.ids, ids.vocab))

    @staticmethod
    def of(load: str, target: Path, draft: Path, small: tuple[Path, Path] | None = None) -> SourcePair:
        """Describe a pair without loading it. `target` and `draft` are directories, or names of shapes unless `load` is
        `files`. `small`: for `grown`, the directories of both small models. Raises ValueError if the two cannot serve
        as a pair."""
        if load not in LOADS:
            raise ValueError(f"load={load!r}; allowed: {', '.join(LOADS)}")
        report: PairReport | None = None
        if load == "files":
            report = require_pair(target, draft)
            assert report.target is not None and report.draft is not None, "no problem was found"
            of_target, of_draft = (
                ModelSource(load, directory, each.config, each.parameters, hub=HubModel.of_snapshot(directory))
                for directory, each in ((target, report.target), (draft, report.draft))
            )
            return SourcePair(of_target, of_draft, max_context=report.max_context)._with_notes_of(report)
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
        pair = SourcePair(target_source, draft_source, max_context=min(config.max_context for config in shapes))
        return pair._with_notes_of(report) if report else pair

    def of_role(self, role: ModelRole) -> ModelSource:
        return self.draft if role == ModelRole.DRAFT else self.target


def _padded_config(name: Path, small: ModelConfig, shape: ModelConfig) -> ModelConfig:
    from smc.model.padded import padded_config

    try:
        return padded_config(small, shape)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
