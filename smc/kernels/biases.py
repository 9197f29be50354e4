"""What is added to logits before they become a law, in one launch: `smc.executor.state.add_biases`.

A program has some of the tokens of one row. Nothing reads the host, and the grid follows from shapes alone: it can be
captured in a CUDA graph.

Axes: E entries of the tables, B tokens of an entry, R rows, V columns, S slots, X slots that rows are of.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from smc.kernels.variants import one_variant

BLOCK = 128
"""Tokens of a program."""


def add(
    logits_RV: Tensor,
    tables: tuple[Tensor, Tensor, Tensor, Tensor],
    lives: tuple[Tensor, Tensor],
    slot_X: Tensor,
    position_R: Tensor,
    width: int,
) -> Tensor:
    """In place. `tables`: columns, what is added early and late, and counts; `lives`: of all slots, entries, and how
    many tokens are early."""
    column_EB, early_EB, late_EB, count_E = tables
    rows = len(logits_RV)
    _add[(triton.cdiv(width, BLOCK), rows)](
        logits_RV, logits_RV.stride(0), slot_X, position_R, *lives, column_EB, early_EB, late_EB, count_E, rows // len(slot_X),
        column_EB.shape[1], BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip
    return logits_RV


@one_variant("column_EB", "early_EB", "late_EB", "most")
def _add(
    logits, stride, slot_X, position_R, entry_S, least_S, column_EB, early_EB, late_EB, count_E, each, most, BLOCK: tl.constexpr
):  # fmt: skip
    row, b = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_X + row // each).to(tl.int64)
    entry = tl.load(entry_S + slot)
    early = tl.load(position_R + row) < tl.load(least_S + slot)
    inside, at = b < tl.load(count_E + entry), entry * most + b
    value = tl.load(late_EB + at, mask=inside, other=0.0)
    value = tl.where(early, tl.load(early_EB + at, mask=inside, other=0.0), value)
    # No column is there twice.
    changes = inside & (value != 0)
    logit = logits + row.to(tl.int64) * stride + tl.load(column_EB + at, mask=inside, other=0)
    sum_ = tl.load(logit, mask=changes, other=0.0).to(tl.float32) + value
    tl.store(logit, sum_.to(logits.dtype.element_ty), mask=changes)
