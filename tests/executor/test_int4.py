"""Models in int4 through the fused kernels, in Triton's interpreter where there is no GPU: hidden states and logits
equal the reference's, in passes of few rows and in passes of prompts."""

from __future__ import annotations

from itertools import product

import pytest

from tests.pairwise import few_of_pairs

pytest.importorskip("triton")

from smc.executor import triton_forward
from smc.executor.ops import RoundOps
from smc.executor.triton_ops import TritonOps
from smc.executor.worker import ModelWorker
from smc.stops import TokenBytes
from tests.attention.packed import DEVICE
from tests.executor.test_fp8 import SHAPE, outputs
from tests.executor.test_kernels import OneOfOne
from tests.executor.test_prompts import VOCAB, assert_close, batch
from tests.model.int4 import exact_int4, to_int4
from tests.model.tiny import save_tiny
from tests.scheduler.pairs import letter_tokenizer


@pytest.mark.parametrize(
    ("family", "ranks", "rows", "layout"),
    few_of_pairs(product(["llama", "qwen2", "qwen3"], [False, True], [0, 64], ["awq", "gptq", "pack-quantized"])),
)
def test_kernels_do_what_the_reference_does(family, ranks, rows, layout, tmp_path, monkeypatch):
    """With our own products for few rows, or the library's products of dequantised weights; with both activation
    functions."""
    monkeypatch.setattr(triton_forward, "FEW_INT4_ROWS", rows)
    save_tiny(tmp_path, family=family, **SHAPE)
    to_int4(tmp_path, layout, 32, symmetric=layout == "gptq")
    model = exact_int4(tmp_path).to(DEVICE)
    for layer in model.layers:
        layer.gelu = family == "qwen3"
    expected = outputs(False, model)
    found = outputs(True, model, OneOfOne(DEVICE) if ranks else None)
    for one, other in zip(found, expected):
        assert one.isfinite().all()
        assert (one - other).norm() < (1e-5 if DEVICE == "cpu" else 1e-2) * other.norm()


def test_prompts(tmp_path):
    """In two chunks; the second ends a prompt."""
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    save_tiny(tmp_path, vocab_size=VOCAB, hidden_size=64, intermediate_size=64, **heads)
    to_int4(tmp_path, "gptq", 32, symmetric=False)
    results = []
    for ops in (RoundOps(), TritonOps()):
        model = exact_int4(tmp_path).to(DEVICE)
        bytes_of = TokenBytes.of(letter_tokenizer(VOCAB))
        worker = ModelWorker("target", model, width=64, pages=200, vocab_size=VOCAB, token_bytes=bytes_of)
        worker.ops = ops
        worker.run_prompts(batch([(0, 0, 17), (1, 0, 40)], False)).result()
        results.append(worker.run_prompts(batch([(0, 17, 9)], True)).result())
    assert_close(*results)
