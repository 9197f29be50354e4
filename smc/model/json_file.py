"""Reads the JSON files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a model directory. Raises ValueError that names the file."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; a Hugging Face model directory is needed")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a JSON {type(raw).__name__}; an object is needed")
    return raw
