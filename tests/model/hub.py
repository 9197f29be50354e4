"""A local server that speaks the protocol of the Hugging Face hub, and commands that download from it."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.model.hub_command import command

COMMIT = "c" * 40
TOKEN = "hf_right"
UNUSED = {"README.md": b"# a model", "pytorch_model.bin": b"pickled", "onnx/model.onnx": b"graph", "figure.png": b"png"}
"""Files of repositories that no command needs."""


@dataclass
class Hub:
    """Repositories by name, their files, and the requests that the server has received."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)
    """Number of bytes after which the next answer with this file ends."""
    url: str = ""

    def got(self) -> list[str]:
        """Return the files whose contents were requested, in order."""
        return [one.rpartition("/")[2] for one in self.requests if one.startswith("GET") and "/resolve/" in one]


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
            api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?/?", path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            match = api or file
            if match is None:
                return self.refuse(404, "EntryNotFound")
            name, revision = match[1], (api[3] if api else file[2]) or "main"
            if name not in hub.repositories:
                return self.refuse(401, "RepoNotFound")
            if file and name in hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.refuse(401, "GatedRepo")
            if revision not in ("main", COMMIT):
                return self.refuse(404, "RevisionNotFound")
            files = hub.repositories[name]
            if api and api[2] == "tree":
                entries = [
                    {"type": "file", "path": path, "size": len(held), "oid": hashlib.sha1(held).hexdigest()}
                    for path, held in files.items()
                ]
                return self.send(json.dumps(entries).encode())
            if api:
                siblings = [{"rfilename": path, "size": len(held)} for path, held in files.items()]
                info = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}
                return self.send(json.dumps(info).encode())
            if file[3] not in files:
                return self.refuse(404, "EntryNotFound")
            held = files[file[3]]
            tag = {"ETag": f'"{hashlib.sha256(held).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                first, last = int(part[1]), int(part[2] or len(held) - 1)
                tag["Content-Range"] = f"bytes {first}-{last}/{len(held)}"
                return self.send(held[first : last + 1], tag, 206, file[3])
            return self.send(held, tag, 200, file[3])

        def refuse(self, status: int, code: str) -> None:
            self.send(b"", {"X-Error-Code": code, "X-Error-Message": code}, status)

        def send(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200, name: str = "") -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), "Content-Type": "application/json"}.items():
                self.send_header(key, value)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                cut = hub.cut.pop(name, None)
                self.wfile.write(body[:cut])
                self.close_connection = self.close_connection or cut is not None

    return Handler


def files_of(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}


@contextmanager
def serving_hub(repositories: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    """Serve these repositories, each with files by name, on a free port."""
    hub = Hub(repositories)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()


@dataclass(frozen=True)
class Ran:
    returncode: int | None
    stdout: str
    stderr: str


def run(hub: Hub, home: Path, *arguments: object, **environment: str) -> Ran:
    """Run `smcserve` in a process of its own, since huggingface_hub reads the environment when it is imported. The
    process is forked from one that has imported the rest."""
    set_ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "COLUMNS": "400", "HF_HUB_DISABLE_XET": "1"} | environment
    fork = multiprocessing.get_context("forkserver")
    fork.set_forkserver_preload(["tests.model.hub_command"])
    out, err = home.with_suffix(".out"), home.with_suffix(".err")
    process = fork.Process(target=command, args=([str(argument) for argument in arguments], set_, out, err))
    process.start()
    process.join(240)
    return Ran(process.exitcode, out.read_text(), err.read_text())
