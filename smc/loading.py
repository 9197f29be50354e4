"""Chooses and loads the model pair of a command. Imports torch only to load, so that errors are reported before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from smc import demo
from smc.api.limits import AUTO_DTYPE, DTYPE_NAMES
from smc.types import ModelRole

if TYPE_CHECKING:
    from smc.local_engine import ModelPair
    from smc.model.decoder import Decoder
    from smc.model.draft_vocab import DraftHead
    from smc.model.source import SourcePair

DEVICES = ("cpu", "cuda")
DEMO = (demo.TARGET, demo.DRAFT)
CONFIG = "config.json"


def pair_directories(target: Path | None, draft: Path | None) -> tuple[Path, Path]:
    """Return the directories of target and draft, which are given as directories or as names on the hub; by default
    those of the demo pair. Raises ValueError if only one is given, or if a model cannot be downloaded."""
    if (target is None) != (draft is None):
        given, missing = ("--target", "--draft") if draft is None else ("--draft", "--target")
        raise ValueError(f"{given} is given without {missing}; give both, or neither for the demo pair")
    if not target or not draft:
        return DEMO
    from smc.model.source import find_model

    return find_model(target), find_model(draft)


def require_directories(directories: tuple[Path, Path]) -> None:
    """Raise ValueError for a directory without a config.json. The model itself is checked when it is loaded."""
    missing = [
        f"{role}: {directory / CONFIG} is missing"
        for role, directory in zip(("target", "draft"), directories)
        if not (directory / CONFIG).is_file()
    ]
    if missing:
        raise ValueError(
            "\n".join(
                f"{each}; a Hugging Face model directory is needed, or ORG/NAME of a model on the hub"
                for each in missing
            )
        )


def load_pair(directories: tuple[Path, Path], device: str, dtype: str | None, **options: Any) -> ModelPair:
    """Load both models of two directories on one device. Options and errors are those of `loaded_models`."""
    require_directories(directories)
    return loaded_models("files", directories, device, dtype, **options).pair(device, device)


def loaded_models(
    load: str,
    directories: tuple[Path, Path],
    device: str,
    dtype: str | None,
    target_dtype: str | None = None,
    draft_dtype: str | None = None,
    draft_vocab: int | None = None,
    draft_vocab_text: Path | None = None,
) -> LoadedModels:
    """Return the models of a pair, to be loaded on first use. `load`: one of `smc.api.limits.LOADS`. Raises
    ValueError if the device is not available, or if the pair or an option is invalid."""
    if device not in DEVICES:
        raise ValueError(f"--device {device}; allowed: {', '.join(DEVICES)}")
    for option, value in (("dtype", dtype), ("target-dtype", target_dtype), ("draft-dtype", draft_dtype)):
        allowed = (*DTYPE_NAMES, AUTO_DTYPE) if option == "draft-dtype" else DTYPE_NAMES
        if value not in (None, *allowed):
            raise ValueError(f"--{option} {value}; allowed: {', '.join(allowed)}")
    from smc.model.source import SourcePair, pair_dtypes

    sources = SourcePair.of(load, *directories, small=DEMO).with_draft_vocab(draft_vocab, draft_vocab_text)
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError("--device cuda: this machine has no CUDA device, or this torch was built without CUDA")
    return LoadedModels(sources, pair_dtypes(dtype, target_dtype, draft_dtype, device, directories))


class LoadedModels:
    """The models of a pair. Each is loaded on first use, once per device."""

    def __init__(self, sources: SourcePair, dtypes: dict[str, str]) -> None:
        """`dtypes`: model role -> name in `smc.model.linear.DTYPES`. That of the draft may be `auto` until it is
        loaded."""
        self.sources, self.dtypes = sources, {**dtypes}
        self.tokenizer = sources.target.tokenizer()
        self._loaded: dict[tuple[str, str], Decoder] = {}
        self._heads: dict[str, DraftHead] = {}

    def model(self, role: ModelRole, device: str) -> Decoder:
        if (role, device) not in self._loaded:
            from smc.draft_dtype import draft_dtype
            from smc.model.linear import DTYPES

            if role == ModelRole.DRAFT:
                self.dtypes[role] = draft_dtype(self.sources.draft, device, self.dtypes[role])
            target = self._loaded.get((ModelRole.TARGET, device))
            self._loaded[role, device] = self.sources.of_role(role).load(
                dtype=DTYPES[self.dtypes[role]], device=device, beside=target
            )
        return self._loaded[role, device]

    def draft_head(self, device: str) -> DraftHead | None:
        """The reduced head of the draft on a device; None if the draft uses its full head."""
        vocab = self.sources.draft_vocab
        if vocab is not None and device not in self._heads:
            self._heads[device] = vocab.head(self.model(ModelRole.DRAFT, device))
        return self._heads.get(device)

    def pair(self, draft_device: str, target_device: str) -> ModelPair:
        from smc.local_engine import ModelPair

        target, draft = self.model(ModelRole.TARGET, target_device), self.model(ModelRole.DRAFT, draft_device)
        return ModelPair(target, draft, self.tokenizer, self.sources.max_context, self.draft_head(draft_device))


def use_threads(count: int | None, directories: tuple[Path, Path]) -> None:
    """Set torch's number of threads to `count`. Without `count`: 1 for the demo models, which gain nothing from more,
    else torch's default. Raises ValueError if `count` is below 1."""
    if count is not None and count < 1:
        raise ValueError(f"--threads {count}; allowed: >= 1")
    if count or directories == DEMO:
        import torch

        torch.set_num_threads(count or 1)
