"""The fields around the body of a request line: they are read, or refused with a message that names what is allowed."""

from __future__ import annotations

import json

import pytest

from services.batch.lines import parse_line, read_lines
from tests.batch.asking import chat, line


def test_a_line_is_read():
    read = line(chat("a", "Hi"), 7)
    assert (read.number, read.custom_id, read.url, read.mistake) == (7, "a", "/v1/chat/completions", None)
    assert read.body["messages"][0]["content"] == "Hi"


@pytest.mark.parametrize(
    ("raw", "mistake"),
    [
        (b"not json\n", "this is not JSON: Expecting value at character 1"),
        (b'{"custom_id": "a"', "this is not JSON: Expecting ',' delimiter at character 18"),
        (b'{"custom_id": "\xff"}', "this cannot be read as JSON"),
        (b'{"custom_id": ' + b"9" * 5000 + b"}", "this cannot be read as JSON"),
        (b"[" * 100_000, "this is nested too deeply"),
        (b"[1]", "this is a list; allowed: a JSON object with custom_id, method, url, body"),
        (b"null", "this is null; allowed: a JSON object"),
        (b"{}", "custom_id=None; allowed: a string"),
        (b'{"custom_id": 5}', "custom_id=5; allowed: a string"),
        (b'{"custom_id": ""}', "custom_id=''; allowed: a string"),
    ],
)
def test_a_line_without_a_name(raw, mistake):
    read = parse_line(3, raw)
    assert read.custom_id is None and mistake in read.mistake


@pytest.mark.parametrize(
    ("change", "mistake"),
    [
        ({"metod": "POST"}, "metod is not a field of a request line; allowed: custom_id, method, url, body"),
        ({"method": "GET"}, "method='GET'; allowed: 'POST'"),
        ({"url": "/v1/embeddings"}, "url='/v1/embeddings'; allowed: /v1/completions, /v1/chat/completions"),
        ({"url": ["/v1/completions"]}, "allowed: /v1/completions"),
        ({"body": None}, "body=None; allowed: an object"),
        ({"body": "Hi"}, "body='Hi'; allowed: an object"),
    ],
)
def test_a_wrong_line_keeps_its_name(change, mistake):
    read = line(chat("a") | change)
    assert read.custom_id == "a" and mistake in read.mistake


def test_blank_lines_hold_nothing_but_count(tmp_path):
    """Blank lines are skipped, but count in the numbers of later lines."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n{}\n  \n\r\n[]")
    assert list(read_lines(path)) == [(2, b"{}\n"), (5, b"[]")]


def test_the_digest_is_that_of_number_and_text():
    raw = json.dumps(chat("a")).encode()
    assert parse_line(1, raw).digest == parse_line(1, raw + b"\r\n").digest
    assert len({parse_line(1, raw).digest, parse_line(2, raw).digest, parse_line(1, raw + b"x").digest}) == 3
