"""Attention in one order of sums: it equals the reference, and the bits of a query do not depend on how programs share
the work, nor on the kernel that does it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from smc.attention.backend import ForwardBatch
from smc.attention.fixed_order import FixedOrderAttention, FixedOrderPrompts, FixedTiling
from smc.attention.fixed_step import step_attention_fixed
from tests.attention.packed import DEVICE, TOLERANCE, Built, Case, error
from tests.attention.test_kernels import CASES

TILING = {"unit": 32, "block_p": 16}
"""Short splits, so that a context of 300 positions has all lengths of splits."""
PIECES = (1, 5, 100)
SOME = [
    "decode", "decode_fp32", "first_token", "target_fp32", "groups", "empty_group", "ended_first", "wide_heads",
    "tails_of_blocks", "tails_within_what_is_shared", "more_declared_than_held", "long_beside_short", "nine_queries",
]  # fmt: skip
LONG = {
    "splits_of_all_lengths": Case([1100], [[(1100, 2), (1190, 1)]], 2, (4, 2), 16),
    "queries_past_a_split": Case([30], [[(30, 9), (62, 5)]], 9, (4, 2), 16),
    "ends_with_a_split": Case([255], [[(256, 1), (287, 1), (255, 1)]], 1, (4, 2), 16),
}


def rows_of(built: Built, **tiling: int) -> Tensor:
    """Run the prefix kernel and the own kernel; the workspace is filled with NaN."""
    case, shape = built.case, (len(built.first_G), built.rows, built.together, built.case.queries)
    made = FixedOrderAttention(*shape, case.heads, case.dim, case.dtype, DEVICE, 2000, **(TILING | tiling))
    for store in made._work[:3]:
        store.fill_(torch.nan)
    return built._run_long(made)


def step_of(built: Built, monkeypatch: pytest.MonkeyPatch, **tiling: int) -> Tensor:
    """Run the kernel of short contexts."""
    own = FixedTiling(**(TILING | tiling), block_x=16, pieces=1, alone=0, stages=2, warps=4)

    def step(*args: Any, tiling: None, **options: Any) -> None:
        step_attention_fixed(*args, tiling=tiling or own, **options)

    monkeypatch.setattr("tests.attention.packed.step_attention", step)
    return built.run_short()


def prompts_of(built: Built, block_x: int, window: int | None = None, **tiling: int) -> Tensor:
    """Run the kernel of prompts over the same rows."""
    case, live = built.case, [r for r in built.pages if int(built.count_R[r])]
    out_THD = torch.zeros(built.q_THD.shape, dtype=case.dtype)
    if not live:
        return out_THD
    longest = max(len(built.pages[r]) for r in live)
    table_RL = np.stack([np.pad(built.pages[r].numpy(), (0, longest - len(built.pages[r]))) for r in live])
    starts_R, counts_R = (x[live].numpy().astype(np.int64) for x in (built.start_R, built.count_R))
    index_T = torch.cat([r * case.queries + torch.arange(int(count)) for r, count in zip(live, counts_R)])
    position_T = np.concatenate([start + np.arange(count) for start, count in zip(starts_R, counts_R)])
    pages_T = built.page_T[index_T].numpy()
    batch = ForwardBatch(
        table_RL, starts_R, counts_R, pages_T, position_T, np.arange(len(live) + 1), np.zeros(len(live), np.int64)
    )
    pool = SimpleNamespace(keys=built.keys[None].to(DEVICE), values=built.values[None].to(DEVICE), windows=(window,))
    planned = FixedOrderPrompts(**(TILING | tiling), block_x=block_x).plan(pool, batch)
    out_THD[index_T] = planned.read(0, built.q_THD[index_T].to(DEVICE)).cpu()
    return out_THD


def cancelling(case: Case) -> Built:
    """Build one group whose results are near ties with zero: positions half a prefix apart have equal keys and opposite
    values, and new tokens have no values, so that every result is what rounding has left of its sums."""
    built, half = Built(case), case.shared[0] // 2
    first = next(iter(built.pages.values()))
    built.keys[first[half : 2 * half]] = built.keys[first[:half]]
    built.values[first[half : 2 * half]] = -built.values[first[:half]]
    for pages in built.pages.values():
        built.values[pages[2 * half :]] = 0.0
    return built


def some_rows(built: Built, rows: Sequence[int]) -> Built:
    """Return a group of these rows of a built group, on the same pages."""
    made, zeros_R = copy.copy(built), torch.zeros(len(rows), dtype=torch.int32)
    made.rows = made.together = len(rows)
    for name in ("slot_R", "start_R", "count_R", "tail_RB", "tail_R"):
        setattr(made, name, getattr(built, name)[rows])
    made.group_R, made.first_G, made.size_G, made.shared_G = (
        zeros_R,
        zeros_R[:1],
        zeros_R[:1] + len(rows),
        built.shared_G[:1],
    )
    made.pages = {i: built.pages[row] for i, row in enumerate(rows)}
    made.q_THD = built.q_THD.unflatten(0, (-1, built.case.queries))[rows].flatten(0, 1)
    return made


def assert_near_ties_stay(
    case: Case, counts: Sequence[int], monkeypatch: pytest.MonkeyPatch, order: dict[str, int], other: dict[str, int]
) -> None:
    """A row's results that cancel have the same bits alone and among `counts` rows, in all kernels. `order`, `other`:
    tilings with two orders of sums, which the results must show."""
    built = cancelling(case)
    own, *others = built.pages
    row = some_rows(built, [own])
    alone = rows_of(row, **order)
    for count in counts:
        at, rows = count // 2, others[: count - 1]
        among = some_rows(built, [*rows[:at], own, *rows[at:]])
        for made in (rows_of(among, **order), step_of(among, monkeypatch, **order), prompts_of(among, 16, **order)):
            assert torch.equal(made[at * case.queries : (at + 1) * case.queries], alone), count
    assert float((rows_of(row, **other) == alone).double().mean()) < 0.5, "the order of sums can be seen"


@pytest.mark.parametrize("name", [*SOME, *LONG])
def test_equals_reference_and_itself(name, monkeypatch):
    """The number of pieces decides which program adds up which splits, and `block_x` which queries it has."""
    built = Built((CASES | LONG)[name])
    first = rows_of(built, pieces=PIECES[0], alone=0, block_x=16)
    assert error(first, built.reference()) <= TOLERANCE[built.case.dtype]
    for pieces, alone in product(PIECES, (0, 32)):
        assert torch.equal(rows_of(built, pieces=pieces, alone=alone, block_x=16), first), (pieces, alone)
    assert torch.equal(step_of(built, monkeypatch), first)
    assert torch.equal(prompts_of(built, 16), first)


def test_more_queries_of_a_program_change_no_bit():
    built = Built(Case([300], [[(300, 5), (310, 5), (317, 3)]], 5, (8, 2), 16))
    first = rows_of(built, pieces=1, block_x=16)
    for block_x in (32, 64):
        assert torch.equal(rows_of(built, pieces=5, block_x=block_x), first)


@pytest.mark.parametrize("window", [1, 7, 40, 200])
def test_windows(window):
    """Positions before the window have weight 0, whichever programs skip their tiles."""
    built = Built(Case([120], [[(120, 3), (150, 2)]], 3, (4, 2), 16))
    case, shape = built.case, (len(built.first_G), built.rows, built.together, built.case.queries)
    found = []
    for pieces in PIECES:
        made = FixedOrderAttention(*shape, case.heads, case.dim, case.dtype, DEVICE, 2000, pieces=pieces, **TILING)
        prepared = made.prepare(built.tables(), built.spans(), built.groups())
        q_THD, out_THD = built.q_THD.to(DEVICE).contiguous(), torch.empty_like(built.q_THD, device=DEVICE)
        found.append(made.run(q_THD, built.keys.to(DEVICE), built.values.to(DEVICE), prepared, out_THD, window).cpu())
    found.append(prompts_of(built, 16, window))
    q, held_T = case.queries, torch.cat([torch.arange(case.queries) < count for count in built.count_R])
    assert all(torch.equal(one[held_T], found[0][held_T]) for one in found[1:])
    for r, pages in built.pages.items():
        for i in range(int(built.count_R[r])):
            pages_L = pages[: int(built.start_R[r]) + i + 1][-window:]
            k_HLD, v_HLD = (
                x[pages_L].double().transpose(0, 1).repeat_interleave(2, 0) for x in (built.keys, built.values)
            )
            scores_HL = (k_HLD @ built.q_THD[r * q + i].double()[..., None]).squeeze(-1) * case.dim**-0.5
            expected_HD = (torch.softmax(scores_HL, -1)[:, None] @ v_HLD).squeeze(1)
            torch.testing.assert_close(found[0][r * q + i].double(), expected_HD, atol=1e-5, rtol=1e-5)


def test_a_full_workspace_lengthens_the_first_piece():
    """A context of many splits whose sums do not all fit: the first piece merges more of them, and no bit changes."""
    built = Built(Case([1100], [[(1100, 5), (1110, 5), (1117, 3)]], 5, (8, 2), 16))
    first = rows_of(built, pieces=1, block_x=16)
    assert torch.equal(rows_of(built, pieces=40, block_x=16), first)


def test_shapes_share_workspaces():
    """Two shapes with as many entries use one workspace, one pass after another."""
    first, second, spaces = Built(CASES["decode_fp32"]), Built(CASES["tails"]), {}
    made = [
        FixedOrderAttention(
            len(one.first_G), one.rows, one.together, one.case.queries, one.case.heads, one.case.dim, one.case.dtype,
            DEVICE, 2000, spaces=spaces, **TILING,
        )
        for one in (first, second)
    ]  # fmt: skip
    assert len(spaces) == 1 and made[0]._work is made[1]._work and made[0].workspace_bytes == made[1].workspace_bytes
    before = first._run_long(made[0])
    second._run_long(made[1])
    assert torch.equal(first._run_long(made[0]), before)


@pytest.mark.parametrize(
    ("context", "queries", "counts", "dtype"),
    [
        *(
            (*sizes, dtype)
            for sizes in ((300, 1, (2, 17)), (100, 1, (65,)), (300, 5, (9,)))
            for dtype in (torch.float32, torch.bfloat16)
        ),
        pytest.param(100, 1, (512,), torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(100, 5, (102,), torch.float32, marks=pytest.mark.slow),
    ],
)
def test_near_ties_of_up_to_512_queries(context, queries, counts, dtype, monkeypatch):
    """The many rows read three splits and a part of one, few rows ten: every row costs the interpreter its context.
    Fewer rows meet both types and two heads of keys, the most rows one each."""
    heads = (4, 2) if queries * max(counts) < 500 else (2, 1)
    case = Case([context], [[(context, queries)] * max(counts)], queries, heads, 16, dtype)
    assert_near_ties_stay(case, counts, monkeypatch, TILING, {"unit": 64, "block_p": 32})
