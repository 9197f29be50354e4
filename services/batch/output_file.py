"""The output file: reads the records of an earlier run, checks that they belong to this input and these models, and
appends complete lines."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from services.batch.lines import Kept, Line, RequestReader, parse_line, read_lines, record_id

RECORD_FIELDS = ("id", "custom_id", "response", "error")
BEGINNING = b'{"id": "batch_req_'
"""Start of every line written here, by which an incomplete last line is recognised."""
REMEDY = "give another output file, or --overwrite to start from the beginning"


class OutputFile:
    """An output file, locked for one process. Read `records` to the end before `append`."""

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
        """Yield the records in the file. An incomplete last line, left by a killed run or a full disk, is cut off.

        Raises ValueError for a line that this command did not write; then the file is unchanged.
        """
        end = 0
        self._file.seek(0)
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
        """Append a record. When this returns, the operating system has it, so that it outlives this process."""
        self.extend(written(record))

    def extend(self, lines: bytes) -> None:
        """Append several records at once, in the form that `written` returns."""
        self._file.write(lines)
        self._file.flush()

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _lock(self) -> None:
        """Lock the file. The lock ends with this process, however that ends."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                raise ValueError(
                    f"{self.path} is being written by another run; wait for it, or give another output file"
                ) from error
            # Any other error means a file system without locks; the run goes on there without one.


def written(record: dict[str, Any]) -> bytes:
    """Return a record as a line of the output."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    # A lone surrogate has no UTF-8 form; written as \\udXXX it is the JSON that it was read from.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _parse(raw: bytes) -> dict[str, Any] | None:
    """Return the record in a line; None if this command did not write it."""
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and record.keys() == set(RECORD_FIELDS) else None


@dataclass(frozen=True)
class Survey:
    """Numbers of lines of an input and of its output."""

    total: int
    """Lines of the input that are not blank."""
    done: int
    """Lines that are in the output: in one file the first ones."""
    failed: int
    """Lines among `done` that have no answer."""


def survey(path: Path, output: OutputFile, requests: RequestReader, fingerprint: str) -> Survey:
    """Read the whole input and the whole output, one line of each at a time.

    Raises ValueError if two lines have the same custom_id, or if the output is not the beginning of this input's
    answers."""
    records, ids = output.records(), _CustomIds()
    total = done = failed = 0
    for number, raw in read_lines(path):
        line = parse_line(number, raw)
        total += 1
        if line.custom_id is not None:
            ids.add(line)
        record = next(records, None)
        if record is not None:
            _check(line, record, f"{output.path}: answer {total}", requests, fingerprint)
            done += 1
            failed += record["error"] is not None
    if next(records, None) is not None:
        raise ValueError(f"{output.path} has more lines than {path} has requests; {REMEDY}")
    if twice := ids.twice():
        raise ValueError(
            f"{path}: lines {twice[0]} and {twice[1]} have the same custom_id; every line needs one of its own"
        )
    return Survey(total, done, failed)


def rest(path: Path, done: int, earlier: Iterable[dict[str, Any]] = ()) -> Iterator[Line | Kept]:
    """Yield the lines of the input after the first `done`. `earlier`: records of the first lines; those with an answer
    replace their lines."""
    records = iter(earlier)
    for index, (number, raw) in enumerate(read_lines(path)):
        record = next(records, None)
        if index >= done:
            if record is not None and record["error"] is None:
                yield Kept(record)
            else:
                yield parse_line(number, raw)


def _check(line: Line, record: dict[str, Any], name: str, requests: RequestReader, fingerprint: str) -> None:
    if record["custom_id"] != line.custom_id:
        raise ValueError(
            f"{name} has custom_id={record['custom_id']!r}, but line {line.number} of the input has "
            f"{line.custom_id!r}; {REMEDY}"
        )
    if record["id"] != record_id(line):
        raise ValueError(f"{name} does not belong to line {line.number} as it is now; {REMEDY}")
    if record["error"] is not None:
        return
    try:
        body = record["response"]["body"]
        written, seed = body["system_fingerprint"], body["choices"][0]["smc"]["seed"]
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(f"{name} was not written by this command; {REMEDY}") from error
    if written != fingerprint:
        raise ValueError(
            f"{name} was made with other models, another --dtype or other settings of the engine; {REMEDY}"
        )
    if seed != requests.seed_of(line):
        raise ValueError(f"{name} was made with another seed ({seed}) than line {line.number} has now; {REMEDY}")


class _CustomIds:
    """Finds a custom_id that occurs twice. Takes 16 bytes a line, since an input may have millions of lines."""

    def __init__(self) -> None:
        self._digests, self._numbers = array("Q"), array("Q")

    def add(self, line: Line) -> None:
        assert line.custom_id is not None
        # With 64 bits, two of ten million different ids collide in one of 400,000 files.
        digest = blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        self._digests.append(int.from_bytes(digest))
        self._numbers.append(line.number)

    def twice(self) -> tuple[int, int] | None:
        """Return the numbers of two lines with the same custom_id; None if there are none."""
        if not self._digests:
            return None
        digests = np.frombuffer(self._digests, np.uint64)
        order = np.argsort(digests, kind="stable")
        same = np.flatnonzero(digests[order[1:]] == digests[order[:-1]])
        if not same.size:
            return None
        return self._numbers[order[same[0]]], self._numbers[order[same[0] + 1]]
