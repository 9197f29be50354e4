"""Directories of files, local and in stand-ins for S3 and Google Cloud Storage: every line is in exactly one part, and
the names of the outputs alone say which parts are done."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.batch.lines import Kept, RequestReader, parse_line
from services.batch.output_file import OutputFile, Survey, survey, written
from services.batch.parts import DonePart, InputPart, PartsOutput, _part_lines, earlier_records, write_part
from services.batch.progress import Counts
from services.batch.storage import Store, records_of, to_parquet
from tests.batch import gcs
from tests.batch.asking import PRINT, answer_file, chat, completion, write_lines
from tests.batch.s3 import BUCKET, s3_server

# moto is imported once.
pytestmark = pytest.mark.xdist_group("s3")
MADE_BY = {"fingerprint": PRINT, "seed": 0}


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    with s3_server() as settings, pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def gs() -> Iterator[None]:
    pytest.importorskip("gcp_storage_emulator")
    with gcs.gcs_server() as settings, pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(params=["local", "s3", pytest.param("gs", marks=pytest.mark.slow)])
def stores(request, tmp_path) -> tuple[Store, Store]:
    """A store for the input and one for the output."""
    if request.param == "local":
        return Store.of(f"{tmp_path}/in"), Store.of(f"{tmp_path}/out/")
    request.getfixturevalue(request.param)
    if request.param == "gs":
        root = f"gs://anonymous@{gcs.BUCKET}/{tmp_path.name}"
        return Store.of(f"{root}/in/"), Store.of(f"{root}/out")
    return Store.of(f"s3://{BUCKET}/{tmp_path.name}/in/"), Store.of(f"s3://{BUCKET}/{tmp_path.name}/out")


def opened(stores, overwrite=False, retry_failed=False, form=None, **made_by) -> PartsOutput:
    return PartsOutput(*stores, form, MADE_BY | made_by, overwrite, retry_failed)


def lines_of(part: InputPart, source: Store) -> list:
    return list(part.parse(*part.read(source)))


def do(part: InputPart, stores, form="jsonl", failed: tuple[str, ...] = ()) -> DonePart:
    """Do a part as a worker group does, with records that hold no texts."""
    known = earlier_records(part, stores[1], form)
    new = kept = Counts()
    data = b""
    for line in part.parse(*part.read(stores[0]), known):
        if isinstance(line, Kept):
            kept, record = kept + Counts.of(line.record), line.record
        else:
            is_failed = line.custom_id in failed
            body = None if is_failed else {"body": {"usage": {"completion_tokens": 3}}}
            error = {"code": "failed", "message": line.name} if is_failed else None
            record = {"id": f"batch_req_{line.digest}", "custom_id": line.custom_id, "response": body, "error": error}
            new += Counts.of(record)
        data += written(record)
    return write_part(DonePart(part, new, kept, data), stores[1], form)


def fill(output: PartsOutput, stores, count: int | None = None, failed: tuple[str, ...] = ()) -> None:
    for part in output.parts(2, 3)[:count]:
        output.take(do(part, stores, output.form, failed))


def ids_in(sink: Store, form="jsonl") -> list[str]:
    names = [name for name in sink.files() if name.endswith(form)]
    return [record["custom_id"] for name in names for record in records_of(sink.read(name), form)]


def put_lines(store: Store, name: str, documents) -> None:
    store.write(name, b"".join(json.dumps(each).encode() + b"\n" for each in documents))


@pytest.mark.parametrize("step", [1, 7, 100, 10_000])
def test_every_line_is_in_one_part_wherever_files_are_cut(tmp_path, step):
    rng = random.Random(step)
    text = "\n".join("x" * rng.randrange(30) for _ in range(40)) + rng.choice(["", "\n"])
    (tmp_path / "a").write_text(text)
    store, found = Store.of(str(tmp_path)), []
    for start in range(0, len(text), step):
        offset, data = store.lines("a", start, min(start + step, len(text)))
        assert text[offset : offset + len(data)] == data.decode()
        found.append(data.decode())
    assert "".join(found) == text


def test_a_run_over_a_directory(stores):
    """A run that is stopped in the middle and resumed does every line once, in the order of its file."""
    put_lines(stores[0], "a.jsonl", [chat(f"a{i}") for i in range(9)])
    put_lines(stores[0], "deep/b.jsonl", [chat(f"b{i}") for i in range(5)])
    stores[0].write("_success", b"")
    output = opened(stores)
    assert output.is_estimate and abs(output.survey.total - 14) <= 1
    fill(output, stores, count=2)
    output.close()
    again = opened(stores)
    done = again.survey.done
    assert 0 < done < 14 and len(ids_in(stores[1])) == done
    fill(again, stores)
    assert again.survey == Survey(14, 14, 0) and not again.parts(2, 3) and not again.is_estimate
    assert ids_in(stores[1]) == [f"a{i}" for i in range(9)] + [f"b{i}" for i in range(5)]
    again.close()


def test_lines_are_named_by_file_and_offset(stores):
    """A line is named by its file and byte offset, and its digest does not depend on how the file is divided into
    parts."""
    put_lines(stores[0], "a.jsonl", [chat(f"a{i}") for i in range(3)])
    with_parts = [line for part in opened(stores).parts(9, 1) for line in lines_of(part, stores[0])]
    size = len(json.dumps(chat("a0"))) + 1
    assert [line.name for line in with_parts] == [f"a.jsonl, byte {i * size}" for i in range(3)]
    whole = parse_line(size, json.dumps(chat("a1")).encode(), "a.jsonl", "byte")
    assert with_parts[1].digest == whole.digest, "wherever the file is cut"


def test_files_may_be_added_and_lines_at_the_end(stores):
    put_lines(stores[0], "a.jsonl", [chat("a0"), chat("a1")])
    first = opened(stores)
    fill(first, stores)
    first.close()
    put_lines(stores[0], "a.jsonl", [chat("a0"), chat("a1"), chat("a2")])
    put_lines(stores[0], "b.jsonl", [chat("b0")])
    second = opened(stores)
    assert second.survey.done == 2
    fill(second, stores)
    assert ids_in(stores[1]) == ["a0", "a1", "a2", "b0"]
    second.close()


def test_failed_lines_are_done_again_and_answers_stay(stores):
    """With `retry_failed` only failed lines are decoded again. Parts without failures are unchanged, and lines that
    fail again are not tried again in the same run."""
    put_lines(stores[0], "a.jsonl", [chat(f"a{i}") for i in range(9)])
    output = opened(stores)
    fill(output, stores, failed=("a1", "a2", "a7"))
    assert output.survey == Survey(9, 9, 3)
    output.close()
    before = {name: stores[1].read(name) for name in stores[1].files()}
    plain = opened(stores)
    assert not plain.parts(2, 3)
    plain.close()
    again = opened(stores, retry_failed=True)
    parts = again.parts(2, 3)
    assert again.survey.total == 9 and again.survey.done == 9 - sum(len(lines_of(part, stores[0])) for part in parts)
    done = [do(part, stores, failed=("a7",)) for part in parts]
    assert sum((each.new for each in done), start=Counts()).written == 3
    for each in done:
        again.take(each)
    assert again.survey == Survey(9, 9, 1) and not again.parts(2, 3), "one that failed again is not tried for ever"
    assert ids_in(stores[1]) == [f"a{i}" for i in range(9)]
    kept = {name: content for name, content in before.items() if ".0-failed" in name}
    assert kept and all(stores[1].read(name) == content for name, content in kept.items())
    again.close()


def test_replaced_part_is_deleted_on_resume(stores):
    """A run may be killed after it has written a new version of a part and before it has deleted the old one. The next
    run deletes the old one."""
    put_lines(stores[0], "a.jsonl", [chat("a0"), chat("a1")])
    output = opened(stores)
    (part,) = output.parts(1, 9)[:1]
    stores[1].write(part.output_name(Counts(2, 1), "jsonl"), b"old")
    stores[1].write(part.output_name(Counts(2, 0), "jsonl"), b"new")
    output.close()
    opened(stores).close()
    assert list(map(stores[1].read, stores[1].files())) == [b"new"]


@pytest.mark.parametrize(
    ("change", "made_by", "message"),
    [
        ({}, {"seed": 1}, "was made with other models, another --seed"),
        ({"a.jsonl": b"{}\n"}, {}, "is beyond the end of its input as it is now"),
        ({"a.jsonl": None}, {}, "belongs to no file of"),
    ],
)
def test_an_output_of_another_input_is_refused(stores, change, made_by, message):
    for name in ("a.jsonl", "b.jsonl"):
        put_lines(stores[0], name, [chat("a0"), chat("a1")])
    first = opened(stores)
    fill(first, stores)
    first.close()
    for name, content in change.items():
        stores[0].delete(name) if content is None else stores[0].write(name, content)
    with pytest.raises(ValueError, match=message) as caught:
        opened(stores, **made_by)
    assert "--overwrite to start from the beginning" in str(caught.value)
    fresh = opened(stores, overwrite=True, **made_by)
    assert fresh.survey.done == 0
    fresh.close()


def test_two_runs_cannot_write_one_directory(tmp_path):
    stores = Store.of(f"{tmp_path}/in"), Store.of(f"{tmp_path}/out")
    put_lines(stores[0], "a.jsonl", [chat("a0")])
    first = opened(stores)
    with pytest.raises(ValueError, match="is being written by another run"):
        opened(stores)
    first.close()
    opened(stores).close()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no lines; needed: files whose names end with .jsonl or .parquet"),
        ({"notes.txt": b""}, "holds no lines"),
        ({"a.jsonl": b"", "b.parquet": b""}, "holds both JSONL and Parquet files"),
        ({"b.parquet": b"not one"}, "b.parquet: "),
        ({"b.parquet": None}, "there is no column body; needed: custom_id, body"),
    ],
)
def test_inputs_without_lines_are_refused(stores, files, message):
    for name, content in files.items():
        stores[0].write(name, to_parquet(b"") if content is None else content)
    with pytest.raises(ValueError, match=message):
        opened(stores)


def test_addresses_that_pyarrow_does_not_know():
    with pytest.raises(ValueError, match=r"ftp://x: .*; allowed: a path, s3://BUCKET"):
        Store.of("ftp://x")


def test_parquet(stores):
    """Rows of Parquet become rows of Parquet. Bodies may be JSON texts or structures."""
    bodies = [{"messages": [{"role": "user", "content": "1?"}], "stop": "a"}, {"messages": [], "n": 2}, {"prompt": "x"}]
    table = pa.table({"custom_id": ["r0", "r1", "r2"], "body": [json.dumps(each) for each in bodies]})
    structs = pa.table({"custom_id": ["s0", "s1"], "body": [{"prompt": "x", "n": 1}, {"prompt": "y"}]})
    for name, rows in (("a.parquet", table), ("b.parquet", structs)):
        sink = pa.BufferOutputStream()
        pq.write_table(rows, sink, row_group_size=2)
        stores[0].write(name, sink.getvalue().to_pybytes())
    output = opened(stores)
    assert output.form == "parquet" and output.survey == Survey(5, 0, 0) and not output.is_estimate
    lines = [line for part in output.parts(9, 1) for line in lines_of(part, stores[0])]
    assert [line.body for line in lines[:3]] == bodies and lines[3].body == {"prompt": "x", "n": 1}
    assert lines[4].body == {"prompt": "y"} and {line.mistake for line in lines} == {None}
    assert [line.url.rsplit("/", 1)[1] for line in lines] == ["completions"] * 5
    assert lines[1].name == "a.parquet, row 2" and lines[2].url == completion("r2")["url"]
    fill(output, stores, failed=("r1",))
    assert ids_in(stores[1], "parquet") == ["r0", "r1", "r2", "s0", "s1"] and output.survey == Survey(5, 5, 1)
    output.close()
    again = opened(stores, retry_failed=True)
    fill(again, stores)
    assert again.survey == Survey(5, 5, 0) and len(ids_in(stores[1], "parquet")) == 5
    again.close()


def test_a_survey_of_a_file_may_be_made_twice(pair, tmp_path):
    """A second survey of the same open output file gives the same records as the first."""
    source = write_lines(tmp_path / "in.jsonl", [chat("a"), chat("b")])
    answer_file(pair, source, tmp_path / "out.jsonl")
    with OutputFile(tmp_path / "out.jsonl", overwrite=False) as output:
        assert survey(source, output, RequestReader(pair, 0), PRINT) == Survey(2, 2, 0)
        assert len(list(output.records())) == 2


@pytest.mark.parametrize(
    ("lines", "groups", "most", "each"),
    [
        (100, 1, None, 25),
        (100, 8, None, 100 / 32),
        (100, 1, 3, 3),
        (3, 8, None, 1),
        (0, 1, None, 1),
        (1_000_000, 8, None, 1000),
        (100_000_000, 8, None, 10_000),
        (100_000_000, 8, 2000, 2000),
        (100_000_000, 8, 10**9, 100_000_000 / 32),
    ],
)
def test_the_size_of_parts(lines, groups, most, each):
    assert _part_lines(lines, groups, most) == each
