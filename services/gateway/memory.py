"""Memory that was freed and that the C library keeps for later: after large requests it is given back to the
machine."""

from __future__ import annotations

import asyncio
import ctypes
import ctypes.util
from collections.abc import Callable


class Trimmer:
    """Gives freed memory back some time after it was wanted, however often that is. Use it in one asyncio loop."""

    def __init__(self, delay: float = 1.0) -> None:
        """`delay` in seconds."""
        self._delay, self._trim = delay, _malloc_trim()
        self._planned: asyncio.TimerHandle | None = None

    def plan(self) -> None:
        if self._planned is None and self._trim is not None:
            self._planned = asyncio.get_running_loop().call_later(self._delay, self._begin)

    def close(self) -> None:
        if self._planned is not None:
            self._planned.cancel()

    def _begin(self) -> None:
        self._planned = None
        assert self._trim is not None
        asyncio.get_running_loop().run_in_executor(None, self._trim, 0)


def _malloc_trim() -> Callable[[int], int] | None:
    """Of glibc; other C libraries have none, and need none."""
    return getattr(ctypes.CDLL(ctypes.util.find_library("c")), "malloc_trim", None)
