"""Kernels that begin before those before them have ended find what these leave: the same bits as one after the other."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.bench_passes import Pass, record

REPLAYS = 30


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("block", [(1, 1), (32, 1), (8, 5), (32, 6)], ids=str)
@pytest.mark.parametrize("context", [256, 4096])
@pytest.mark.parametrize("shape", ["llama-1b", "llama-8b", "qwen3-0.6b"])
@torch.inference_mode()
def test_a_pass_is_the_same_bit_for_bit(shape, context, block, dtype):
    one = Pass(shape, dtype, *block, context, layers=4)
    _, expected = record(one.build(pdl=False))
    call = one.build(pdl=True)
    graph, found = record(call)
    assert expected.isfinite().all()
    for _ in range(REPLAYS):
        found.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)
