"""Runs a command line of `smcserve` in a process that is forked from one in which this module is imported, with all
modules that the command needs except huggingface_hub, which reads the environment when it is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import smc.local_engine  # noqa: F401
from services.cli.main import run


def command(arguments: Sequence[str], environment: dict[str, str], out: Path, err: Path) -> None:
    """`environment` replaces what there is for huggingface_hub. What is said goes to the files."""
    for name in [name for name in os.environ if name.startswith("HF_")]:
        del os.environ[name]
    os.environ.update(environment)
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        del sys.modules[name]  # of a server that others have started
    for stream, path in ((sys.stdout, out), (sys.stderr, err)):
        with path.open("wb") as opened:
            os.dup2(opened.fileno(), stream.fileno())
    sys.exit(run(list(arguments)))
