"""The file that `smcserve eval` writes as it goes and resumes from: what was measured with, and a row per setting."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from smc.evaluation.quality import Row, Setting
from smc.loading import DEMO
from smc.statistics import Accuracy

VERSION = 3
"""Of the file. Settings of version 1 had no population, and its answers were drawn otherwise; speeds of version 2
included prompts."""


SAME_ANSWERS = ("problems", "seed", "temperature", "ess_threshold", "weights_sha256", "draft_vocab")
"""Conditions that decide which problems are solved, up to noise in the logits; so do weights in FP8. All others decide
how fast."""


class Record:
    """Rows measured under one set of conditions, in a file if `path` is given."""

    def __init__(self, path: Path | None, conditions: dict[str, Any], rows: dict[str, Row]) -> None:
        """`rows` are keyed by the name of their setting."""
        self.path, self.conditions, self.rows = path, conditions, rows

    @staticmethod
    def open(path: Path | None, conditions: dict[str, Any], resume: bool) -> Record:
        """A new record, or with `resume` the one in the file. Raises ValueError if the file is in the way or does not
        fit."""
        if path is None or not path.exists():
            if resume and path is None:
                raise ValueError("--resume has no effect without --json FILE; leave it out")
            return Record(path, conditions, {})
        if not resume:
            raise ValueError(f"{path} exists already; use --resume to go on with it, or another file")
        return Record(path, conditions, _read(path, conditions, None, "resumed")[0])

    def add(self, row: Row) -> None:
        self.rows[row.setting.name] = row
        self.write()

    def write(self) -> None:
        """In one move, so that a run stopped while writing leaves the file as it was."""
        if self.path is None:
            return
        content = {
            "version": VERSION,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "conditions": self.conditions,
            "rows": [_as_dict(row) for row in self.rows.values()],
        }
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(part, self.path)


def solved_before(paths: Sequence[Path], conditions: dict[str, Any]) -> tuple[dict[str, Row], list[str]]:
    """Rows of other records of the same pair, problems and terms, by the names of their settings, without speeds; and
    what those were measured with, in words. Raises ValueError for a file that does not fit."""
    rows: dict[str, Row] = {}
    measured_with = set()
    for path in paths:
        found, theirs = _read(path, conditions, SAME_ANSWERS, "taken for --accuracy-from")
        if "fp8" in f"{theirs['dtype']} {conditions['dtype']}" and theirs["dtype"] != conditions["dtype"]:
            raise ValueError(
                f"{path} cannot be taken for --accuracy-from: dtype was {theirs['dtype']!r} and is now {conditions['dtype']!r}, "
                "and FP8 solves other problems"
            )
        rows |= {
            name: replace(row, batch_tokens_per_second=None, tokens_per_second=None, first_token=None)
            for name, row in found.items()
        }
        measured_with.add(f"{theirs['dtype']} on {theirs['device_name']}")
    return rows, sorted(measured_with)


def _read(
    path: Path, conditions: dict[str, Any], same: Sequence[str] | None, use: str
) -> tuple[dict[str, Row], dict[str, Any]]:
    """Rows and conditions of a file. Raises ValueError if it is no record, or differs in what must be the `same` for
    this `use`; None: in anything."""
    try:
        found = json.loads(path.read_text())
        outdated = "rows" in found and found.get("version") != VERSION
        rows = {} if outdated else {row["name"]: _row(row) for row in found["rows"]}
        before = found["conditions"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a record of smcserve eval ({type(error).__name__}: {error}); use another file"
        ) from error
    if outdated:
        raise ValueError(f"{path} cannot be {use}: it is of an earlier version of smcserve eval; use another file")
    compared = dict.fromkeys((*conditions, *before)) if same is None else same
    different = [key for key in compared if before.get(key) != conditions.get(key)]
    if different:
        differences = "; ".join(
            f"{key} was {before.get(key)!r} and is now {conditions.get(key)!r}" for key in different
        )
        raise ValueError(f"{path} cannot be {use}: {differences}")
    return rows, before


def machine(device: str) -> dict[str, Any]:
    """What is computed with: part of a record's conditions."""
    import torch

    return {
        "weights_sha256": {
            place.name: hashlib.sha256((place / "model.safetensors").read_bytes()).hexdigest() for place in DEMO
        },
        "torch": torch.__version__,
        "device": device,
        "device_name": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _as_dict(row: Row) -> dict[str, Any]:
    values = asdict(row)
    setting, accuracy = values.pop("setting"), values.pop("accuracy")
    low, high = row.accuracy.interval
    return {**setting, **accuracy, "accuracy": row.accuracy.share, "interval_95": [low, high], **values}


def _row(values: dict[str, Any]) -> Row:
    setting = Setting(**{name: values[name] for name in Setting.__dataclass_fields__})
    others = {name: values[name] for name in Row.__dataclass_fields__ if name not in ("setting", "accuracy")}
    return Row(setting=setting, accuracy=Accuracy(values["correct"], values["count"]), **others)
