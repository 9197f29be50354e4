"""Sampling defaults that a checkpoint brings, in generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smc.api.sampling_params import SamplingParams
from smc.model.json_file import read_json

GENERATION_CONFIGS = ("auto", "ignore")
"""Whether requests that leave sampling settings out have those of the checkpoint, or the library's."""
FILE = "generation_config.json"
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Settings that are taken from it, as vLLM does. `do_sample` is not: a client that wants the likeliest tokens asks for
temperature 0."""


def sampling_defaults(directory: Path) -> dict[str, Any]:
    """Settings of `SamplingParams` that the checkpoint names, by name. Raises ValueError that names the file for a
    value that is not allowed."""
    file = directory / FILE
    found = read_json(file) if file.is_file() else {}
    defaults = {name: found[name] for name in SAMPLING if found.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except ValueError as error:
        raise ValueError(f"{file}: {error}. Mend the file, or give --generation-config ignore") from error
    return defaults
