"""Writes the lock files of the images and of `make install`: every package with its version and hashes, within
constraints.txt.

Packages keep their locked versions unless constraints.txt requires another one. To upgrade all packages, delete the
lock files first.

python deploy/docker/lock.py
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCKS = Path(__file__).parent / "locks"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEADER = "# Made by deploy/docker/lock.py; not to be changed by hand.\n"
OLDEST_PYTHON = PROJECT["project"]["requires-python"].removeprefix(">=")


APART = {"install": "torch"}
"""Lock -> package with a lock of its own: `make install` with local wheels takes a file of it that is not on PyPI."""


def inputs() -> dict[str, list[str]]:
    """Direct requirements of each lock file. PyTorch for CPUs is not on PyPI, so the cpu lock contains its dependencies
    but not PyTorch itself. `install` is what `make install` installs, with `uv`."""
    extras = PROJECT["project"]["optional-dependencies"]
    serving = PROJECT["project"]["dependencies"] + extras["batch"]
    torch = [
        need
        for need in importlib.metadata.requires("torch") or ()
        if not re.match(r"nvidia|cuda|triton", need) and "extra ==" not in need
    ]
    return {
        "build": PROJECT["build-system"]["requires"],
        "cpu": [need for need in serving if not need.startswith("torch")] + torch,
        "router": ["smg"],
        "cuda": serving + extras["gpu"],
        "uv": ["uv"],
        "install": PROJECT["project"]["dependencies"] + extras["dev"],
    }


def write(name: str, needs: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "--quiet",
        "--generate-hashes",
        "--universal",
        "--no-header",
        "--no-annotate",
    ]
    command += [
        "--only-binary",
        ":all:",
        "--python-version",
        OLDEST_PYTHON,
        "-c",
        ROOT / "constraints.txt",
        "-o",
        LOCKS / f"{name}.txt",
        "-",
    ]
    subprocess.run(command, input="\n".join(needs), text=True, check=True)
    lock = LOCKS / f"{name}.txt"
    text = lock.read_text().removeprefix(HEADER)
    if name in APART:
        own = re.search(rf"^{APART[name]}==(?:.*\\\n)*.*\n", text, re.MULTILINE)
        assert own is not None
        (LOCKS / f"{APART[name]}.txt").write_text(HEADER + own[0])
        text = text.replace(own[0], "")
    lock.write_text(HEADER + text)


if __name__ == "__main__":
    LOCKS.mkdir(exist_ok=True)
    for name, needs in inputs().items():
        write(name, needs)
