"""Whole decoders over packed rows: the pass with kernels equals the reference pass, which equals running every row
alone."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.pairwise import few

pytest.importorskip("triton")

from smc.executor.forward import StaticForward
from smc.executor.triton_forward import TritonForward
from smc.memory.kv_cache import KVPool
from smc.memory.pages import DUMMY_PAGE
from smc.model.decoder import RopeTable
from smc.round.plan import SHORT_SINGLE, Contexts
from smc.round.tensors import Rows
from tests.attention.packed import DEVICE, PAGES, Built, Case
from tests.model.tiny import OF_FAMILY, random_decoder, tiny_config

WIDTH = 700
FEW = (2, 1)
CASES = {
    "one_row": Case([9], [[(9, 1)]], 1, FEW, padding=0),
    "ragged": Case([5, 0, 48], [[(5, 2)], [(4, 1), (0, 2)], [(48, 2), (49, 0), (60, 1)]], 2),
    "ended_first": Case([30, 20], [[(30, 0), (36, 1)], [(20, 0), (20, 0), (35, 1), (22, 1)]], 1, tail=2),
    "branches": Case([40, 12], [[(40 + i // 2, 1) for i in range(6)], [(12, 1), (12, 0)]], 1, FEW, tail=0),
    "blocks": Case([33, 17], [[(33, 4), (37, 2)], [(17, 1)]], 4, FEW, tail=1, padding=0, backwards=True),
    "more_declared_than_held": Case([37, 20], [[(37, 1), (40, 1)], [(20, 1), (33, 0)]], 1, FEW, declared=[45, 90]),
    "nobody_lives": Case([8], [[(8, 0), (9, 0)]], 1, FEW),
}


def forward(kernels: bool, built: Built, family: str = "llama") -> StaticForward:
    """A pass over a pool with random keys and values at all positions held, and NaN on foreign pages."""
    heads = dict(zip(("num_heads", "num_kv_heads"), built.case.heads))
    config = tiny_config(family, hidden_size=32, head_dim=16, max_context=1024, **heads)
    model = random_decoder(config).to(DEVICE)
    pool, rope = KVPool(config, PAGES, torch.float32, DEVICE), RopeTable(config, WIDTH, DEVICE)
    generator = torch.Generator().manual_seed(5)
    for store in (pool.keys, pool.values):
        store[:] = torch.randn(store.shape, generator=generator).to(DEVICE)
        store[:, built.keys.isnan().any(-1).any(-1).to(DEVICE)] = torch.nan
        store[:, DUMMY_PAGE] = 0.0
    return (
        TritonForward(SimpleNamespace(model=model, pool=pool, rope=rope, width=WIDTH))
        if kernels
        else StaticForward(model, pool, rope)
    )


def rows_of(built: Built, contexts: Contexts) -> Rows:
    return Rows(built.tables(), built.spans(), built.groups(), queries=built.case.queries, contexts=contexts)


def run(made: StaticForward, built: Built, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Return the hidden states of tokens that exist, and all keys and values of the pool."""
    tokens_T = torch.randint(
        0, 300, (len(rows.spans.start_R) * rows.queries,), generator=torch.Generator().manual_seed(6)
    ).to(DEVICE)
    hidden_TE = made(tokens_T, rows)
    assert hidden_TE.shape == (len(tokens_T), 32)
    return hidden_TE[built.exists_T.to(DEVICE)], made.pool.keys, made.pool.values


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-4, equal_nan=True)
    assert not found[1][:, DUMMY_PAGE].any() and not found[2][:, DUMMY_PAGE].any()


@pytest.mark.parametrize(("name", "contexts"), few(product(CASES, [Contexts.SHORT, Contexts.SHARED]), together=1))
def test_kernels_do_what_the_reference_does(name, contexts):
    built = Built(CASES[name])
    rows = rows_of(built, contexts)
    assert_same(run(forward(True, built), built, rows), run(forward(False, built), built, rows))


def test_tiles_are_small_where_groups_have_a_row_each():
    built = Built(Case([9] * 16, [[(9, 1)]] * 16, 1, FEW, padding=0))
    made = forward(True, built)
    made.model.bfloat16()
    sizes = {
        contexts: made._attention_for(rows_of(built, contexts)).tuning.block_x
        for contexts in (Contexts.SINGLE, Contexts.SHARED)
    }
    assert sizes == {Contexts.SINGLE: 16, Contexts.SHARED: 32}


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("held", [SHORT_SINGLE - 1, SHORT_SINGLE])
def test_families_and_lengths_about_the_bound_of_short_rows(family, held):
    built = Built(Case([held - 5], [[(held - 1, 1), (held - 5, 1)]], 1, FEW, tail=2, padding=0))
    rows = rows_of(built, Contexts.SHORT if held < SHORT_SINGLE else Contexts.SINGLE)
    assert_same(run(forward(True, built, family), built, rows), run(forward(False, built, family), built, rows))


@pytest.mark.parametrize(
    ("family", "contexts"),
    few(
        product(
            [family for family in OF_FAMILY if family not in ("llama", "qwen2", "qwen3")],
            [Contexts.SHORT, Contexts.SHARED],
        ),
        together=1,
    ),
)
def test_kernels_of_every_family(family, contexts):
    """The rows are longer than the attention windows, and some windows begin after the shared prefix."""
    built = Built(CASES["blocks"])
    rows = rows_of(built, contexts)
    found, expected = (run(forward(kernels, built, family), built, rows) for kernels in (True, False))
    assert expected[0].std() > 0.1, "hidden states too flat to tell models apart"
    assert_same(found, expected)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("name", ["ragged", "blocks", "ended_first"])
def test_a_row_among_others_is_as_it_is_alone(kernels, name):
    built = Built(CASES[name])
    made, rows = forward(kernels, built), rows_of(built, Contexts.SHARED)
    hidden_TE, keys, values = run(made, built, rows)
    for r in built.pages:
        alone = forward(False, built)
        only_R = torch.arange(built.rows, device=DEVICE) == r
        run(alone, built, rows._replace(spans=rows.spans._replace(count_R=torch.where(only_R, rows.spans.count_R, 0))))
        page_X = built.pages[r][-int(built.count_R[r]) :].long()
        torch.testing.assert_close(alone.pool.keys[:, page_X], keys[:, page_X], atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(alone.pool.values[:, page_X], values[:, page_X], atol=2e-4, rtol=2e-4)
    assert not hidden_TE.isnan().any()


def test_workspaces_are_counted_once_for_each_shape():
    built = Built(CASES["one_row"])
    made, rows = forward(True, built), rows_of(built, Contexts.SHARED)
    assert made.workspace_bytes == 0
    run(made, built, rows)
    held = made.workspace_bytes
    run(made, built, rows)
    assert made.workspace_bytes == held > 0
