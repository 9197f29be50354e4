"""Block tables follow a choice, in one launch: `smc.runtime.tables.reroot`. Work grows with what particles hold, not with the table.

Axes: S slots, L positions, A places, B tail positions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024


def reroot(table_SL: Tensor, slot_A: Tensor, source_A: Tensor, base_A: Tensor, end_A: Tensor, tail_AB: Tensor | None, columns: int) -> None:
    """See `smc.runtime.tables.reroot`; `columns` is not needed. Indices int64, pages int32."""
    tail_AB = None if tail_AB is None else tail_AB.contiguous()
    width = 0 if tail_AB is None else tail_AB.shape[1]
    _reroot[(len(slot_A),)](
        table_SL, table_SL.stride(0), slot_A, source_A, base_A, end_A, tail_AB, width,
        TAIL=triton.next_power_of_2(width) if width else 0, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip


@triton.jit
def _reroot(table, stride, slot_A, source_A, base_A, end_A, tail_AB, width, TAIL: tl.constexpr, CHUNK: tl.constexpr):
    place = tl.program_id(0)
    slot, source = tl.load(slot_A + place), tl.load(source_A + place)
    end = tl.load(end_A + place)
    tail_B = None if TAIL == 0 else tail_AB + place * width
    move(table, stride, slot, source, tl.load(base_A + place), end, tail_B, width, TAIL, CHUNK)


@triton.jit
def move(table, stride, slot, source, base, end, tail_B, width, TAIL: tl.constexpr, CHUNK: tl.constexpr):
    """Positions from `base` up to `end` of one slot become those of `source`, those after them the `width` pages of the tail."""
    to, of = table + slot * stride, table + source * stride
    if slot != source:
        column = tl.arange(0, CHUNK)
        for begin in tl.range(base, end, CHUNK):
            inside = begin + column < end
            tl.store(to + begin + column, tl.load(of + begin + column, mask=inside, other=0), mask=inside)
    if TAIL > 0:
        b = tl.arange(0, TAIL)
        tl.store(to + end + b, tl.load(tail_B + b, mask=b < width, other=0), mask=b < width)
