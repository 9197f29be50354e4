"""Of how many variants a kernel is compiled.

Triton compiles a kernel anew for integers that are 1 or multiples of 16, and for pointers at multiples of 16 bytes,
where more is loaded at once. A few numbers a row gain nothing by it, and who brings a size that nobody had before would
wait for the compiler."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton


def one_variant(*wide: str) -> Callable[[Callable[..., None]], Any]:
    """`triton.jit` of a kernel that is the same for all sizes and places of its arguments, but those named, of which
    much is loaded at once. Constants and types make others."""

    def compiled(kernel: Callable[..., None]) -> Any:
        parameters = inspect.signature(kernel).parameters
        assert set(wide) <= set(parameters), f"{kernel.__name__} has {list(parameters)}"
        others = [
            name for name, each in parameters.items() if "constexpr" not in str(each.annotation) and name not in wide
        ]
        return triton.jit(kernel, do_not_specialize=others)

    return compiled
