"""Block tables follow a choice, within kernels: `smc.executor.state.remap_block_table`.

Work grows with what particles hold, not with the table.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 1024
"""Positions that are moved at a time."""


@triton.jit
def move(table, stride, slot, source, base, end, tail_B, width, TAIL: tl.constexpr, CHUNK: tl.constexpr):
    """Positions from `base` up to `end` of one slot become those of `source`, those after them the `width` pages of the
    tail."""
    to, of = table + slot * stride, table + source * stride
    if slot != source:
        column = tl.arange(0, CHUNK)
        for begin in tl.range(base, end, CHUNK):
            inside = begin + column < end
            tl.store(to + begin + column, tl.load(of + begin + column, mask=inside, other=0), mask=inside)
    if TAIL > 0:
        b = tl.arange(0, TAIL)
        tl.store(to + end + b, tl.load(tail_B + b, mask=b < width, other=0), mask=b < width)
