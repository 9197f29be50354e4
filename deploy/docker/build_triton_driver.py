"""Builds Triton's binding to the CUDA driver into $TRITON_CACHE_DIR.

Triton builds this file on first use, which needs a C compiler. The final image has none, so it is built here.
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
        # An empty library to link against: the real libcuda.so.1 comes with the host's driver.
        command = ["gcc", "-shared", f"-Wl,-soname,{DRIVER}", "-o", f"{folder}/{DRIVER}", "-x", "c", "/dev/null"]
        subprocess.run(command, check=True)
        path = Path(folder, f"{NAME}.c")
        path.write_text(source)
        built = _build(NAME, str(path), folder, [str(home / "lib"), folder], [str(home / "include")], [DRIVER], [])
        os.environ["PATH"] = ""  # the cache key includes the output of `file`, which the final image does not have
        key = hashlib.sha256((source + platform_key()).encode()).hexdigest()
        put = get_cache_manager(key).put(
            Path(built).read_bytes(), f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}", binary=True
        )
    print(f"built {put}")


if __name__ == "__main__":
    main()
