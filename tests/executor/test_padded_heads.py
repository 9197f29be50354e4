"""Whole requests of models with padded heads, in Triton's interpreter: the answers are those of the models as they are
stored, in torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from smc.local_engine import ModelPair, local_engine
from smc.model.loader import load_model
from tests.executor.test_kernels import KERNELS, LOCKSTEP, LOOKAHEAD
from tests.executor.test_same_answers import assert_same
from tests.model.padded_heads import MODELS, PHI3, as_on_a_gpu, save_model_of
from tests.scheduler.harness import answers, request
from tests.scheduler.pairs import letter_tokenizer

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them on the GPU itself")
SHAPE = {"vocab_size": 8, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
ASKED = [
    request([1, 2, 3], "exact", method="exact", particles=2, seed=1, max_tokens=8, ignore_eos=True, logprobs=True),
    request([4, 5, 6, 7, 1, 2, 3, 4, 5], "target", method="target", seed=2, max_tokens=6, ignore_eos=True),
    request([5], "smc", method="smc", particles=2, seed=3, max_tokens=5, ignore_eos=True),
]


def load_pair(directory: Path) -> ModelPair:
    target, draft = (load_model(directory / name) for name in ("target", "draft"))
    return ModelPair(target, draft, letter_tokenizer(8), 64)


@pytest.mark.parametrize(
    ("name", "config", "which"),
    [
        ("phi3 with a window", LOOKAHEAD, slice(1)),
        ("phi3 with LongRoPE", LOCKSTEP, slice(3)),
        pytest.param("phi3 with heads of 12", LOOKAHEAD, slice(3), marks=pytest.mark.slow),
        pytest.param("phi3 with partial rotation", LOOKAHEAD, slice(3), marks=pytest.mark.slow),
        pytest.param("qwen2, which has biases", LOCKSTEP, slice(3), marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_without_padding(name, config, which, tmp_path, monkeypatch):
    raw = PHI3 | MODELS[name] | SHAPE
    save_model_of(raw, tmp_path / "target", seed=2, scale=0.4)
    save_model_of(raw | {"num_hidden_layers": 1}, tmp_path / "draft", seed=1, scale=0.4)
    expected = answers(local_engine(load_pair(tmp_path), config), ASKED[which])
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: KERNELS)
    with pytest.raises(ValueError, match=r"dimension (24|12); allowed: .*16, 32, 64, 128, 256"):
        local_engine(load_pair(tmp_path), config)
    as_on_a_gpu(monkeypatch)
    pair = load_pair(tmp_path)
    assert pair.target.config.head_dim == pair.draft.config.head_dim in (16, 32)
    found = answers(local_engine(pair, config), ASKED[which])
    for request_id, one in expected.items():
        assert_same(one, found[request_id])
