"""How kernels are launched: programmatic dependent launch, how many variants of a kernel are compiled, and which
program handles which batch indices. Knows nothing about what kernels compute.

**Programmatic dependent launch (PDL).** A kernel starts while the kernel before it ends. The kernels of a decoding step
take a few microseconds each, of which the launch is one. A kernel that is launched this way waits (`gdc_wait`) until
the previous kernel has ended and its writes are visible, and it signals (`gdc_launch_dependents`) when the next kernel
may start. Every program waits before it signals, so a kernel always sees the writes of the kernel two launches before
it, and of all kernels before that. Before it waits, a kernel may read only such data and nothing that the previous
kernel writes: block tables, weights of norms, the residual of an earlier norm, and, in the kernel that attends to a
row's own positions, queries, keys and values. It writes nothing before it waits. Where the warps of a program have
separate tasks (`smc.attention.specialized`), the warps that copy a prefix's keys and values need not wait, because
earlier passes stored those and other warps of every program wait. So that kernel must not read prefixes that the same
pass stores (`smc.executor.prompt_rows`).

A kernel that starts early occupies multiprocessors and gets fewer of them while the previous kernel still holds most.
Matrix products and the last attention kernel therefore signal last, when their sums are done. Norms and the kernel that
stores keys and values signal as soon as they have waited, because the kernels before them have ended by then; the
kernel that reads prefixes, with one program for each multiprocessor, then finds all of them free. That kernel signals
early, too, because attention to own positions needs few resources. Each choice was measured. Prefetching weights was
measured, too, and made passes slower (`docs/performance.md`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime import jit
from triton.runtime.jit import DependenciesFinder, JITFunction

from smc.api.limits import MAX_PARTICLES


class _CalleesFirst(DependenciesFinder):
    """Finds what a kernel's name in Triton's cache on disk depends on: its source, that of functions that it calls, and
    their constants. Triton forgets the constants of functions that it has not met before, so a name would depend on
    which kernels a process has launched, and another process would compile the kernel again."""

    def _update_hash(self, func: Any) -> None:
        _ = func.cache_key
        super()._update_hash(func)


jit.DependenciesFinder = _CalleesFirst

PDL_CAPABILITY = (9, 0)
"""The first compute capability with programmatic dependent launch."""
MULTIPROCESSORS = 132
"""Number of multiprocessors of an H100 or H200, for which tile sizes are chosen; other GPUs use the same sizes."""
GROUPS = tl.constexpr(64)
"""Number of groups that are scanned at a time."""


class Sizes(NamedTuple):
    """Sizes of a batch."""

    batch_size: int
    groups: int
    rows: int


def supports_pdl(device: torch.device | str) -> bool:
    """Return whether a device supports programmatic dependent launch."""
    device = torch.device(device)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= PDL_CAPABILITY


def launch_options(pdl: bool) -> dict[str, bool]:
    """Return launch keywords: the kernel's constant PDL, and with `pdl` the option, which the interpreter and older
    drivers do not know."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


def one_variant(*wide: str) -> Callable[[Callable[..., None]], Any]:
    """Compile a kernel by `triton.jit` only once for all values and alignments of its arguments, except for the
    arguments named by `wide`, which hold long rows. Constants, types and None still make variants.

    Triton compiles a kernel again for integers that are 1 or multiples of 16, and for pointers at multiples of 16
    bytes, where it loads more at once. A few numbers a row gain nothing from that, and a request with a new size would
    wait for the compiler. Members of tuples are treated like arguments."""

    def compiled(kernel: Callable[..., None]) -> Any:
        parameters = inspect.signature(kernel).parameters
        assert set(wide) <= set(parameters), f"{kernel.__name__} has {list(parameters)}"
        others = [
            name for name, each in parameters.items() if "constexpr" not in str(each.annotation) and name not in wide
        ]
        if triton.knobs.runtime.interpret:
            return triton.jit(kernel, do_not_specialize=others)
        return _OneVariant(kernel, do_not_specialize=others)

    return compiled


class _OneVariant(JITFunction):
    """A `JITFunction` that applies `do_not_specialize` to members of tuples, too, for which Triton ignores it."""

    def create_binder(self) -> tuple:
        *made, bind = super().create_binder()
        alike = [parameter.do_not_specialize for parameter in self.params]

        def bind_alike(*args: object, **named: object) -> tuple:
            bound, found, options = bind(*args, **named)
            found = [
                unspecialized(*each) if is_alike and isinstance(each[0], tuple) else each
                for is_alike, each in zip(alike, found)
            ]
            return bound, found, options

        return *made, bind_alike


def unspecialized(kind: Any, key: Any) -> tuple[Any, Any]:
    """Return type and specialisation of an argument, in Triton's form, without what depends on values or alignment."""
    if isinstance(kind, tuple):
        kinds, keys = zip(*(unspecialized(*each) for each in zip(kind, key)))
        return (type(kind)(*kinds), type(key)(*keys)) if hasattr(kind, "_fields") else (kinds, keys)
    if kind == "constexpr" and isinstance(key, int):
        # Triton makes the integer 1 a constant, also as a member of an enum.
        return "i32", ""
    return kind, "" if key == "D" else key


def programs(batch_size: int, groups: int) -> int:
    """Return the number of programs: one for each group, then programs of MAX_PARTICLES batch indices that belong to no
    group."""
    return groups + triton.cdiv(batch_size, MAX_PARTICLES)


@triton.jit
def own_indices(first_G, size_G, groups, batch_size, BLOCK_N: tl.constexpr):
    """Return this program's batch indices, int32 [N], whether each exists, their group, and whether they belong to a
    group.

    Groups are stored one after another from the first batch index on, so all batch indices after the last group are
    padding."""
    program, n = tl.program_id(0), tl.arange(0, BLOCK_N)
    is_group = program < groups
    group = tl.where(is_group, program, 0)
    first, size = tl.load(first_G + group).to(tl.int32), tl.load(size_G + group).to(tl.int32)
    if not is_group:
        # The batch indices after the last group.
        first = tl.zeros_like(first)
        for begin in range(0, groups, GROUPS):
            g = begin + tl.arange(0, GROUPS)
            first_of_G = tl.load(first_G + g, mask=g < groups, other=0).to(tl.int32)
            size_of_G = tl.load(size_G + g, mask=g < groups, other=0).to(tl.int32)
            first = tl.maximum(first, tl.max(tl.where(size_of_G > 0, first_of_G + size_of_G, 0), 0))
        first += (program - groups) * BLOCK_N
    index_N = first + n
    return index_N, tl.where(is_group, n < size, index_N < batch_size), group, is_group
