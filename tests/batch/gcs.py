"""A local emulator in place of Google Cloud Storage. It runs in its own process, because pyarrow holds the interpreter
lock while it waits for a response."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

BUCKET = "questions"
SERVE = """
import sys
from gcp_storage_emulator.server import create_server
server = create_server("127.0.0.1", int(sys.argv[1]), in_memory=True, default_bucket=sys.argv[2])
server.start()
print("listens", flush=True)
"""


@contextmanager
def gcs_server() -> Iterator[dict[str, str]]:
    """Run the emulator with a bucket. Yields the environment variables of processes that use it as
    `gs://anonymous@BUCKET/..`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-c", SERVE, str(port), BUCKET], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == "listens\n"
        yield {"CLOUD_STORAGE_EMULATOR_ENDPOINT": f"http://127.0.0.1:{port}"}
    finally:
        server.terminate()
        server.wait(10)
        server.stdout.close()
