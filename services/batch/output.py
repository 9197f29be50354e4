"""The output file: what a stopped run left in it, and lines added to it whole. Knows nothing about what the lines
say."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

FIELDS = ("id", "custom_id", "response", "error")
BEGINNING = b'{"id": "batch_req_'
"""Of every line written here: what a torn line of ours is told by."""
REMEDY = "give another output file, or --overwrite to start anew"


class OutputFile:
    """Opened for one process alone. First `records` to its end, then `append`."""

    def __init__(self, path: Path, overwrite: bool) -> None:
        """Raises ValueError if another process writes it, OSError if it cannot be written."""
        self.path = path
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            self._lock()
            if overwrite:
                self._file.truncate(0)
        except BaseException:
            self._file.close()
            raise

    def records(self) -> Iterator[dict[str, Any]]:
        """Lines that are there. A torn last one, left by a run that was killed or a full disk, is cut off.

        Raises ValueError for a line that is not one of ours; then the file is as it was.
        """
        end = 0
        for number, raw in enumerate(iter(self._file.readline, b""), 1):
            if not raw.endswith(b"\n") and raw[: len(BEGINNING)] == BEGINNING[: len(raw)]:
                break
            record = _parse(raw)
            if record is None:
                raise ValueError(f"{self.path}: line {number} is not an answer of this command; {REMEDY}")
            yield record
            end += len(raw)
        self._file.seek(end)
        self._file.truncate()

    def append(self, record: dict[str, Any]) -> None:
        """In the hands of the operating system when this returns, so that it outlives this process."""
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
        # A lone surrogate has no UTF-8 form; written as \\udXXX it is the JSON that it was read from.
        self._file.write(text.encode("utf-8", "backslashreplace") + b"\n")
        self._file.flush()

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _lock(self) -> None:
        """Ends with this process, however that ends."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                raise ValueError(
                    f"{self.path} is being written by another run; wait for it, or give another output file"
                ) from error
            # Any other error: a file system without locks, which is no reason not to work there.


def _parse(raw: bytes) -> dict[str, Any] | None:
    """None for what is not a line of ours."""
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and record.keys() == set(FIELDS) else None
