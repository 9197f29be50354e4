"""numerics=invariant through the whole engine, in Triton's interpreter: the kernels of one order of sums serve every
method, and exact answers in company are the target's alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.invariance import main as invariance
from smc.api.engine_config import EngineConfig
from smc.executor.invariant_forward import InvariantForward
from smc.local_engine import ModelPair, local_engine
from tests.executor.test_kernels import KERNELS, pair
from tests.model.tiny import OF_FAMILY, random_decoder, tiny_config
from tests.scheduler.harness import answers, request

pytestmark = [
    pytest.mark.usefixtures("few_pieces"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu compares logits on the GPU itself"),
]


def half(family: str) -> ModelPair:
    """A pair in float16, which the interpreter multiplies."""
    made = pair(family)
    return replace(made, target=made.target.half(), draft=made.draft.half())


@pytest.mark.parametrize(
    ("family", "form"), [("qwen3", "lockstep"), pytest.param("qwen3_moe", "lookahead", marks=pytest.mark.slow)]
)
def test_exact_answers_in_company_are_the_target_s_alone(family, form, monkeypatch):
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: KERNELS)
    passes = []
    original = InvariantForward.product

    def counted(self, *args, **options) -> torch.Tensor:
        passes.append(1)
        return original(self, *args, **options)

    monkeypatch.setattr(InvariantForward, "product", counted)
    config, law = EngineConfig(form=form, block=3, numerics="invariant"), {"max_tokens": 6, "ignore_eos": True}
    made = half(family)
    plain = answers(local_engine(made, config), [request([1, 2, 3], "0", method="target", seed=4, **law)])["0"]
    asked = [
        request([1, 2, 3], "0", method="exact", particles=2, seed=4, **law),
        request([5, 6, 7, 4], "1", method="target", seed=5, **law),
        request([2], "2", particles=2, seed=6, **law),
    ]
    found = answers(local_engine(made, config), asked)
    assert found["0"].tokens == plain.tokens and len(plain.tokens) == 6
    assert found["0"].statistics.numerics == "invariant"
    assert passes, "the kernels of one order ran"


def running_in(config: EngineConfig, made: ModelPair) -> dict[str, str]:
    """Return the order of sums that the answer of each method names."""
    law = {"max_tokens": 2, "ignore_eos": True}
    asked = [
        request([1, 2], "target", method="target", **law),
        request([1, 2], "draft", method="draft", **law),
        request([1, 2], "exact", method="exact", particles=2, **law),
        request([1, 2], "rejection", method="exact", verification="rejection", particles=2, **law),
        request([1, 2], "smc", particles=2, **law),
    ]
    engine = local_engine(made, config)
    found = {name: answer.statistics.numerics for name, answer in answers(engine, asked).items()}
    assert {role: one.value for role, one in engine.take_stats().numerics.items()} == {
        "target": found["target"], "draft": found["draft"],
    }  # fmt: skip
    return found


def test_answers_name_the_order_of_sums_that_ran(monkeypatch):
    """Torch on a CPU promises no order, and kernels none of float32 weights. An answer names the models that decide
    it."""
    config = EngineConfig(form="lockstep", block=2, numerics="invariant")
    assert set(running_in(config, pair("qwen3")).values()) == {"fastest"}
    monkeypatch.setattr("smc.local_engine.ops_for", lambda _device: KERNELS)
    made = pair("qwen3")
    assert running_in(config, replace(made, target=made.target.half())) == {
        "target": "invariant", "exact": "invariant", "draft": "fastest", "rejection": "fastest", "smc": "fastest",
    }  # fmt: skip


WHOLE = {"olmo2": (), "gemma3_text": pytest.mark.slow, "qwen3_moe": pytest.mark.slow, "smollm3": pytest.mark.slow}
"""Families whose whole passes run, which the interpreter takes ten times as long for as for their operations: norms on
either side of a layer, windows, experts, layers without positions."""
SHAPE = {
    "vocab_size": 64, "hidden_size": 64, "head_dim": 16, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 64,
}  # fmt: skip


def differences(family: str, parts: str, least: int) -> list:
    """Return what differs between rows alone and among others. `least`: minimum number of comparisons."""
    sizes = ["--rows", "1,17,65", "--prompts", "1,65", "--sequences", "1,3,20", "--trees", "1x5,8x5,27x5"]
    sizes += ["--context", "40"]
    options = ["--device", "cpu", "--kernels", "--dtype", "bfloat16", "--parts", parts, *sizes]
    found = invariance(options, random_decoder(tiny_config(family, **SHAPE)))
    assert len(found) >= least
    return [finding for finding in found if finding.differ]


@pytest.mark.parametrize("family", OF_FAMILY)
def test_operations_of_every_family(family):
    """Every operation of a layer, in the kernels."""
    assert not differences(family, "operations", 35)


@pytest.mark.parametrize("family", [pytest.param(family, marks=marks) for family, marks in WHOLE.items()])
def test_logits_of_families(family):
    """The logits of a position in every way, in the kernels."""
    assert not differences(family, "passes", 22)
