"""Tokens that change while the service runs: the effect on callers of both APIs, and the log messages."""

from __future__ import annotations

import logging
import urllib.error
import urllib.request
from pathlib import Path

from services.client import ServiceError
from tests.gateway.harness import LONG, Service, serving

NO_TOKEN = "holds no token"


def swap(path: Path, text: str) -> None:
    """Replace a file atomically by a new file of the same name, as Kubernetes and careful editors do."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def lets_in(service: Service, token: str) -> bool:
    """Whether both APIs accept the token. Fails if they differ."""
    with service.client(token=token) as client:
        try:
            grpc = client.server_info().serving
        except ServiceError as error:
            assert "Bearer TOKEN" in str(error)
            grpc = False
    url = f"http://127.0.0.1:{service.gateway.http_port}/v1/models"
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            http = answer.status == 200
    except urllib.error.HTTPError as error:
        assert error.code == 401
        http = False
    assert grpc is http
    return grpc


def test_tokens_are_changed_without_a_drain(pair, tmp_path):
    """Changed tokens take effect at once. A call that is running when its token is removed is answered completely."""
    path = tmp_path / "tokens"
    path.write_text("old\n")
    with serving(pair, http_port=0, auth_token_file=path) as service:
        assert lets_in(service, "old") and not lets_in(service, "new")
        swap(path, "old\nnew\n")
        assert lets_in(service, "old") and lets_in(service, "new")
        with service.client(token="old") as caller, caller.stream("x", **LONG | {"max_tokens": 40}) as stream:
            next(stream)
            swap(path, "new\n")
            assert lets_in(service, "new") and not lets_in(service, "old")
            assert sum(1 for _ in stream) > 0 and stream.completion.usage.completion_tokens == 40
        path.write_text("third\n")
        assert lets_in(service, "third") and not lets_in(service, "new"), "written in the old file, too"


def test_a_broken_file_keeps_the_tokens_and_is_said_once(pair, tmp_path, caplog):
    """While the file is invalid, the old tokens stay valid and the log has one error. The log never contains a
    token."""
    caplog.set_level(logging.INFO, "services.security")
    path = tmp_path / "tokens"
    path.write_text("old\n")
    with serving(pair, http_port=0, auth_token_file=path) as service:
        for break_it, said in (
            (lambda: swap(path, "# nobody yet\n"), NO_TOKEN),
            (lambda: swap(path, "se cret\n"), "line 1 is not a token"),
            (path.unlink, "No such file"),
        ):
            caplog.clear()
            break_it()
            assert all(lets_in(service, "old") for _ in range(3)) and not lets_in(service, "se")
            (line,) = caplog.records
            assert line.levelno == logging.ERROR and said in line.getMessage() and str(path) in line.getMessage()
            assert "cret" not in line.getMessage()
        caplog.clear()
        swap(path, "new\n")
        assert lets_in(service, "new") and not lets_in(service, "old")
        (line,) = caplog.records
        assert line.levelno == logging.INFO and "new" not in line.getMessage().split()


def test_a_secret_of_kubernetes(pair, tmp_path):
    """A mounted Kubernetes secret: its files are links into a directory that is itself named by a link. An update moves
    that link and touches no file."""
    for version, token in (("1", "old"), ("2", "new")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "tokens").write_text(f"{token}\n")
    data = tmp_path / "..data"
    data.symlink_to("1")
    (tmp_path / "tokens").symlink_to("..data/tokens")
    with serving(pair, http_port=0, auth_token_file=tmp_path / "tokens") as service:
        assert lets_in(service, "old") and not lets_in(service, "new")
        (tmp_path / "next").symlink_to("2")
        (tmp_path / "next").replace(data)
        assert lets_in(service, "new") and not lets_in(service, "old")
