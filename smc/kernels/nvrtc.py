"""CUDA C++ that is compiled by NVRTC, and kept in Triton's cache on disk. Knows nothing about what it computes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from triton.runtime.cache import CacheManager, get_cache_manager


def compiled(name: str, source: bytes, options: list[str], *, form: str = "CUBIN") -> bytes:
    """Return the compiled source, from the cache if it is there. `form`: CUBIN, machine code for the architecture that
    the options name, or PTX, which the driver translates. Raises RuntimeError with the compiler's words, and
    ImportError without cuda-bindings."""
    cache, file = _cache(name, source, options, form)
    if (path := cache.get_file(file)) is not None:
        return Path(path).read_bytes()
    code = compile_source(name, source, options, form)
    cache.put(code, file, binary=True)
    return code


def is_compiled(name: str, source: bytes, options: list[str], *, form: str = "CUBIN") -> bool:
    """Return whether the cache has what `compiled` returns."""
    cache, file = _cache(name, source, options, form)
    return cache.get_file(file) is not None


def _cache(name: str, source: bytes, options: list[str], form: str) -> tuple[CacheManager, str]:
    """Return where the compiled source is kept, and the name of its file there."""
    parts = (source, nvrtc_version().encode(), form.encode(), *map(str.encode, options))
    return get_cache_manager(hashlib.sha256(b"\0".join(parts)).hexdigest()), f"{name}.{form.lower()}"


def nvrtc_version() -> str:
    from cuda.bindings import nvrtc

    return ".".join(map(str, done(nvrtc.nvrtcVersion())))


def compile_source(name: str, source: bytes, options: list[str], form: str) -> bytes:
    """As `compiled`, without the cache."""
    from cuda.bindings import nvrtc

    program = done(nvrtc.nvrtcCreateProgram(source, f"{name}.cu".encode(), 0, [], []))
    try:
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if code:
            log = b" " * done(nvrtc.nvrtcGetProgramLogSize(program))
            done(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"{name}.cu does not compile: {log.decode(errors='replace')}")
        made = b" " * done(getattr(nvrtc, f"nvrtcGet{form}Size")(program))
        done(getattr(nvrtc, f"nvrtcGet{form}")(program, made))
        return made
    finally:
        done(nvrtc.nvrtcDestroyProgram(program))


def done(answer: tuple[Any, ...]) -> Any:
    """Return what a call of the driver or of NVRTC returns besides its code. Raises RuntimeError with the code if it
    is not success."""
    code, *values = answer
    if code:
        raise RuntimeError(f"CUDA: {code!r}")
    return values[0] if len(values) == 1 else values
