"""Models with heads of sizes that the kernels do not take, on a GPU: the engine's answers are those of a CPU, where
heads are not padded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from smc.api.engine_config import EngineConfig
from smc.local_engine import ModelPair, local_engine
from smc.model.linear import DTYPES
from smc.model.loader import load_model
from tests.model.dense import dense_logits
from tests.model.padded_heads import LONGROPE, PHI3, QWEN2, save_model_of
from tests.model.tiny import numbers_tokenizer
from tests.scheduler.harness import answers, request

SHAPE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 96,
    "intermediate_size": 512,
    "max_position_embeddings": 2048,
}
FACTORS = {name: [1.0 + 0.1 * i for i in range(48)] for name in ("short_factor", "long_factor")}
MODELS = {
    "phi3": {"sliding_window": 100},
    "phi3 with LongRoPE": {"original_max_position_embeddings": 256, "rope_scaling": LONGROPE | FACTORS},
    "qwen2 with heads of 80": QWEN2 | {"head_dim": 80},
}
FORMS = [EngineConfig(form="lockstep", block=4), EngineConfig(block=4, branches=3)]


@pytest.fixture(params=MODELS)
def directories(request, tmp_path):
    raw = PHI3 | SHAPE | MODELS[request.param]
    target = save_model_of(raw, tmp_path / "target", seed=2, scale=0.3)
    return target, save_model_of(raw | {"num_hidden_layers": 1}, tmp_path / "draft", seed=1, scale=0.3)


def load_pair(directories, device: str, dtype: torch.dtype = torch.float32) -> ModelPair:
    target, draft = (load_model(directory, device=device, dtype=dtype) for directory in directories)
    return ModelPair(target, draft, numbers_tokenizer(300), 2048)


def asked(method: str, **settings) -> list:
    """Short prompts, and some that are longer than a window and the original context of LongRoPE."""
    law = {"method": method, "max_tokens": 40, "ignore_eos": True, **settings}
    prompts = [[(7 * i + j) % 299 for j in range(5 + 60 * i)] for i in range(8)]
    return [request(prompt, str(i), seed=i, **law) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("config", FORMS, ids=["lockstep", "look-ahead"])
def test_float32_answers_are_the_cpu_s(directories, config):
    pair, plain = load_pair(directories, "cuda"), load_pair(directories, "cpu")
    assert pair.target.config.head_dim == pair.draft.config.head_dim == 128
    for method in ("exact", "smc"):
        given = asked(method, particles=4)
        expected, found = answers(local_engine(plain, config), given), answers(local_engine(pair, config), given)
        same = sum(found[one].tokens == expected[one].tokens for one in expected)
        print(f"{method}: {same} of {len(given)} answers equal")
        assert same >= len(given) - 1


def test_bfloat16_answers_are_the_target_s(directories):
    """With one order of sums, so that exact answers have the bits of the target's; and logits near those of a CPU."""
    pair, ids_T = load_pair(directories, "cuda", torch.bfloat16), torch.arange(200, device="cuda")
    expected_TV = dense_logits(load_model(directories[0]), ids_T.cpu())
    assert (dense_logits(pair.target, ids_T).cpu() - expected_TV).norm() < 0.15 * expected_TV.norm()
    engine = local_engine(pair, replace(FORMS[1], numerics="invariant"))
    by_target, exact = (answers(engine, asked(method)) for method in ("target", "exact"))
    assert all(one.statistics.numerics == "invariant" for one in exact.values())
    assert [one.tokens for one in exact.values()] == [by_target[name].tokens for name in exact]


@pytest.mark.parametrize("dtype", ["fp8", "int4"])
def test_quantised_models_run(directories, dtype):
    pair = load_pair(directories, "cuda", DTYPES[dtype])
    for method in ("exact", "smc"):
        found = answers(local_engine(pair, FORMS[1]), asked(method, logprobs=True))
        assert all(len(one.tokens) == 40 and np.isfinite(one.logprobs).all() for one in found.values())
