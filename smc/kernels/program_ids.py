"""Which places of a packed batch a program is for: each group has one, and those of no group have programs after the
groups'.

Groups stand one after another from the first place on, so that what is behind the last of them is padding.

Axes: A places, G groups, N places of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from smc.api.limits import MAX_PARTICLES

GROUPS = tl.constexpr(64)
"""That are looked at at a time."""


def programs(places: int, groups: int) -> int:
    """How many there are, of MAX_PARTICLES places each."""
    return groups + triton.cdiv(places, MAX_PARTICLES)


@triton.jit
def own_places(first_G, size_G, groups, places, BLOCK_N: tl.constexpr):
    """This program's places int32 [N] and whether they exist; which group they are of, and whether they are of any."""
    program, n = tl.program_id(0), tl.arange(0, BLOCK_N)
    is_group = program < groups
    group = tl.where(is_group, program, 0)
    first, size = tl.load(first_G + group).to(tl.int32), tl.load(size_G + group).to(tl.int32)
    if not is_group:
        # Behind the last.
        first = tl.zeros_like(first)
        for begin in range(0, groups, GROUPS):
            g = begin + tl.arange(0, GROUPS)
            first_of_G = tl.load(first_G + g, mask=g < groups, other=0).to(tl.int32)
            size_of_G = tl.load(size_G + g, mask=g < groups, other=0).to(tl.int32)
            first = tl.maximum(first, tl.max(tl.where(size_of_G > 0, first_of_G + size_of_G, 0), 0))
        first += (program - groups) * BLOCK_N
    place_N = first + n
    return place_N, tl.where(is_group, n < size, place_N < places), group, is_group
