"""Models in FP8 through the fused kernels, in Triton's interpreter where there is no GPU: hidden states and logits
equal the reference's."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.pairwise import few_of_pairs

pytest.importorskip("triton")

from smc.executor import triton_forward
from smc.executor.forward import StaticForward
from smc.executor.triton_forward import TritonForward
from smc.memory.kv_cache import KVPool
from smc.model.decoder import Decoder, RopeTable
from smc.round.plan import Contexts
from tests.attention.packed import DEVICE, PAGES, Built, Case
from tests.attention.test_forward import FEW, WIDTH, rows_of
from tests.executor.test_kernels import OneOfOne
from tests.model.tiny import in_fp8, random_decoder, tiny_config

CASE = Case([33, 17], [[(33, 4), (37, 2)], [(17, 1)]], 4, FEW, tail=1, padding=0)


SHAPE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64, "max_context": 1024, "tied_embeddings": True}
SHAPE |= dict(zip(("num_heads", "num_kv_heads"), CASE.heads))


def fp8_model(family: str) -> Decoder:
    # float32, because rounding to FP8 amplifies small differences, and the interpreter truncates to bfloat16 where it
    # should round.
    return in_fp8(random_decoder(tiny_config(family, **SHAPE)), torch.float32).to(DEVICE)


def outputs(kernels: bool, model: Decoder, reduce: object = None) -> tuple[Tensor, Tensor]:
    """Hidden states of the tokens that exist (padding left out), and their logits."""
    built = Built(CASE)
    for layer in model.layers:
        layer.reduce = reduce
    worker = SimpleNamespace(
        model=model,
        pool=KVPool(model.config, PAGES, torch.float32, DEVICE),
        rope=RopeTable(model.config, WIDTH, DEVICE),
        width=WIDTH,
    )
    made = TritonForward(worker) if kernels else StaticForward(model, worker.pool, worker.rope)
    rows = rows_of(built, Contexts.SHARED)
    tokens_T = torch.randint(
        0, 300, (len(rows.spans.start_R) * rows.queries,), generator=torch.Generator().manual_seed(6)
    ).to(DEVICE)
    hidden_TE = made(tokens_T, rows)[built.exists_T.to(DEVICE)]
    return hidden_TE, made.logits(hidden_TE)


@pytest.mark.parametrize(("family", "ranks", "rows"), few_of_pairs(product(["llama", "qwen2"], [False, True], [0, 64])))
def test_kernels_do_what_the_reference_does(family, ranks, rows, monkeypatch):
    """With the library's matrix products, or for few rows with our own kernels."""
    monkeypatch.setattr(triton_forward, "FEW_FP8_ROWS", rows)
    expected = outputs(False, fp8_model(family))
    found = outputs(True, fp8_model(family), OneOfOne(DEVICE) if ranks else None)
    for one, other in zip(found, expected):
        assert one.isfinite().all()
        # Tensor cores sum in another order, so some numbers round to the neighbouring FP8 value.
        assert (one - other).norm() < (1e-5 if DEVICE == "cpu" else 0.2) * other.norm()


@pytest.mark.parametrize("family", ["gemma3_text", "mixtral", "olmo2"])
def test_kernels_of_other_families(family):
    """Families with norms of outputs and GELU, with experts, and with rows that are not normalised before a product."""
    for one, other in zip(outputs(True, fp8_model(family), OneOfOne(DEVICE)), outputs(False, fp8_model(family))):
        assert one.isfinite().all()
        assert (one - other).norm() < (1e-5 if DEVICE == "cpu" else 0.2) * other.norm()
