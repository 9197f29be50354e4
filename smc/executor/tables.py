"""How block tables follow a choice. The reference, in plain torch; `smc.kernels.tables` has what GPUs use."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Reroot = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int], None]
"""As `reroot`, with a tail."""


def reroot(table_SL: Tensor, slot_A: Tensor, source_A: Tensor, base_A: Tensor, end_A: Tensor, tail_AB: Tensor | None, columns: int) -> None:
    """Positions from `base` up to `end` of the slots become those of `source`; `tail` are the pages of those from `end` on.

    A source keeps its own: no slot that is read is written. `columns` bounds what any row holds, tail included.
    """
    table_SL[slot_A, :columns] = table_SL[source_A, :columns]
    if tail_AB is not None:
        column_AB = end_A[:, None] + torch.arange(tail_AB.shape[1], device=table_SL.device)
        table_SL[slot_A[:, None], column_AB] = tail_AB
