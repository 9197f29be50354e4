"""Sizes of the attention kernels' tiles and launches. Knows nothing but shapes; see `smc.attention.kernels` for what
they mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from smc.kernels.launch import MULTIPROCESSORS

PAIRED = 512
"""Queries of a group and a key/value head, up to which wide heads are read by programs of 64."""
FEW = 8
"""Queries of a group, up to which narrow heads have tiles of their own."""
SPECIALIZED = 256
"""Queries of a group and a key/value head, up to which wide heads are read by warps of two kinds; of more, warps of one
were faster."""


def floor_rows(rows: int) -> int:
    """Rows by which sizes are chosen: the power of two at or below. Guided rounds have more rows than batch indices;
    so they bring one size at most, and kernels to compile: that of the most rows, which is warmed up
    (`smc.calibration.warm_up`)."""
    return 1 << (rows.bit_length() - 1)


@dataclass(frozen=True)
class Tuning:
    """Sizes that change speed only. `choose` guesses them; a benchmark may know better."""

    block_x: int
    """Queries of a prefix program: as many as a group has, at most 64, or 128 where there are so many that loading keys
    again would cost more than two programs on a multiprocessor gain."""
    block_p: int
    """Prefix positions of a tile."""
    pieces: int
    """Pairs (tile of queries, split of the prefix) that a key/value head has work for: about one program for each
    multiprocessor, two where two find room on one, or groups are several. With more splits, merging costs more than the
    reading gains."""
    min_tiles: int
    """Tiles of a split at least: merging one more split costs more than reading a few more tiles."""
    specialized: bool
    """Whether warps of two kinds read prefixes (`smc.attention.specialized`), on GPUs that can: 64 queries by four and
    four warps."""
    warps: int
    """Warps of a prefix program; 4 form one tensor-core group of 64 queries (Hopper's wgmma; below 64 queries it is
    mma)."""
    stages: int
    """Depth of the prefix kernel's load pipeline."""
    own_y: int
    """Queries of an own program: few where there are few rows, since it is latency and not reading that costs them."""
    block_o: int
    """Own positions of a tile: mostly there is one, read in one go."""
    block_s: int
    """Splits merged at once, by registers."""
    own_warps: int
    """Warps of an own program: one, where registers suffice, finds room on a multiprocessor that is full of a prefix's
    programs."""
    own_stages: int
    """Depth of the own kernel's load pipeline; 1 is none."""
    partial: torch.dtype
    """Type of the splits' outputs in the workspace."""

    @staticmethod
    def choose(
        rows: int, together: int, queries: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
    ) -> Tuning:
        """`together`: rows that a group has, at most or mostly; how many groups share the rows is known on the device
        alone."""
        (h, j), wide, rows = heads, dtype.itemsize == 4, floor_rows(rows)
        y = queries * h // j
        narrow = not wide and head_dim <= 64
        # Of several groups with few queries each, nothing is loaded twice, and what counts is how much is on its way.
        # Narrow heads of more than a few are no slower in tiles of many.
        several = not wide and together < rows and (not narrow or together * y <= FEW)
        x = together * y if several else rows * y
        # Of two programs of 64 queries on a multiprocessor one computes while the other waits; one of a single row's
        # has little to compute.
        pairs = narrow or (not wide and head_dim <= 128 and not several and x <= PAIRED)
        block_x = min(32 if wide else 64 if pairs else 128, max(16, triton.next_power_of_2(x)))
        block_p = 32 if wide else 128 if narrow and not several else 64
        pieces = max(1, MULTIPROCESSORS // j) * (2 if several or (pairs and block_x > 16) else 1)
        most_y = 4 if rows * j * triton.cdiv(y, 4) <= 4 * MULTIPROCESSORS else 8
        own_y, wide_heads = min(most_y, triton.next_power_of_2(y)), head_dim > 128
        return Tuning(
            block_x=block_x,
            block_p=block_p,
            pieces=pieces,
            min_tiles=3,
            specialized=pairs and not several and block_x == 64 and head_dim >= 64 and (narrow or x <= SPECIALIZED),
            warps=8 if block_x >= 128 else 4,
            stages=1 if wide else 2 if wide_heads else 4 if several else 3,
            own_y=own_y,
            block_o=32,
            block_s=max(1, 4096 // (own_y * head_dim)),
            own_warps=4 if wide or wide_heads else 1,
            own_stages=1,
            partial=torch.float32,
        )
