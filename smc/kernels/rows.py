"""Where new tokens go: position and page of every token of a fixed number per row, in one launch.

Axes: R rows, Q tokens of a row, T = R * Q, L positions of a table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def place_tokens(table_RL: Tensor, start_R: Tensor, count_R: Tensor, skip_R: Tensor | None, queries: int) -> tuple[Tensor, Tensor]:
    """(position [T], page [T]), int32. Tokens past a row's count, or among its first `skip`, go to the dummy page 0; the former stand
    at position 0."""
    rows = len(start_R)
    out_2T = torch.empty(2, rows * queries, dtype=torch.int32, device=table_RL.device)
    _place[(triton.cdiv(rows * queries, 64),)](
        table_RL, table_RL.stride(0), start_R, count_R, count_R if skip_R is None else skip_R, *out_2T, rows * queries,
        QUERIES=queries, SKIPS=skip_R is not None, BLOCK=64, num_warps=2,
    )  # fmt: skip
    return out_2T[0], out_2T[1]


@triton.jit
def _place(
    table, stride, start_R, count_R, skip_R, position_T, page_T, tokens, QUERIES: tl.constexpr, SKIPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    row, query = token // QUERIES, token % QUERIES
    exists = inside & (query < tl.load(count_R + row, mask=inside, other=0))
    position = tl.where(exists, tl.load(start_R + row, mask=inside, other=0) + query, 0)
    stored = exists
    if SKIPS:
        stored = exists & (query >= tl.load(skip_R + row, mask=inside, other=0))
    page = tl.load(table + row.to(tl.int64) * stride + position, mask=stored, other=0)
    tl.store(position_T + token, position, mask=inside)
    tl.store(page_T + token, page, mask=inside)
