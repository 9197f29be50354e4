"""What guidance adds to a round, a launch each: logits of rows and of their companions become guided ones, and
companions' pages follow a choice. The references: `smc.executor.sampling.Sampling.guide`,
`smc.executor.state.remap_block_table`.

Axes: T tokens, X those of companions, V columns, A places, S slots, L positions, B pages of a tail.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smc.kernels.tables import CHUNK, move
from smc.kernels.variants import one_variant


def guide(own_TV: Tensor, companion_XV: Tensor, of_T: Tensor, scale_T: Tensor, block: int = 4096) -> Tensor:
    """l_u + s (l_c - l_u) [T, V], float32: l_c a row's own logits, l_u its companion's, the `of`-th, both of one type
    and at any stride of rows. At scale 1 the row's own, and no companion's is read."""
    tokens, width = own_TV.shape
    assert width == companion_XV.shape[1] and own_TV.stride(1) == companion_XV.stride(1) == 1
    out_TV = torch.empty(tokens, width, dtype=torch.float32, device=own_TV.device)
    block = min(block, triton.next_power_of_2(width))
    # Tokens first: a grid's second axis ends at 65,535.
    _guide[(tokens, triton.cdiv(width, block))](
        own_TV, own_TV.stride(0), companion_XV, companion_XV.stride(0), of_T.contiguous(), scale_T.contiguous(), out_TV, width, BLOCK=block,
        # The reference rounds a product before it adds to it.
        enable_fp_fusion=False, num_warps=4,
    )  # fmt: skip
    return out_TV


def reroot(
    table_SL: Tensor, slot_A: Tensor, source_A: Tensor, base_A: Tensor, end_A: Tensor, tail_AB: Tensor, columns: int
) -> None:
    """As `smc.executor.state.remap_block_table`; work goes with what is held, not with `columns`."""
    (places, width), tail_AB = tail_AB.shape, tail_AB.contiguous()
    _reroot[(places,)](
        table_SL, table_SL.stride(0), slot_A, source_A, base_A, end_A, tail_AB, width,
        TAIL=triton.next_power_of_2(width) if width else 0, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip


@one_variant("own_TV", "own_stride", "out_TV", "width")
def _guide(own_TV, own_stride, companion_XV, companion_stride, of_T, scale_T, out_TV, width, BLOCK: tl.constexpr):
    token, v = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scale, inside, beside = tl.load(scale_T + token), v < width, tl.load(of_T + token).to(tl.int64)
    own_V = tl.load(own_TV + token * own_stride + v, mask=inside, other=0.0).to(tl.float32)
    theirs_V = tl.load(
        companion_XV + beside * companion_stride + v, mask=v < tl.where(scale == 1, 0, width), other=0.0
    ).to(tl.float32)
    guided_V = theirs_V + scale * (own_V - theirs_V)
    tl.store(out_TV + token * width + v, tl.where(scale == 1, own_V, guided_V), mask=inside)


@one_variant()
def _reroot(
    table_SL, table_stride, slot_A, source_A, base_A, end_A, tail_AB, width, TAIL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    slot, source, base, end = (
        tl.load(slot_A + place),
        tl.load(source_A + place),
        tl.load(base_A + place),
        tl.load(end_A + place),
    )
    move(table_SL, table_stride, slot, source, base, end, tail_AB + place * width, width, TAIL, CHUNK)
