"""Reads and writes directories of JSONL and Parquet files on any of pyarrow's filesystems: local, s3://, gs://. Knows
nothing about the requests in the lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from services.batch.config import is_url
from services.batch.lines import FIELDS
from services.batch.output_file import RECORD_FIELDS
from services.openai.bodies import CHAT, COMPLETIONS

CHUNK = 1 << 20
"""Bytes that are read at a time in search of the end of a line."""
JSON_COLUMNS = ("response", "error")
"""Columns of an output in Parquet that hold JSON."""
RECORD_SCHEMA = pa.schema([(name, pa.string()) for name in RECORD_FIELDS])


@dataclass(frozen=True)
class Store:
    """A file, or a directory with its files. Picklable."""

    filesystem: pa.fs.FileSystem
    root: str
    """Path in the filesystem."""
    url: str
    """Path or address as the user wrote it."""

    @staticmethod
    def of(path: str) -> Store:
        """Return the store of a path or address. Raises ValueError for an address without a known filesystem."""
        if not is_url(path):
            return Store(pa.fs.LocalFileSystem(), str(Path(path).absolute()), path)
        try:
            filesystem, root = pa.fs.FileSystem.from_uri(path)
        except (ValueError, pa.ArrowException) as error:
            raise ValueError(
                f"{path}: {error}; allowed: a path, s3://BUCKET/.., gs://BUCKET/.., or another of pyarrow's addresses"
            ) from error
        return Store(filesystem, root.rstrip("/"), path)

    @property
    def is_local(self) -> bool:
        return isinstance(self.filesystem, pa.fs.LocalFileSystem)

    def path(self, name: str) -> str:
        """Return the path of a file in the store; of the store itself if `name` is empty."""
        return f"{self.root}/{name}" if name else self.root

    def files(self) -> dict[str, int]:
        """Return names (relative to the store) and sizes in bytes of all its files, in order of names. A directory that
        does not exist has none; a store that is a file has itself, under an empty name. Files and directories whose
        names begin with . or _ are left out."""
        info = self.filesystem.get_file_info(self.root)
        if info.type == pa.fs.FileType.File:
            return {"": info.size}
        selector = pa.fs.FileSelector(self.root, allow_not_found=True, recursive=True)
        found = {
            each.path[len(self.root) + 1 :]: each.size
            for each in self.filesystem.get_file_info(selector)
            if each.type == pa.fs.FileType.File
        }
        return {name: found[name] for name in sorted(found) if not any(map(_is_hidden, name.split("/")))}

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it does not exist."""
        try:
            with self.filesystem.open_input_stream(self.path(name)) as file:
                return file.read()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically: whole or not at all. A file of this name is replaced."""
        path = self.path(name)
        if not self.is_local:  # in object stores a file begins to exist when it is closed
            with self.filesystem.open_output_stream(path) as file:
                file.write(content)
            return
        local = Path(path)
        local.parent.mkdir(parents=True, exist_ok=True)
        unfinished = local.with_name(f".{local.name}")
        unfinished.write_bytes(content)
        unfinished.replace(local)

    def delete(self, name: str) -> None:
        try:
            self.filesystem.delete_file(self.path(name))
        except FileNotFoundError:
            return

    def lines(self, name: str, start: int, end: int) -> tuple[int, bytes]:
        """Return the whole lines whose first byte lies in this range of bytes: the offset of the first one, and their
        text."""
        with self.filesystem.open_input_file(self.path(name)) as file:
            before = max(start - 1, 0)
            file.seek(before)
            data = file.read(end - before)
            while data and not data.endswith(b"\n") and (more := file.read(CHUNK)):
                break_at = more.find(b"\n") + 1
                data += more[:break_at] if break_at else more
        if start == 0:
            return 0, data
        begin = data.find(b"\n") + 1
        if not begin or before + begin >= end:
            return end, b""
        return before + begin, data[begin:]

    def rows(self, name: str, start: int, end: int) -> bytes:
        """Return these rows of a Parquet file as request lines in JSON."""
        with pq.ParquetFile(self.filesystem.open_input_file(self.path(name))) as file:
            _check_columns(file.schema_arrow.names, f"{self.url}: {name}")
            return b"".join(map(_request_line, _rows(file, start, end)))

    def num_rows(self, name: str) -> int:
        """Return the number of rows of a Parquet file. Raises ValueError if it is no Parquet file, or lacks columns."""
        where = f"{self.url}: {name}" if name else self.url
        try:
            with pq.ParquetFile(self.filesystem.open_input_file(self.path(name))) as file:
                _check_columns(file.schema_arrow.names, where)
                return file.metadata.num_rows
        except pa.ArrowInvalid as error:
            raise ValueError(f"{where}: {error}") from error

    def mean_line(self, name: str) -> float:
        """Estimate the mean number of bytes of a line from the beginning of the file."""
        with self.filesystem.open_input_stream(self.path(name)) as file:
            data = file.read(CHUNK)
        return len(data) / max(data.count(b"\n"), 1)


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _check_columns(names: list[str], where: str) -> None:
    for name in ("custom_id", "body"):
        if name not in names:
            raise ValueError(f"{where}: there is no column {name}; needed: custom_id, body; allowed: method, url")


def _rows(file: pq.ParquetFile, start: int, end: int) -> Iterator[dict[str, Any]]:
    """Yield the rows from `start` to `end`. Reads only the row groups that contain some of them."""
    begin, columns = 0, [name for name in FIELDS if name in file.schema_arrow.names]
    for index in range(file.num_row_groups):
        count = file.metadata.row_group(index).num_rows
        first, last = max(start - begin, 0), min(end - begin, count)
        if first < last:
            yield from file.read_row_group(index, columns=columns).slice(first, last - first).to_pylist()
        begin += count


def _request_line(row: dict[str, Any]) -> bytes:
    """Write a row as a line of a JSONL file. The URL of a row without one follows from its body."""
    body = row["body"]
    if isinstance(body, str):
        try:
            body = json.loads(body)
        except ValueError:
            body = row["body"]  # refused later, as a string
    else:
        body = _without_nulls(body)
    url = row.get("url") or (COMPLETIONS if isinstance(body, dict) and "prompt" in body else CHAT)
    document = {"custom_id": row["custom_id"], "method": row.get("method") or "POST", "url": url, "body": body}
    return json.dumps(document, default=str).encode() + b"\n"


def _without_nulls(value: Any) -> Any:
    """Remove null fields: in a column of structures every row has every field."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    return value


def to_parquet(lines: bytes) -> bytes:
    """Convert records in JSON lines to a Parquet file, in which `response` and `error` are JSON strings or null."""
    rows = [json.loads(line) for line in lines.splitlines()]
    for row in rows:
        for name in JSON_COLUMNS:
            row[name] = None if row[name] is None else json.dumps(row[name])
        if row["custom_id"] is not None:
            row["custom_id"] = row["custom_id"].encode("utf-8", "replace").decode()
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, RECORD_SCHEMA), sink)
    return sink.getvalue().to_pybytes()


def records_of(content: bytes, form: str) -> list[dict[str, Any]]:
    """Return the records in the content of an output file of format `form`."""
    if form == "jsonl":
        return [json.loads(line) for line in content.splitlines()]
    rows = pq.read_table(pa.BufferReader(content)).to_pylist()
    return [row | {name: row[name] and json.loads(row[name]) for name in JSON_COLUMNS} for row in rows]
