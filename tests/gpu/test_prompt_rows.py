"""Short prompts on a GPU, as rows in recorded passes: a row sees what the rows before it store in the same pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smc.executor.graph_runner import GraphRunner
from smc.executor.messages import PromptBatch
from smc.executor.prompt_rows import PromptRows
from smc.executor.triton_ops import TritonOps
from smc.executor.worker import ModelWorker
from smc.memory.pages import DUMMY_PAGE
from smc.model.decoder import Decoder
from smc.model.linear import DTYPES
from smc.model.loader import random_model
from smc.model.presets import NoText
from smc.stops import TokenBytes
from smc.types import Numerics
from tests.model.tiny import tiny_config

DEVICE, WIDTH, PAGES, VOCAB = torch.device("cuda:0"), 1024, 4000, 512
LENGTHS = (1000, 300, 76, 40, 17, 3)
"""Tokens of prompts, each of which fits into one recorded pass."""
TOLERANCE, LEAST = 1.5, 2e-2
"""Bound of ||keys - reference|| of the last layer, relative to the same of prompts' own kernels, and to ||reference||.
The reference adds in one order; how much another order changes depends on the type."""


def worker(model: Decoder, numerics: Numerics) -> ModelWorker:
    made = ModelWorker(
        "draft",
        model,
        width=WIDTH,
        pages=PAGES,
        vocab_size=VOCAB,
        token_bytes=TokenBytes.of(NoText(VOCAB)),
        numerics=numerics,
    )
    made.ops, made.stages = TritonOps(), GraphRunner(DEVICE)
    return made


def whole(first: int, tokens: int) -> PromptBatch:
    """A prompt of so many tokens, on pages from `first` on."""
    ids_T = (np.arange(tokens) * 7919 + first) % VOCAB
    pages_B = np.arange(first, first + tokens, dtype=np.int32)
    return PromptBatch(pages_B, np.zeros(1, np.int32), np.array([tokens], np.int32), ids_T.astype(np.int64))


def run(made: ModelWorker) -> torch.Tensor:
    """Run all prompts, each three times on pages without content: directly, recorded and replayed. Returns the keys of
    the last layer after the last time."""
    for _ in range(3):
        for store in (made.pool.keys, made.pool.values):
            store.fill_(torch.nan)
            store[:, DUMMY_PAGE] = 0.0
        torch.cuda.synchronize()
        first = 1
        for tokens in LENGTHS:
            made.run_prompts(whole(first, tokens)).result()
            first += tokens
    torch.cuda.synchronize()
    return made.pool.keys[-1, 1:first].float()


@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_see_what_rows_before_them_store(head_dim, dtype, numerics, monkeypatch):
    shape = tiny_config(
        vocab_size=VOCAB,
        num_layers=3,
        hidden_size=1024,
        intermediate_size=2048,
        num_heads=1024 // head_dim,
        num_kv_heads=256 // head_dim,
        head_dim=head_dim,
        max_context=WIDTH,
    )
    model = random_model(shape, dtype=DTYPES[dtype], device=DEVICE)
    found = run(worker(model, numerics))
    monkeypatch.setattr(PromptRows, "takes", lambda *_: False)
    expected = run(worker(model, numerics))
    assert not found.isnan().any()
    if numerics is Numerics.INVARIANT:
        assert torch.equal(found, expected)
    else:
        reference = run(worker(model, Numerics.INVARIANT))
        bound = max(TOLERANCE * (expected - reference).norm(), LEAST * reference.norm())
        assert (found - reference).norm() <= bound
