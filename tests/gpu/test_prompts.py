"""Prompts on a GPU: flashinfer's attention against the reference, and the fused pass against the decoder's own pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from smc.attention.backend import AttentionPass, ForwardBatch, TorchAttention
from smc.attention.prompts import MOST_TOKENS, FlashInferAttention, FusedAttention, kernels_of, obstacle
from smc.executor.messages import PromptBatch
from smc.executor.triton_ops import TritonOps
from smc.executor.worker import ModelWorker
from smc.memory.kv_cache import KVPool
from smc.memory.pages import DUMMY_PAGE
from smc.stops import TokenBytes
from tests.model.tiny import random_decoder, tiny_config
from tests.scheduler.pairs import letter_tokenizer

DEVICE, DTYPE, LAYERS = torch.device("cuda:0"), torch.bfloat16, 2
TOLERANCE = 1e-2  # Bound of ||out - reference|| / ||reference||, in bfloat16.
HEADS = [(32, 8), (8, 8), (14, 2), (16, 4), (4, 1)]
ROWS = {
    "one whole": [(0, 1000)],
    "one token": [(0, 1)],
    "a chunk behind others": [(3000, 512)],
    "few behind many": [(9000, 7)],
    "last tokens": [(4095, 1), (15, 1), (640, 1)],
    "ragged": [(0, 1), (17, 300), (2000, 64), (0, 129), (128, 128)],
    "forty": [(31 * i, 1 + 7 * i) for i in range(40)],
    "long and short": [(0, 2500), (5, 3)],
}
"""(Positions held, new tokens) of each row."""


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    # The service makes the same check; if flashinfer cannot run, these tests are skipped.
    why = obstacle((32, 8), 128, DTYPE, DEVICE) or obstacle((32, 8), 64, DTYPE, DEVICE)
    if why is not None:
        pytest.skip(why)


class Case:
    """Rows with random keys and values on their pages and NaN on all other pages; pages are in random order."""

    def __init__(self, rows: list[tuple[int, int]], heads: tuple[int, int], dim: int, shared: int = 0) -> None:
        """The first `shared` positions of all rows are the same pages."""
        rng, (h, j) = np.random.default_rng(0), heads
        starts_R, counts_R = (np.array(column, dtype=np.int32) for column in zip(*rows))
        ends_R = starts_R + counts_R
        pages = int(ends_R.sum()) + 100
        order = 1 + rng.permutation(pages)
        # Past a row's end, its table names a page of no row.
        self.table_RL = np.full((len(rows), ends_R.max()), order[-1], dtype=np.int32)
        for row, end, last in zip(self.table_RL, ends_R, np.cumsum(ends_R)):
            row[:end] = order[last - end : last]
        self.table_RL[:, :shared] = self.table_RL[0, :shared]
        row_T = np.repeat(np.arange(len(rows)), counts_R)
        position_T = np.concatenate([np.arange(a, b) for a, b in zip(starts_R, ends_R)])
        bounds = (np.arange(len(rows) + 1), np.zeros(len(rows), dtype=np.int64))
        self.batch = ForwardBatch(
            self.table_RL, starts_R, counts_R, self.table_RL[row_T, position_T], position_T, *bounds
        )
        config = tiny_config(num_layers=LAYERS, num_heads=h, num_kv_heads=j, head_dim=dim)
        self.pool = KVPool(config, pages, DTYPE, DEVICE)
        self.generator = torch.Generator(DEVICE).manual_seed(0)
        held = np.unique(np.concatenate([row[:end] for row, end in zip(self.table_RL, ends_R)]))
        for store in (self.pool.keys, self.pool.values):
            store.normal_(generator=self.generator)
            nobody = torch.ones(pages + 1, dtype=torch.bool, device=DEVICE)
            nobody[torch.from_numpy(held).to(DEVICE).long()] = False
            store[:, nobody] = torch.nan
            store[:, DUMMY_PAGE] = 0.0
        tokens = len(row_T)
        # With large logits, some positions have nearly all of the weight.
        self.q_THD = 3 * self._random(tokens, h, dim)
        self.k_TJD, self.v_TJD = self._random(tokens, j, dim), self._random(tokens, j, dim)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=DEVICE).to(DTYPE)

    def attend(self, planned: AttentionPass, layer: int = 1) -> Tensor:
        return planned.attend(layer, self.q_THD, self.k_TJD, self.v_TJD)

    def reference(self) -> Tensor:
        """Attention in float32 over a copy of the pool, row by row to save memory."""
        pool = KVPool.__new__(KVPool)
        pool.keys, pool.values, pool.windows = self.pool.keys.float(), self.pool.values.float(), self.pool.windows
        q_THD, k_TJD, v_TJD = (x.float() for x in (self.q_THD, self.k_TJD, self.v_TJD))
        ends, outs = np.cumsum(self.batch.counts_R).tolist(), []
        for r, end in enumerate(ends):
            a = end - int(self.batch.counts_R[r])
            one, none = np.array([0, 1]), np.zeros(1, dtype=np.int64)
            row = (self.table_RL[r : r + 1], self.batch.starts_R[r : r + 1], self.batch.counts_R[r : r + 1])
            batch = ForwardBatch(*row, self.batch.pages_T[a:end], self.batch.positions_T[a:end], one, none)
            outs.append(TorchAttention().plan(pool, batch).attend(1, q_THD[a:end], k_TJD[a:end], v_TJD[a:end]))
        return torch.cat(outs)


def flash(heads: tuple[int, int], dim: int) -> FlashInferAttention:
    return FlashInferAttention(heads, dim, DTYPE, DEVICE)


def error(out: Tensor, reference: Tensor) -> float:
    return float((out.float() - reference).norm() / reference.norm())


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_is_that_of_the_reference(heads, dim, kernel):
    if kernel not in kernels_of(DEVICE):
        pytest.skip(f"{kernel} needs Hopper")
    backend, found = flash(heads, dim), {}
    for name, rows in ROWS.items():
        case = Case(rows, heads, dim)
        found[name] = error(case.attend(backend.plan_with(kernel, case.pool, case.batch)), case.reference())
    print(kernel, heads, dim, {name: f"{value:.1e}" for name, value in found.items()})
    # NaN also fails this comparison.
    assert all(value < TOLERANCE for value in found.values()), found


@pytest.mark.parametrize("which", ["flashinfer", "torch"])
def test_rows_that_begin_on_the_same_pages(which):
    case = Case([(700, 300), (600, 20), (640, 1)], (32, 8), 128, shared=600)
    backend = flash((32, 8), 128) if which == "flashinfer" else FusedAttention()
    assert error(case.attend(backend.plan(case.pool, case.batch)), case.reference()) < TOLERANCE


def test_new_keys_and_values_land_on_their_own_pages_only():
    case, backend = Case(ROWS["ragged"], (32, 8), 128), flash((32, 8), 128)
    case.batch.pages_T[3:9] = DUMMY_PAGE
    expected = case.pool.keys.clone()
    stored = np.flatnonzero(case.batch.pages_T)
    expected[1, torch.from_numpy(case.batch.pages_T[stored]).to(DEVICE).long()] = case.k_TJD[
        torch.from_numpy(stored).to(DEVICE)
    ]
    case.attend(backend.plan(case.pool, case.batch))
    assert torch.equal(case.pool.keys.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_queued_passes_keep_their_plans():
    """More passes are queued behind slow work than there are plans; each result equals that of the pass alone."""
    backend, cases = flash((32, 8), 128), [Case([(100 * i, 200 + i), (3 * i, 5)], (32, 8), 128) for i in range(12)]
    expected = [case.attend(backend.plan(case.pool, case.batch)) for case in cases]
    torch.cuda.synchronize()
    busy = torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE)
    for _ in range(20):
        busy = busy @ busy * 1e-3
    found = [case.attend(backend.plan(case.pool, case.batch)) for case in cases]
    assert all(torch.equal(one, other) for one, other in zip(found, expected))


def test_memory_is_bounded_and_counted():
    before = torch.cuda.memory_allocated()
    backend = flash((32, 8), 128)
    taken = torch.cuda.memory_allocated() - before
    assert 0 <= taken - backend.workspace_bytes < 1 << 20
    case = Case(ROWS["forty"], (32, 8), 128)
    for _ in range(5):
        case.attend(backend.plan(case.pool, case.batch))
    held = torch.cuda.memory_allocated()
    for _ in range(50):
        case.attend(backend.plan(case.pool, case.batch))
    assert torch.cuda.memory_allocated() <= held
    assert not backend.takes(replace(case.batch, pages_T=np.zeros(MOST_TOKENS + 1)))


@pytest.mark.parametrize(
    ("heads", "dim", "dtype"), [((32, 8), 96, DTYPE), ((32, 8), 128, torch.float32), ((30, 8), 128, DTYPE)]
)
def test_what_it_cannot_do_is_said_beforehand(heads, dim, dtype):
    assert obstacle(heads, dim, dtype, DEVICE)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_fused_pass_is_that_of_the_decoder(family):
    """In bfloat16, in chunks, with several rows at once: hidden states of the last tokens, keys and values are
    equal."""
    heads = {
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_layers": 3,
    }
    model = random_decoder(tiny_config(family, vocab_size=300, max_context=4096, **heads))
    for name, weight in model.named_parameters():
        # With small weights, rounding does not change which positions attention prefers.
        weight.mul_(1.0 if "norm" in name else 0.2)
    model = model.to(DEVICE, DTYPE)
    made = {name: _worker(model) for name in ("reference", "fused")}
    made["reference"].attention, made["fused"].ops = FusedAttention(), TritonOps()
    assert made["fused"].attention.flashinfer is not None
    for parts in ([(0, 700), (0, 30)], [(700, 512), (30, 1)], [(1212, 3), (31, 900)]):
        hidden = {name: _hidden(worker, parts) for name, worker in made.items()}
        assert error(hidden["fused"], hidden["reference"].float()) < 5e-2
    for name in ("keys", "values"):
        found, expected = (getattr(made[which].pool, name) for which in ("fused", "reference"))
        assert error(found, expected.float()) < 5e-2 and not found[:, DUMMY_PAGE].any()


def _worker(model: torch.nn.Module) -> ModelWorker:
    return ModelWorker(
        "target", model, width=4096, pages=8192, vocab_size=300, token_bytes=TokenBytes.of(letter_tokenizer(8))
    )


@torch.inference_mode()
def _hidden(worker: ModelWorker, parts: list[tuple[int, int]]) -> Tensor:
    """Return hidden states after the last token of each row. `parts`: (positions held, new tokens); row r has the pages
    from 1 + 4096 r on."""
    starts_R, counts_R = (np.array(column, dtype=np.int32) for column in zip(*parts))
    pages_B = np.concatenate([1 + 4096 * r + np.arange(held + new) for r, (held, new) in enumerate(parts)]).astype(
        np.int32
    )
    tokens_T = np.concatenate([(np.arange(held, held + new) * 7 + r) % 300 for r, (held, new) in enumerate(parts)])
    return worker._forward(PromptBatch(pages_B, starts_R, counts_R, tokens_T), np.cumsum(counts_R) - 1)
