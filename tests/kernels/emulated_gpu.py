"""A CPU as the machine of `smc.kernels.megakernel`: the kernel is compiled by g++ with the functions of
`emulated_gpu.h` in place of the GPU's instructions."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from smc.kernels import megakernel
from smc.kernels.megakernel import Launch, Params

COMPILER = "g++"
HERE, KERNEL = Path(__file__).parent, Path(megakernel.__file__).with_suffix(".cu")
FILES = (HERE / "emulated_gpu.h", KERNEL, HERE / "emulated_gpu.cpp")
SOURCE = "".join(f'#include "{file}"\n' for file in FILES)
OPTIONS = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"]
if platform.machine() == "x86_64":
    # Shared memory and the block are variables of a thread, every access to which would call a function.
    OPTIONS.append("-mtls-dialect=gnu2")
LINKED = ["-shared", "-fPIC", "-pthread", "-Wl,-Bsymbolic"]
FOLDER = Path(tempfile.gettempdir()) / "smcserve-emulated-gpu"
"""Compiled kernels, by the hash of what they are made of."""


class EmulatedGpu:
    """`eager`: copies are done at once instead of as late as the kernel's waits allow."""

    def __init__(self, multiprocessors: int = 4, *, eager: bool = False) -> None:
        self.multiprocessors, self._eager = multiprocessors, eager

    def load(self, given: dict[str, Any]) -> Launch:
        kernel = ctypes.CDLL(str(_compiled(given | {"EAGER": int(self._eager)})))

        def launch(params: Params) -> None:
            assert kernel.run(ctypes.byref(params)) == 0, "threads of the kernel wait without end"

        return launch


def needs_compiler() -> None:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"needs {COMPILER}")


def complaint(given: dict[str, Any]) -> str:
    """Return what the compiler says against the kernel with these constants, or "" if it takes it. No code is made."""
    command = [COMPILER, *OPTIONS, *_defined(given | {"EAGER": 0}), "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, input=SOURCE, text=True, capture_output=True).stderr


def _defined(given: dict[str, Any]) -> list[str]:
    return [f"-D{name}={value}" for name, value in sorted(given.items())]


def _compiled(given: dict[str, Any]) -> Path:
    defined = _defined(given)
    parts = [*(file.read_bytes() for file in FILES), *map(str.encode, [*OPTIONS, *defined])]
    made = FOLDER / (hashlib.sha256(b"\0".join(parts)).hexdigest() + ".so")
    if not made.exists():
        FOLDER.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=FOLDER, suffix=".so", delete=False) as room:
            command = [COMPILER, *OPTIONS, *defined, *LINKED, "-x", "c++", "-", "-o", room.name]
            subprocess.run(command, input=SOURCE, text=True, check=True)
        Path(room.name).rename(made)
    return made
