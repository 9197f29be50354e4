"""A tokenizer's files as one archive, for routers that cannot read this machine's disk."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from smg_grpc_proto.generated import common_pb2 as pb

FILES = (
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "chat_template.json",
    ),
    *("config.json", "generation_config.json"),
)
CHUNK = 64 << 10
"""Bytes of one message."""


def tokenizer_chunks(directory: Path) -> Iterator[pb.GetTokenizerChunk]:
    """A zip archive of what there is of `FILES`, the same at every call; its SHA-256 comes with the last chunk. Raises
    OSError."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in FILES:
            if (path := directory / name).is_file():
                archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    for begin in range(0, len(data), CHUNK):
        last = begin + CHUNK >= len(data)
        yield pb.GetTokenizerChunk(
            data=data[begin : begin + CHUNK], sha256=hashlib.sha256(data).hexdigest() if last else ""
        )
