"""Models by the names they have on the Hugging Face hub: `ORG/NAME`, or `ORG/NAME@REVISION`.

Downloads, the cache, tokens, offline mode and going on with a broken download are huggingface_hub's, and so are the
environment variables that set them: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and others. Only the files that
are needed are downloaded: configuration, tokenizer, and weights in safetensors format.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from smc.model.draft_vocab import COUNTS_FILE
from smc.model.json_file import read_json
from smc.model.safetensors_files import INDEX_FILE, SINGLE_FILE

NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
SMALL_FILES = (
    *("config.json", "generation_config.json", INDEX_FILE),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", COUNTS_FILE),
)
"""What is read of a model besides its weights, if it is there."""


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
        """The model whose files, at one commit, are this directory of huggingface_hub's cache; None for others."""
        commit, snapshots, folder = directory.name, directory.parent.name, directory.parent.parent.name
        kind, *name = folder.split("--")
        if snapshots != "snapshots" or kind != "models" or len(name) < 2:
            return None
        return HubModel(f"{name[0]}/{'--'.join(name[1:])}", commit)

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository

    def download(self) -> Path:
        """The directory of the model in the cache. What is missing there is downloaded, with progress on standard
        error. Raises ValueError that says what to do if the model cannot be had."""
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
        """Bytes of the repository's files by name. None where the hub does not answer: the cache may have the
        model."""
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
        """Download those of these files that the repository has and the cache lacks."""
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
        """What to do about an error of huggingface_hub."""
        from huggingface_hub import constants, errors

        hub = constants.ENDPOINT
        if isinstance(error, errors.GatedRepoError):
            return ValueError(
                f"{self} is gated: accept its terms on {hub}/{self.repository}, and give an access token of that "
                "account in HF_TOKEN"
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return ValueError(
                f"{self}: there is no such directory, and no such model on {hub}. Check the name; a private model needs "
                "an access token in HF_TOKEN"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return ValueError(f"{self.repository} has no revision {self.revision!r} on {hub}")
        if isinstance(error, errors.LocalEntryNotFoundError):
            why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{hub} does not answer"
            return ValueError(
                f"{self}: there is no such directory, {constants.HF_HUB_CACHE} does not have the model, and it cannot be "
                f"downloaded: {why}"
            )
        return ValueError(f"{self} cannot be downloaded from {hub}: {error}")

    def _check_room(self, needed: int, cache: Path) -> None:
        """Raises ValueError if the disk of the cache has no room for so many bytes."""
        there = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
        if needed > (free := shutil.disk_usage(there).free):
            raise ValueError(
                f"{self} needs {needed / 2**30:.1f} GiB, and {there} has {free / 2**30:.1f} GiB free; make room, or name "
                "another disk in HF_HOME"
            )


def find_model(name: Path) -> Path:
    """The directory of a model: the one of that name, or that of the hub's model of that name, which is downloaded if
    the cache does not have it. Raises ValueError as `HubModel.download` does. Other names are returned as they are."""
    if name.exists() or not (model := HubModel.parse(str(name))):
        return name
    return model.download()


def _shards(index: Path) -> tuple[str, ...]:
    """Files that an index of weights names; none without an index."""
    if not index.is_file():
        return ()
    shard_of = read_json(index).get("weight_map")
    return tuple(sorted(set(shard_of.values()))) if isinstance(shard_of, dict) else ()
