"""Lines of the input: what a request line must look like around its body. Knows nothing about models, settings or
answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from services.openai.document import kind_of, parse
from services.openai.requests import CHAT, COMPLETIONS

URLS = (COMPLETIONS, CHAT)
FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class Line:
    """One request line, right or wrong."""

    number: int
    """In the file, from 1; blank lines count, though they hold nothing."""
    digest: str
    """Of its number and its text: two lines of the same digest are the same line."""
    custom_id: str | None = None
    """None: it could not be read."""
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    mistake: str | None = None
    """Why it is no request; None if it is one. The body is somebody else's business."""


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and content of every line that is not blank. Holds one line at a time."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield number, raw


def parse_line(number: int, raw: bytes) -> Line:
    """Never raises: a line that is no request says so."""
    digest = blake2b(b"%d:%b" % (number, raw.strip()), digest_size=12).hexdigest()
    try:
        document = parse(raw)
    except ValueError as error:
        return Line(number, digest, mistake=str(error))
    if not isinstance(document, dict):
        return Line(
            number, digest, mistake=f"this is {kind_of(document)}; allowed: a JSON object with {', '.join(FIELDS)}"
        )
    custom_id = document.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return Line(number, digest, mistake=f"custom_id={custom_id!r}; allowed: a string that names this line")
    if mistake := _mistake(document):
        return Line(number, digest, custom_id, mistake=mistake)
    return Line(number, digest, custom_id, document["url"], document["body"])


def _mistake(document: dict[str, Any]) -> str | None:
    if unknown := [name for name in document if name not in FIELDS]:
        return f"{unknown[0]} is not a field of a request line; allowed: {', '.join(FIELDS)}"
    if document.get("method") != "POST":
        return f"method={document.get('method')!r}; allowed: 'POST'"
    if document.get("url") not in URLS:
        return f"url={document.get('url')!r}; allowed: {', '.join(URLS)}"
    if not isinstance(document.get("body"), dict):
        return f"body={document.get('body')!r}; allowed: an object with the request"
    return None
