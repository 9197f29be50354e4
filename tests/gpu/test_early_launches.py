"""Programmatic dependent launch: kernels that start before their predecessors end still read their results, so the
output has the same bits as without overlap."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.passes import DecodePass, record
from smc.executor.triton_forward import TritonForward
from smc.round.tensors import Rows

REPLAYS = 20


class Moving:
    """A forward pass whose tokens, tables and lengths are written by a kernel just before it, with new values each
    time."""

    def __init__(self, one: DecodePass) -> None:
        self.one, self.stores = one, (one.worker.pool.keys, one.worker.pool.values)
        self.rows, self.tokens_T = one.random_rows(), one.tokens()
        self.written = (self.tokens_T, self.rows.tables.table_SL, self.rows.spans.start_R)
        self.given = [tensor.clone() for tensor in self.written]
        self.held = [store.clone() for store in self.stores]

    def call(self, pdl: bool) -> Callable[[], Tensor]:
        forward = TritonForward(self.one.worker, pdl=pdl)

        def run() -> Tensor:
            for to, given in zip(self.written, self.given):
                to.copy_(given)
            return forward.logits(forward(self.tokens_T, self.rows))

        return run

    def change(self) -> None:
        """Draw new inputs. Some rows are shorter than others, so that the pages of new tokens differ as well."""
        rows: Rows = self.one.random_rows()
        shorter_R = torch.randint(0, 20, (self.one.rows,), device="cuda", dtype=torch.int32)
        for given, value in zip(self.given, (self.one.tokens(), rows.tables.table_SL, rows.spans.start_R - shorter_R)):
            given.copy_(value)

    def restore(self) -> None:
        """Restore the keys and values from before any pass."""
        for store, held in zip(self.stores, self.held):
            store.copy_(held)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("block", [(1, 1), (32, 1), (8, 5), (40, 6)], ids=str)
@pytest.mark.parametrize("context", [256, 4096])
@pytest.mark.parametrize("shape", ["llama-1b", "llama-8b", "qwen3-0.6b"])
def test_a_pass_is_the_same_bit_for_bit(shape, context, block, dtype):
    assert_same(DecodePass(shape, dtype, *block, context, layers=4))


@pytest.mark.parametrize("block", [(2, 5), (32, 1)], ids=str)
@pytest.mark.parametrize("shape", ["llama-1b", "llama-8b"])
def test_of_rows_that_share_nothing(shape, block):
    assert_same(DecodePass(shape, "bfloat16", *block, 1024, groups=block[0], layers=4))


@torch.inference_mode()
def assert_same(one: DecodePass) -> None:
    moving = Moving(one)
    # The graphs use the memory of these objects.
    calls = [moving.call(pdl) for pdl in (False, True)]
    (one_by_one, expected), (early, found) = map(record, calls)
    for _ in range(REPLAYS):
        moving.change()
        stored = []
        for graph in (one_by_one, early):
            moving.restore()
            graph.replay()
            torch.cuda.synchronize()
            stored.append([store.clone() for store in moving.stores])
        assert expected.isfinite().all() and torch.equal(found, expected)
        assert all(map(torch.equal, *stored))
