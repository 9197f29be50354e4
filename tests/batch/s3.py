"""A local server of moto in place of S3."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

SETTINGS = {
    "AWS_ACCESS_KEY_ID": "anything",
    "AWS_SECRET_ACCESS_KEY": "anything",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
BUCKET = "questions"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Run the server with a bucket. Yields the environment variables of processes that use it."""
    from moto.server import ThreadedMotoServer  # two seconds, which not every process of tests needs
    from pyarrow.fs import S3FileSystem

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = {"access_key": "anything", "secret_key": "anything", "region": "us-east-1", "scheme": "http"}
        S3FileSystem(**options, endpoint_override=f"{host}:{port}", allow_bucket_creation=True).create_dir(BUCKET)
        yield SETTINGS | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    finally:
        server.stop()
