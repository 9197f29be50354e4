"""Passes of rounds by the library's products, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.backends import OPS
from benchmarks.library_products import LibraryForward, LibraryOps
from benchmarks.reports.speed import KERNELS
from smc.api.engine_config import EngineConfig
from smc.executor import triton_forward
from smc.executor.triton_forward import TritonForward
from smc.local_engine import local_engine
from smc.memory.kv_cache import KVPool
from smc.model.decoder import RopeTable
from smc.types import ModelRole
from tests.attention.packed import DEVICE, PAGES
from tests.attention.test_forward import WIDTH
from tests.executor import test_fp8 as fp8
from tests.executor.test_kernels import InterpretedOps, pair
from tests.model.tiny import random_decoder, tiny_config
from tests.scheduler.harness import answers, request

OUR_PRODUCTS = ("linear", "gate_up_silu", "linear_int4", "gate_up_int4")


def test_kernels_have_the_names_that_the_option_takes():
    assert tuple(OPS) == KERNELS


@pytest.mark.parametrize("ours", [True, False], ids=["own", "library"])
def test_no_product_is_ours(ours, monkeypatch):
    """Hidden states and logits of an FP8 model equal the reference's either way; only with our kernels are there
    products of ours."""
    called = []
    for name in OUR_PRODUCTS:
        product = getattr(triton_forward, name)
        monkeypatch.setattr(
            triton_forward, name, lambda *given, _of=product, **named: (called.append(_of), _of(*given, **named))[1]
        )
    monkeypatch.setattr(fp8, "TritonForward", TritonForward if ours else LibraryForward)
    model = fp8.fp8_model("llama")
    for one, other in zip(fp8.outputs(True, model), fp8.outputs(False, model)):
        assert one.isfinite().all()
        assert (one - other).norm() < (1e-5 if DEVICE == "cpu" else 0.2) * other.norm()
    # Query, key and value, output, down in each layer, and the head; gate and up are one product with the activation.
    assert len(called) == (4 * len(model.layers) + 1 if ours else 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled there, not interpreted")
def test_rounds_give_the_same_answers(monkeypatch):
    """Whole requests in float32, in which both ways use the library's products."""

    class Interpreted(InterpretedOps, LibraryOps):
        def forward(self, reader):
            made.append(LibraryOps.forward(self, reader))
            return made[-1]

    made, asked = [], [request([4], "1", method="exact", particles=2, seed=2, max_tokens=4)]
    config = EngineConfig(block=2, branches=2)
    expected = answers(local_engine(pair("llama"), config), asked)
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: Interpreted())
    found = answers(local_engine(pair("llama"), config), asked)
    assert found["1"].tokens == expected["1"].tokens
    assert [type(forward) for forward in made] == [LibraryForward] * 2


def test_experts_are_refused():
    config = tiny_config("mixtral", **fp8.SHAPE)
    reader = SimpleNamespace(
        name=ModelRole.TARGET,
        model=random_decoder(config).to(DEVICE),
        pool=KVPool(config, PAGES, torch.float32, DEVICE),
        rope=RopeTable(config, WIDTH, DEVICE),
        width=WIDTH,
    )
    with pytest.raises(ValueError, match="--kernels library: the target has 4 experts; allowed: models without"):
        LibraryForward(reader)
