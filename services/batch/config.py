"""Settings of one run of `smcserve batch`. Imports nothing heavy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from smc.api.settings import BATCH, LISTEN, OneOf, at_least, check_settings, flag, setting

FORMATS = {"jsonl": ".jsonl", "parquet": ".parquet"}
"""Format of the files in a directory -> suffix of their names."""
URL = re.compile(r"[a-z][a-z0-9+.-]*://")


def is_url(path: str) -> bool:
    """Return whether this is an address such as s3://BUCKET/.., not a path."""
    return URL.match(path) is not None


@dataclass(frozen=True)
class BatchConfig:
    """Settings of a run. Raises ValueError naming the field, the value and what is allowed."""

    PANEL: ClassVar[str] = BATCH

    input: str
    """Requests: a file, or a directory or address of files. A local file of JSON lines is read twice: first to check
    it, then to decode it."""
    output: str
    """Answers: a file in the order of the input; or a directory or address, with a file for each part of the input.
    An existing output is resumed."""
    overwrite: bool = setting(False, flag(), "Start from the beginning, and discard the answers that OUT holds.")
    retry_failed: bool = setting(False, flag(), "Decode lines that failed in OUT again; existing answers are kept.")
    part_lines: int | None = setting(
        None,
        at_least(1),
        "Maximum number of lines of a part, the unit of resuming in a directory. Default: 1000, or more where that "
        "would make more than 10,000 parts.",
        "COUNT",
    )
    """If a worker group is lost, up to two parts are decoded again."""
    output_format: str | None = setting(
        None, OneOf(tuple(FORMATS)), "Format of the files in an output directory. Default: that of IN.", "jsonl|parquet"
    )
    metrics_port: int | None = setting(
        None,
        None,
        "Port of the metrics for Prometheus; 0 = any free port. Default: no such port.",
        "PORT",
        panel=LISTEN,
    )
    host: str = setting("127.0.0.1", None, "Address of --metrics-port.", "HOST", panel=LISTEN)
    seed: int = setting(
        0, None, "A line without a seed gets one that is derived from this seed and its custom_id.", "SEED"
    )
    concurrency: int | None = setting(
        None,
        at_least(1),
        "Number of requests in flight in each worker group. Default: as many as fill the slots.",
        "COUNT",
        names=("--concurrency", "-c"),
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.overwrite and self.retry_failed:
            raise ValueError("--overwrite and --retry-failed are given; allowed: one of them")
        if not is_url(self.input) and not Path(self.input).exists():
            raise ValueError(f"{self.input} is not a file; give a file of requests, one JSON object a line")
        if self.has_parts:
            self._check_directory()
        else:
            self._check_file()

    @property
    def has_parts(self) -> bool:
        """Whether `output` is a directory of parts."""
        source, output = self.input, self.output
        is_file = not is_url(source) and Path(source).is_file() and not source.endswith(".parquet")
        return not is_file or is_url(output) or output.endswith("/")

    def _check_file(self) -> None:
        source, output = Path(self.input), Path(self.output)
        if self.output_format is not None:
            raise ValueError(
                "output_format has no effect on one file; leave it out, or end the output with / for parts"
            )
        if not output.absolute().parent.is_dir():
            raise ValueError(f"cannot write {output}: its directory does not exist")
        if output.exists():
            if not output.is_file():
                raise ValueError(
                    f"cannot write {output}: it is not a regular file, so the run could not be resumed; end its name "
                    "with / for a directory of parts"
                )
            if output.samefile(source):
                raise ValueError(f"{output} is the input; give another output file")

    def _check_directory(self) -> None:
        if is_url(self.output):
            inside = self.output.startswith(self.input.rstrip("/") + "/")
        else:
            output = Path(self.output).absolute()
            if output.exists() and not output.is_dir():
                raise ValueError(
                    f"cannot write {self.output}: it is a file; needed: a directory, for parts of the input"
                )
            source = Path(self.input).absolute()
            inside = not is_url(self.input) and (
                output.is_relative_to(source) or (source.is_file() and output == source.parent)
            )
        if inside:
            raise ValueError(f"{self.output} is the input's directory, or inside it; give another output directory")
