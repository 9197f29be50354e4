"""Latency models of commands that run once, kept in files: the first use on a machine measures a pair, later ones read
what it found.

A file is for one pair of models, as its files are now, in one setting of the engine on one machine. It is in
`$XDG_CACHE_HOME/smcserve/latency`, by default `~/.cache/smcserve/latency`, and may be deleted at any time."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from smc.api.engine_config import EngineConfig
from smc.model.decoder import Decoder
from smc.scheduler.latency_model import LatencyModel
from smc.types import ModelRole

logger = logging.getLogger(__name__)


def cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "smcserve" / "latency"


@dataclass(frozen=True)
class LatencyCache:
    """The latency models in a directory."""

    directory: Path

    def get(self, key: Mapping[str, object], measure: Callable[[], LatencyModel | None]) -> LatencyModel | None:
        """The latency model of a `cost_key`: the stored one, or one that is measured now and stored. An unreadable file
        is replaced; if none can be written, that is logged."""
        path = self.directory / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}.json"
        if (stored := self._stored(path)) is not None:
            return stored
        begin = time.monotonic()
        latency = measure()
        logger.info("measured costs in %.1f s: %s", time.monotonic() - begin, latency)
        if latency is not None:
            self._store(path, {"key": key, "latency": json.loads(latency.to_json())})
        return latency

    def _stored(self, path: Path) -> LatencyModel | None:
        if not path.exists():
            return None
        try:
            return LatencyModel.from_json(json.dumps(json.loads(path.read_text())["latency"]))
        except (OSError, ValueError, LookupError, TypeError) as error:
            logger.warning("%s is measured again: %s", path, error)
            return None

    def _store(self, path: Path, content: dict) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            # Another process reads the whole file, or none.
            with tempfile.NamedTemporaryFile("w", dir=self.directory, suffix=".new", delete=False) as file:
                json.dump(content, file, indent=1)
            os.replace(file.name, path)
        except OSError as error:
            logger.warning("costs are not kept, and will be measured again: %s", error)


def cost_key(
    models: Mapping[ModelRole, Decoder], directories: Sequence[Path], draft_columns: int | None, config: EngineConfig
) -> dict[str, object]:
    """All that costs depend on: models, loaded from these directories, the columns of the draft's head if they are not
    all, and the engine that is timed."""
    weights = [models[role].embed.weight for role in ModelRole]
    return {
        "version": version("smcserve"),
        "torch": torch.__version__,
        "machine": [platform.node(), platform.processor() or platform.machine(), os.cpu_count()],
        "devices": [device_name(weight.device) for weight in weights],
        "threads": torch.get_num_threads(),
        "models": [_files(directory) for directory in directories],
        "dtypes": [sorted({str(tensor.dtype) for tensor in models[role].state_dict().values()}) for role in ModelRole],
        "draft_columns": draft_columns,
        "engine": [config.form, config.block, config.branches, config.max_slots],
    }


def device_name(device: torch.device) -> str:
    """Of a GPU its model; of others their kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _files(directory: Path) -> list[object]:
    """Names, sizes and times of a model's files."""
    found = sorted(path for path in directory.resolve().iterdir() if path.is_file())
    return [str(directory.resolve()), *([path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in found)]
