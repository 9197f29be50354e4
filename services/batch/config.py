"""Settings of one run over a file. Checked when built; knows nothing about models or processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BatchConfig:
    """Raises ValueError naming the field, the value and what is allowed."""

    input: Path
    """Requests, one JSON object a line. Read twice: once to check it, once to send it."""
    output: Path
    """Answers, one JSON object a line, in the order of the input. What is there already is gone on with."""
    overwrite: bool = False
    """Start anew, whatever `output` holds."""
    seed: int = 0
    """A line without a seed of its own gets one made of this and its custom_id."""
    concurrency: int | None = None
    """Requests in flight; default: as many as keep every slot of the engine full."""

    def __post_init__(self) -> None:
        if not self.input.is_file():
            raise ValueError(f"{self.input} is not a file; give a file of requests, one JSON object a line")
        if not self.output.absolute().parent.is_dir():
            raise ValueError(f"cannot write {self.output}: its directory does not exist")
        if self.output.exists():
            if not self.output.is_file():
                raise ValueError(
                    f"cannot write {self.output}: it is not a regular file, and answers could not be gone on with"
                )
            if self.output.samefile(self.input):
                raise ValueError(f"{self.output} is the input; give another output file")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency={self.concurrency}; allowed: >= 1")
