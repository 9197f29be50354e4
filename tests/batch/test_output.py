"""The output file: it holds whole lines, an incomplete last line is cut off, and a file that is not an output is left
untouched."""

from __future__ import annotations

import json

import pytest

from services.batch.output_file import OutputFile

RECORDS = [
    {"id": f"batch_req_{i}", "custom_id": name, "response": None, "error": {"code": "x"}}
    for i, name in enumerate(["a", "ü", None])
]


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "out.jsonl"
    with OutputFile(path, False) as file:
        assert list(file.records()) == []
        for record in RECORDS:
            file.append(record)
    return path


def test_what_is_written_is_read(written):
    assert len(written.read_bytes().splitlines()) == 3
    with OutputFile(written, False) as file:
        assert list(file.records()) == RECORDS


def test_a_line_is_in_the_file_when_append_returns(tmp_path):
    path = tmp_path / "out.jsonl"
    with OutputFile(path, False) as file:
        list(file.records())
        file.append(RECORDS[0])
        assert json.loads(path.read_text()) == RECORDS[0]


@pytest.mark.parametrize("kept", [1, 5, 20, 60])
def test_a_torn_last_line_is_cut(written, kept):
    whole = written.read_bytes()
    two = b"".join(whole.splitlines(keepends=True)[:2])
    written.write_bytes(whole[: len(two) + kept])
    with OutputFile(written, False) as file:
        assert list(file.records()) == RECORDS[:2]
        file.append(RECORDS[2])
    assert written.read_bytes() == whole


def test_a_whole_line_without_its_end_is_cut_too(written):
    whole = written.read_bytes()
    written.write_bytes(whole[:-1])
    with OutputFile(written, False) as file:
        assert list(file.records()) == RECORDS[:2]
    assert written.read_bytes() == b"".join(whole.splitlines(keepends=True)[:2])


@pytest.mark.parametrize(
    "text",
    [
        "my notes\n",
        "my notes",
        '{"id": "other"}\n',
        '{"id": "other"}',
        "{}\n{}\n",
        "[1]\n",
        "\n",
        json.dumps(RECORDS[0]) + "\nmy notes",
    ],
)
def test_a_foreign_file_is_refused_and_left_alone(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with (
        OutputFile(path, False) as file,
        pytest.raises(ValueError, match="not an answer of this command; give another output file"),
    ):
        list(file.records())
    assert path.read_text() == text


def test_overwrite_starts_anew(written):
    with OutputFile(written, True) as file:
        assert list(file.records()) == []
    assert written.read_bytes() == b""


def test_two_runs_do_not_write_one_file(written):
    whole = written.read_bytes()
    with OutputFile(written, False), pytest.raises(ValueError, match="being written by another run"):
        OutputFile(written, True)
    assert written.read_bytes() == whole
    with OutputFile(written, False):
        pass


def test_half_a_character_is_written_as_it_was_read(tmp_path):
    path = tmp_path / "out.jsonl"
    record = RECORDS[0] | {"custom_id": json.loads('"\\ud800x"')}
    with OutputFile(path, False) as file:
        list(file.records())
        file.append(record)
    with OutputFile(path, False) as file:
        assert list(file.records()) == [record]
