"""Penalties in two launches: the Triton form of `smc.executor.logit_changes.penalise`. The first counts each row's
tokens in a table [R, V]; the second changes the logits, each read and written once. Sums are of integers, so their
order does not matter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from smc.kernels.launch import one_variant
from smc.kernels.packed_rows import page_at, row_tables, table_arguments
from smc.round.plan import Penalties
from smc.round.tensors import PageTokens, Rows

POSITIONS = 256
"""Positions that a program counts at a time."""
SPLITS = 16
"""Maximum number of programs that count a row."""
COLUMNS = 1024
"""Columns of a program that changes logits."""
IN_PROMPT = tl.constexpr(1 << 30)
"""In a cell of the table: the token is in the prompt. The other bits are the number of times that it is in the
answer."""


def penalise(
    page_tokens: PageTokens,
    logits_TV: Tensor,
    penalties: Penalties[Tensor],
    tokens_T: Tensor,
    rows: Rows,
    output_R: Tensor | None,
) -> Tensor:
    """See `smc.executor.logit_changes.penalise`."""
    token_B, vocab, ids_M = page_tokens
    (count, columns), number = logits_TV.shape, len(rows.spans.start_R)
    tables, pages = table_arguments(rows.tables)
    each = number // len(penalties.prompt_A)
    counts_RV = torch.zeros(number, vocab, dtype=torch.int32, device=logits_TV.device)
    _count_tokens[(number, min(SPLITS, triton.cdiv(tables.width, POSITIONS)))](
        tables, pages, token_B, rows.spans.start_R, penalties.prompt_A, counts_RV, vocab, each,
        BLOCK=POSITIONS, num_warps=1,
    )  # fmt: skip
    out_TV = torch.empty(count, columns, dtype=torch.float32, device=logits_TV.device)
    _penalise[(count, triton.cdiv(columns, COLUMNS))](
        logits_TV, logits_TV.stride(0), counts_RV, vocab, ids_M, vocab if ids_M is None else len(ids_M), out_TV,
        columns, tokens_T.contiguous(), rows.spans, output_R, penalties, rows.queries, each,
        BLOCK=COLUMNS, enable_fp_fusion=False, num_warps=4,
    )  # fmt: skip
    return out_TV


@one_variant()
def _count_tokens(tables, pages, token_B, start_R, prompt_A, counts_RV, vocab, each, BLOCK: tl.constexpr):
    r, cells = tl.program_id(0), counts_RV + tl.program_id(0).to(tl.int64) * vocab
    reach, prompt = tl.minimum(tl.load(start_R + r), tables.width), tl.load(prompt_A + r // each)
    table, tail, tail_start = row_tables(r, tables, pages)
    for first in range(tl.program_id(1) * BLOCK, reach, tl.num_programs(1) * BLOCK):
        p = first + tl.arange(0, BLOCK)
        page = page_at(p, p < reach, table, tail, tail_start, tables, pages)
        cell = cells + tl.load(token_B + page, mask=p < reach, other=0)
        tl.atomic_add(cell, tl.full([BLOCK], 1, tl.int32), mask=(p < reach) & (p >= prompt), sem="relaxed")
        tl.atomic_or(cell, tl.full([BLOCK], IN_PROMPT, tl.int32), mask=(p < reach) & (p < prompt), sem="relaxed")


@one_variant("logits", "stride", "counts_RV", "vocab", "ids_M", "out", "columns")
def _penalise(
    logits, stride, counts_RV, vocab, ids_M, own, out, columns, tokens_T, spans, output_R, penalties, queries, each,
    BLOCK: tl.constexpr,
):  # fmt: skip
    t, v = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if output_R is not None:
        r, last = t, (tl.load(output_R + t) % queries).to(tl.int32)
    else:
        r, last = t // queries, t % queries
    a, inside, is_token = r // each, v < columns, v < own
    token = v
    if ids_M is not None:
        token = tl.load(ids_M + v, mask=is_token, other=0).to(tl.int32)
    cell = tl.load(counts_RV + r.to(tl.int64) * vocab + token, mask=is_token, other=0)
    number, prompt = cell & (IN_PROMPT - 1), tl.load(penalties.prompt_A + a)
    start, count = tl.load(spans.start_R + r), tl.load(spans.count_R + r)
    # Tokens that the pass runs, up to the one after which this row's logits are.
    for q in range(last + 1):
        runs = (q < count) & (start + q >= prompt)
        number += ((token == tl.load(tokens_T + r * queries + q).to(tl.int32)) & runs & is_token).to(tl.int32)
    logit = tl.load(logits + t.to(tl.int64) * stride + v, mask=inside, other=0).to(tl.float32)
    repetition = tl.load(penalties.repetition_A + a)
    repeated = tl.where(logit > 0, tl.div_rn(logit, tl.zeros_like(logit) + repetition), logit * repetition)
    logit = tl.where((number > 0) | (cell >= IN_PROMPT), repeated, logit)
    logit -= tl.load(penalties.frequency_A + a) * number.to(tl.float32)
    logit -= tl.load(penalties.presence_A + a) * (number > 0).to(tl.float32)
    tl.store(out + t.to(tl.int64) * columns + v, logit, mask=inside)
