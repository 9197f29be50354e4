"""Splits the input into parts, and finds the parts that are still to be done. If the output is a directory, a run is
resumed part by part, and the names of its files tell which parts are done."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

from services.batch.config import FORMATS
from services.batch.lines import Kept, Line, parse_line, record_id
from services.batch.output_file import REMEDY, Survey
from services.batch.progress import Counts
from services.batch.storage import Store, records_of, to_parquet

MANIFEST = "_smcserve.json"
"""File of a directory that records what its answers depend on besides the lines."""
NAME = re.compile(r"(?P<file>.+)/(?P<start>\d{15})-(?P<end>\d{15})\.(?P<lines>\d+)-lines\.(?P<failed>\d+)-failed\.\w+")
PARTS_EACH = 4
"""Minimum number of parts for each worker group, so that all of them end at about the same time."""
PART_LINES, MANY_PARTS = 1000, 10_000
"""Default number of lines of a part, and the number of parts above which parts are made larger: with more parts Ray
Data takes minutes to begin."""
SAMPLED = 8
"""Number of files whose beginnings are read to estimate the length of a line."""
THREADS = 16
"""Number of files that are examined at a time."""


NOTHING = Counts()


@dataclass(frozen=True)
class InputPart:
    """Consecutive lines of one file. Picklable."""

    file: str
    """Name of the file in the input's directory; empty: the input is the file."""
    name: str
    """Name of the file in messages, and of the output directory of its parts; empty: lines are named by number."""
    unit: str
    """Unit of `start` and `end`: `byte`, or `row` of a Parquet file."""
    start: int
    end: int
    """The first byte or row after the part."""
    earlier: str | None = None
    """Name of an earlier output of this part: its answers stay, and lines without an answer are decoded again."""

    def read(self, source: Store) -> tuple[int, bytes]:
        """Return the number of the first row, or the offset of the first line, and the lines as JSON."""
        if self.unit == "row":
            return self.start + 1, source.rows(self.file, self.start, self.end)
        return source.lines(self.file, self.start, self.end)

    def parse(self, first: int, data: bytes, earlier: Iterable[dict[str, Any]] = ()) -> Iterator[Line | Kept]:
        """Yield the lines in the result of `read`. `earlier`: records of some of them; those with an answer replace
        their lines."""
        answers = {record["id"]: record for record in earlier if record["error"] is None}
        number = first
        for raw in BytesIO(data):
            if raw.strip():
                line = parse_line(number, raw, self.name, self.unit)
                known = answers.get(record_id(line))
                yield line if known is None else Kept(known)
            number += len(raw) if self.unit == "byte" else 1

    def output_name(self, counts: Counts, form: str) -> str:
        return (
            f"{self.name}/{self.start:015d}-{self.end:015d}"
            f".{counts.written}-lines.{counts.failed}-failed{FORMATS[form]}"
        )


@dataclass(frozen=True)
class DonePart:
    """The result of a part."""

    part: InputPart
    new: Counts = NOTHING
    kept: Counts = NOTHING
    """Counts of the records that were copied from earlier runs."""
    data: bytes = b""
    """Its records, until they are written."""
    error: str | None = None
    """Why the part could not be read or written; then it is not done."""


@dataclass(frozen=True)
class Found:
    """A part that is in the output."""

    start: int
    end: int
    counts: Counts
    name: str


class PartsOutput:
    """A directory with a file for each part that is done. Locked for one run, if the file system has locks."""

    def __init__(
        self,
        source: Store,
        sink: Store,
        output_form: str | None,
        made_by: dict[str, Any],
        overwrite: bool,
        retry_failed: bool,
    ) -> None:
        """`made_by`: what answers depend on besides the lines. Raises ValueError for an input without lines, and for a
        directory that was made from another input or with another `made_by`, or is being written by another run."""
        self._source, self.sink, self._retries = source, sink, retry_failed
        self._sizes, self._unit = _sizes(source)
        self._mean = self._mean_size()
        self.form = output_form or ("parquet" if self._unit == "row" else "jsonl")
        self._redone: set[tuple[str, int]] = set()
        self._lock: int | None = None
        try:
            self._open(made_by | {"format": self.form}, overwrite)
            self._found = self._survey()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def is_estimate(self) -> bool:
        """Whether the number of lines is an estimate: lines of JSONL files are not counted before they are decoded."""
        return self._unit == "byte" and any(True for _ in self._missing())

    @property
    def survey(self) -> Survey:
        """Numbers of lines. Parts that are to be done again do not count as done."""
        missing = sum(end - start for _, start, end in self._missing())
        again = {part.earlier for part in self._again()}
        found = [part for parts in self._found.values() for part in parts]
        total = sum(part.counts.written for part in found) + math.ceil(missing / self._mean)
        done = [part.counts for part in found if part.name not in again]
        return Survey(total, sum(one.written for one in done), sum(one.failed for one in done))

    def parts(self, groups: int, most_lines: int | None) -> list[InputPart]:
        """Return the parts to be done by `groups` worker groups, in order."""
        again = self._again()
        missing = list(self._missing())
        lines = sum(end - start for _, start, end in missing) / self._mean
        step = math.ceil(_part_lines(lines, groups, most_lines) * self._mean)
        cut = [
            InputPart(file, self._name(file), self._unit, begin, min(begin + step, end))
            for file, start, end in missing
            for begin in range(start, end, step)
        ]
        return again + cut

    def take(self, done: DonePart) -> None:
        """Record that a part has been written. Parts may arrive in any order."""
        part, counts = done.part, done.new + done.kept
        if part.earlier is not None:
            self._redone.add((part.file, part.start))
        there = [one for one in self._found.get(part.file, []) if one.start != part.start]
        there.append(Found(part.start, part.end, counts, part.output_name(counts, self.form)))
        self._found[part.file] = sorted(there, key=lambda one: one.start)

    def _again(self) -> list[InputPart]:
        """Return the parts with failed lines that this run has not tried again yet."""
        if not self._retries:
            return []
        return [
            InputPart(file, self._name(file), self._unit, one.start, one.end, earlier=one.name)
            for file, parts in self._found.items()
            for one in parts
            if one.counts.failed and (file, one.start) not in self._redone
        ]

    def _missing(self) -> Iterator[tuple[str, int, int]]:
        """Yield file, start and end of every range that no part covers."""
        for file, size in self._sizes.items():
            begin = 0
            for part in self._found.get(file, []):
                if part.start > begin:
                    yield file, begin, part.start
                begin = part.end
            if begin < size:
                yield file, begin, size

    def _name(self, file: str) -> str:
        return file or self._source.root.rsplit("/", 1)[-1]

    def _open(self, made_by: dict[str, Any], overwrite: bool) -> None:
        content = json.dumps(made_by, indent=1).encode()
        before = self.sink.read(MANIFEST)
        if self.sink.is_local:
            directory = Path(self.sink.root)
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory, os.O_RDONLY)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self.close()
                raise ValueError(
                    f"{self.sink.url} is being written by another run; wait for it, or give another output"
                ) from error
        if overwrite:
            for name in self.sink.files():
                if NAME.fullmatch(name):
                    self.sink.delete(name)
        elif before is not None and before != content:
            raise ValueError(
                f"{self.sink.url} was made with other models, another --seed, another format or other settings of the "
                f"engine; {REMEDY}"
            )
        if overwrite or before is None:
            self.sink.write(MANIFEST, content)

    def _survey(self) -> dict[str, list[Found]]:
        found: dict[str, list[Found]] = {}
        files = {self._name(file): file for file in self._sizes}
        for name in self.sink.files():
            if (match := NAME.fullmatch(name)) is None:
                continue
            file, counts = match["file"], Counts(int(match["lines"]), int(match["failed"]))
            if file not in files:
                raise ValueError(f"{self.sink.url}: {name} belongs to no file of {self._source.url}; {REMEDY}")
            found.setdefault(files[file], []).append(Found(int(match["start"]), int(match["end"]), counts, name))
        return {file: self._checked(file, parts) for file, parts in found.items()}

    def _checked(self, file: str, parts: list[Found]) -> list[Found]:
        """Return the parts of a file in order. If a part was done again and its old output still exists, the old output
        is deleted. Raises ValueError for parts that overlap or exceed the file."""
        parts.sort(key=lambda one: (one.start, one.end, one.counts.failed))
        kept: list[Found] = []
        for one in parts:
            last = kept[-1] if kept else None
            if last is not None and (one.start, one.end) == (last.start, last.end):
                self.sink.delete(one.name)
                continue
            if last is not None and one.start < last.end:
                raise ValueError(f"{self.sink.url}: {last.name} and {one.name} hold the same lines; delete one of them")
            kept.append(one)
        if kept and kept[-1].end > self._sizes[file]:
            raise ValueError(f"{self.sink.url}: {kept[-1].name} is beyond the end of its input as it is now; {REMEDY}")
        return kept

    def _mean_size(self) -> float:
        """Estimate the mean size of a line, in the unit of `InputPart.start`."""
        if self._unit == "row":
            return 1.0
        files = [file for file, size in self._sizes.items() if size]
        sampled = files[:: max(1, len(files) // SAMPLED)][:SAMPLED]
        means = [self._source.mean_line(file) for file in sampled]
        return max(1.0, sum(means) / len(means)) if means else 1.0


def _part_lines(lines: float, groups: int, most: int | None) -> float:
    """Return the number of lines of a part if `lines` are to be done. `most`: the maximum that the user allows."""
    return max(1, min(most or max(PART_LINES, lines / MANY_PARTS), lines / (PARTS_EACH * groups)))


def _sizes(source: Store) -> tuple[dict[str, int], str]:
    """Return the size of every file with lines, and the unit of these sizes: `byte` or `row`."""
    files = source.files()
    names = {form: [name for name in files if source.path(name).endswith(end)] for form, end in FORMATS.items()}
    if all(names.values()):
        raise ValueError(f"{source.url} holds both JSONL and Parquet files; allowed: one kind")
    if not any(names.values()):
        raise ValueError(f"{source.url} holds no lines; needed: files whose names end with .jsonl or .parquet")
    if names["jsonl"]:
        return {name: files[name] for name in names["jsonl"]}, "byte"
    with ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(names["parquet"], threads.map(source.num_rows, names["parquet"]))), "row"


def earlier_records(part: InputPart, sink: Store, form: str) -> list[dict[str, Any]]:
    """Return the records of the earlier output of a part that is done again."""
    if part.earlier is None:
        return []
    return records_of(sink.read(part.earlier) or b"", form)


def write_part(done: DonePart, sink: Store, form: str) -> DonePart:
    """Write the records of a part, and delete the output that they replace. Return the part without its records."""
    name = done.part.output_name(done.new + done.kept, form)
    sink.write(name, to_parquet(done.data) if form == "parquet" else done.data)
    if done.part.earlier not in (None, name):
        sink.delete(done.part.earlier or "")
    return replace(done, data=b"")
