"""The kernels penalise logits as the reference does: rows with and without pages of their own, all tokens or one of
each row, the whole vocabulary or a part of it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from smc.executor.logit_changes import penalise
from smc.kernels import penalties as kernels
from smc.round.plan import Contexts, Penalties
from smc.round.tensors import PageTokens, RowGroups, Rows, RowSpans, RowTables
from tests.pairwise import few

VOCAB, WIDTH, SLOTS, PAGES = 1500, 300, 4, 900
FORMS = [*product((1, 3), (False, True), (False, True), (torch.float32, torch.bfloat16), (False, True))]


def rows_of(rng: np.random.Generator, queries: int, has_tail: bool, device: torch.device) -> Rows:
    """Two rows for each of four batch indices: at the beginning, short, long, and one that runs nothing."""
    start = torch.tensor([0, 1, 40, 41, 280, 290, 7, 7], dtype=torch.int32)
    count = torch.tensor([queries, queries, queries, 1, queries, queries, 0, 0], dtype=torch.int32)
    table_SL = torch.from_numpy(rng.integers(1, PAGES, (SLOTS + 1, WIDTH)).astype(np.int32))
    tail_RB = torch.from_numpy(rng.integers(1, PAGES, (len(start), 8)).astype(np.int32)) if has_tail else None
    none = torch.zeros(len(start), dtype=torch.int32)
    tables = RowTables(
        table_SL.to(device),
        torch.tensor([0, 0, 1, 2, 3, 3, 4, 4], dtype=torch.int32, device=device),
        tail_RB.to(device) if tail_RB is not None else None,
        (start - 3).clamp(min=0).to(device) if has_tail else None,
    )
    groups = RowGroups(*(none.to(device) for _ in RowGroups._fields))
    return Rows(tables, RowSpans(start.to(device), count.to(device)), groups, queries, Contexts.SHARED)


@pytest.mark.parametrize(("queries", "has_tail", "one_token", "dtype", "is_part"), few(FORMS))
def test_rows_are_penalised_as_by_the_reference(device, queries, has_tail, one_token, dtype, is_part):
    rng = np.random.default_rng(queries + 2 * has_tail)
    rows = rows_of(rng, queries, has_tail, device)
    count = len(rows.spans.start_R)
    # Few different tokens, so that many occur several times.
    some = rng.choice(VOCAB, 40, replace=False)
    token_B = torch.from_numpy(rng.choice(some, PAGES).astype(np.int32)).to(device)
    ids_M = torch.from_numpy(np.union1d(some[:20], rng.choice(VOCAB, 700))).to(device) if is_part else None
    columns = VOCAB if ids_M is None else len(ids_M)
    penalties = Penalties(
        presence_A=torch.tensor([0.0, 0.7, -1.5, 2.0], device=device),
        frequency_A=torch.tensor([0.3, 0.0, 1.1, -0.25], device=device),
        repetition_A=torch.tensor([1.0, 1.3, 0.6, 1.0], device=device),
        prompt_A=torch.tensor([1, 30, 100, 5], device=device),
    )
    tokens_T = torch.from_numpy(rng.choice(some, count * queries)).to(device)
    output_R = torch.arange(count, device=device) * queries + (queries - 1) if one_token else None
    logits_TV = torch.randn(count if one_token else count * queries, columns + 36, device=device).to(dtype)
    logits_TV[:, :5] = -torch.inf
    before_TV = logits_TV.clone()
    tokens = PageTokens(token_B, VOCAB, ids_M)
    expected_TV = penalise(tokens, logits_TV, penalties, tokens_T, rows, output_R)
    found_TV = kernels.penalise(tokens, logits_TV, penalties, tokens_T, rows, output_R)
    assert found_TV.dtype == torch.float32 and torch.equal(logits_TV, before_TV)
    assert (found_TV[:, 5:] != logits_TV[:, 5:].float()).any(1).sum() > len(logits_TV) // 2
    assert torch.equal(found_TV, expected_TV)


def test_long_rows_are_counted_by_few_programs(device, monkeypatch):
    monkeypatch.setattr(kernels, "POSITIONS", 16)
    monkeypatch.setattr(kernels, "SPLITS", 3)
    test_rows_are_penalised_as_by_the_reference(device, 3, True, False, torch.float32, False)
