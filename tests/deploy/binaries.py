"""Prometheus' programs: those installed here, or those of Debian's package, which is unpacked but not installed, so
that no daemon starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache"


def binary(name: str) -> str:
    """Return the path of `promtool` or `prometheus`. Downloads the package if neither is installed; fails the test if
    that does not work."""
    found = shutil.which(name)
    if found:
        return found
    unpacked = CACHE / "prometheus"
    if not unpacked.is_dir():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as work:
            _fetch(Path(work), name)
            try:
                os.rename(Path(work) / "unpacked", unpacked)
            except OSError:  # another test process was faster
                assert unpacked.is_dir()
    return str(unpacked / "usr/bin" / name)


def _fetch(work: Path, name: str) -> None:
    """Download and unpack the package, with the machine's package lists or, if there are none, with private lists,
    which need no root."""
    (work / "lists/partial").mkdir(parents=True)
    (work / "archives/partial").mkdir(parents=True)
    own = ("-o", f"Dir::State::lists={work}/lists", "-o", f"Dir::Cache={work}")
    attempts = ((("download",), ()), (("update", "download"), own))
    said = ""
    for commands, options in attempts:
        for command in commands:
            package = ("prometheus",) if command == "download" else ()
            try:
                ran = subprocess.run(
                    ["apt-get", *options, command, *package], cwd=work, capture_output=True, text=True, timeout=120
                )
            except (FileNotFoundError, subprocess.TimeoutExpired) as error:
                raise AssertionError(
                    f"there is no {name} here, and it could not be fetched ({error}); {REMEDY}"
                ) from error
            said = ran.stderr
        if packages := list(work.glob("prometheus_*.deb")):
            subprocess.run(["dpkg", "-x", packages[0], work / "unpacked"], check=True)
            return
    raise AssertionError(f"there is no {name} here, and it could not be fetched: {said.strip()}; {REMEDY}")


REMEDY = (
    "install Prometheus 2.42 or newer, with promtool, such that both are on the PATH (Debian: apt-get install "
    "prometheus)"
)
