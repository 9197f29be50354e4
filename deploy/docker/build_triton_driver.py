"""Builds the one part of Triton that needs a C compiler, which the final image lacks: its binding to CUDA's driver.
Into $TRITON_CACHE_DIR.

Triton would build the same file on its first use, and finds this one in its place.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from triton.backends import nvidia
from triton.runtime.build import _build, platform_key
from triton.runtime.cache import get_cache_manager

NAME, DRIVER = "cuda_utils", "libcuda.so.1"


def main() -> None:
    home = Path(nvidia.__path__[0])
    source = (home / "driver.c").read_text()
    with tempfile.TemporaryDirectory() as folder:
        # Linked by its name alone: the real one comes with the host's driver.
        command = ["gcc", "-shared", f"-Wl,-soname,{DRIVER}", "-o", f"{folder}/{DRIVER}", "-x", "c", "/dev/null"]
        subprocess.run(command, check=True)
        path = Path(folder, f"{NAME}.c")
        path.write_text(source)
        built = _build(NAME, str(path), folder, [str(home / "lib"), folder], [str(home / "include")], [DRIVER], [])
        os.environ["PATH"] = (
            ""  # the key holds what the program `file` says of Python, and the final image has no `file`
        )
        key = hashlib.sha256((source + platform_key()).encode()).hexdigest()
        put = get_cache_manager(key).put(
            Path(built).read_bytes(), f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}", binary=True
        )
    print(f"built {put}")


if __name__ == "__main__":
    main()
