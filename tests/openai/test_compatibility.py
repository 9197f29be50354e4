"""The table of vLLM's endpoints and fields in docs/openai.md equals the one that the code generates, and the code's
list matches the server."""

from __future__ import annotations

from pathlib import Path

from services.openai import compatibility
from services.openai.bodies import CHAT, NAMES
from tests.openai.asking import ask, chat, post

PAGE = Path(__file__).resolve().parents[2] / "docs" / "openai.md"


def test_the_page_has_the_table_of_the_code():
    _, begin, rest = PAGE.read_text().partition(compatibility.BEGIN)
    written, end, _ = rest.partition(compatibility.END)
    assert begin and end
    assert written.strip() == compatibility.table(), "run python -m services.openai.compatibility, and paste"


def test_endpoints_are_those_of_the_server(service):
    assert set(ask(service, "GET", "/openapi.json").json["paths"]) >= compatibility.OWN
    missing = set(compatibility.ENDPOINTS) - compatibility.OWN
    assert missing
    for path in missing:
        assert post(service, b"{}", path).status == 404


def test_fields_that_are_not_here_are_refused(service):
    """Fields that the table lists as missing are refused by name."""
    missing = set(compatibility.FIELDS[CHAT]) - NAMES[True]
    assert missing
    for name in missing:
        assert post(service, chat(**{name: 1})).error["param"] == name
