"""Which model pair a command works with, and loading it. Imports torch only for that: what is wrong is said before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from smc import demo

if TYPE_CHECKING:
    from smc.engine.local import ModelPair

DEVICES = ("cpu", "cuda")
DEMO = (demo.TARGET, demo.DRAFT)
CONFIG = "config.json"
DTYPES = ("float32", "bfloat16", "float16")


def pair_places(target: Path | None, draft: Path | None) -> tuple[Path, Path]:
    """The directories of target and draft: those given, or the demo pair's. Raises ValueError if only one is given."""
    if (target is None) != (draft is None):
        given, missing = ("--target", "--draft") if draft is None else ("--draft", "--target")
        raise ValueError(f"{given} is given without {missing}; give both, or neither for the demo pair")
    return (target, draft) if target and draft else DEMO


def require_directories(places: tuple[Path, Path]) -> None:
    """Raises ValueError for directories that hold no model; whether what they hold can be used is found out by loading it."""
    missing = [f"{role}: {place / CONFIG} is missing" for role, place in zip(("target", "draft"), places) if not (place / CONFIG).is_file()]
    if missing:
        raise ValueError("\n".join(f"{each}; a Hugging Face model directory is needed" for each in missing))


def load_pair(places: tuple[Path, Path], device: str, dtype: str | None) -> ModelPair:
    """Raises ValueError for a device that is not there, and for whatever stands in the way of the pair."""
    dtype = dtype or default_dtype(device)
    require_directories(places)
    if device not in DEVICES:
        raise ValueError(f"--device {device}; allowed: {', '.join(DEVICES)}")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}; allowed: {', '.join(DTYPES)}")
    import torch

    from smc.engine.local import ModelPair

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no CUDA device, or this torch was built without CUDA")
    return ModelPair.load(*places, dtype=getattr(torch, dtype), device=device)


def use_threads(count: int | None, places: tuple[Path, Path]) -> None:
    """Set torch's threads: those given; for the demo models 1, which gain nothing from more; else torch's own choice."""
    if count is not None and count < 1:
        raise ValueError(f"--threads {count}; allowed: >= 1")
    if count or places == DEMO:
        import torch

        torch.set_num_threads(count or 1)


def default_dtype(device: str) -> str:
    return "float32" if device == "cpu" else "bfloat16"
