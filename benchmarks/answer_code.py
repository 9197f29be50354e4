"""Runs the Python code of an answer together with tests, in a process with limits. Knows nothing about models.

The process is Python without site packages and environment, in an empty directory. It may use so much CPU time and
memory, may write nothing to files and start no other process; on Linux, where user namespaces are allowed, it has no
network. These are limits against accidents, not a sandbox: the code can read, empty, rename and delete files as its
user can, end the user's processes, and find out how to pass. For models that you do not trust run `smcserve eval` in a
container."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LIMITED = Path(__file__).with_name("limited_process.py")
"""Program of the process."""
BLOCK = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
"""A block of code in Markdown, which may be cut."""


@dataclass(frozen=True)
class CodeLimits:
    """Limits of a process."""

    cpu_seconds: int = 2
    wall_seconds: float = 30.0
    memory: int = 1 << 30
    """Bytes of address space."""


def code_of(text: str) -> str:
    """Return the code of an answer: its first block that defines a function, else its first block, else the text."""
    blocks = BLOCK.findall(text)
    return next((block for block in blocks if "def " in block), blocks[0] if blocks else text)


def passes(text: str, tests: str, limits: CodeLimits = CodeLimits()) -> bool:
    """Return whether the code of an answer and then the tests, which are Python code too, run to their end."""
    word = secrets.token_hex()
    task = {
        "code": code_of(text),
        "tests": tests,
        "word": word,
        "cpu_seconds": limits.cpu_seconds,
        "memory": limits.memory,
    }
    command = [sys.executable, "-I", "-S", "-B", str(LIMITED)]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as given,
    ):
        given.write(json.dumps(task).encode())
        given.seek(0)
        with subprocess.Popen(
            command,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        ) as process:
            try:
                process.wait(limits.wall_seconds)
            except subprocess.TimeoutExpired:
                return False
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            assert process.stdout is not None
            # Read at the end, so that code that writes without end waits for the pipe instead of filling our memory.
            os.set_blocking(process.stdout.fileno(), False)
            return process.stdout.read(len(word) + 1) == word.encode()
