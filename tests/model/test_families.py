"""For every family, our results equal those of transformers, which wrote the directories."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from smc.local_engine import ModelPair, local_engine
from smc.model.config import ModelConfig
from smc.model.linear import FP8, INT4
from smc.model.loader import load_model
from tests.model.compressed import KINDS, compress
from tests.model.dense import dense_logits
from tests.model.families import HF_CONFIGS, save_hf
from tests.model.int4 import to_int4
from tests.model.ranks import in_ranks
from tests.model.tiny import numbers_tokenizer
from tests.scheduler.harness import CASES, answers, request

torch.set_num_threads(1)
# The models take seconds to import, in every process that uses one.
pytestmark = pytest.mark.xdist_group("transformers")
TOKENS = 32
"""More tokens than an attention window; the prompt is shorter than a window."""
FEW_TOKENS = 12
"""Number of tokens for families without windows."""
FAMILIES = [name for name in HF_CONFIGS if not name.startswith(("llama", "qwen2"))]
WINDOWS = ("mistral-window", "phi3-window", "gemma3")
MATRICES = [name for name in FAMILIES if name not in ("mistral-window", "phi3-window", "phi3-longrope")]
"""One family of every way to split matrices: windows and positions change none."""
DECODED_QUICKLY = ("gemma3", "qwen3_moe", "phi3-longrope")
DECODED = [
    pytest.param(
        *(name, CASES[i % 2]),
        marks=() if name in DECODED_QUICKLY else pytest.mark.slow,
        id=f"{name}-{CASES[i % 2].form}",
    )
    for i, name in enumerate(FAMILIES)
    if name not in ("mistral", "phi3")  # with windows they are there
]
"""Each family is decoded in one of both forms, because no form depends on the family. `make test` decodes families with
windows, experts and LongRoPE; for all others it compares logits (`test_logits`)."""


@pytest.mark.parametrize(("name", "size"), [*((name, 120) for name in HF_CONFIGS), ("phi3-longrope", 40)])
def test_logits(name, size, tmp_path):
    """LongRoPE is tested with its long and with its short factors."""
    theirs = save_hf(name, tmp_path)
    tokens_T = torch.randint(300, (size,), generator=torch.Generator().manual_seed(2))
    expected_TV = theirs(tokens_T[None]).logits[0]
    assert expected_TV.std() > 0.1, "logits too flat to tell models apart"
    torch.testing.assert_close(dense_logits(load_model(tmp_path), tokens_T), expected_TV, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "config"), DECODED)
def test_decoding(name, config, tmp_path):
    """Greedy decoding equals that of transformers; exact decoding equals decoding by the target alone; SMC ends."""
    theirs = save_hf(name, tmp_path)
    target, draft = load_model(tmp_path), load_model(tmp_path)
    generator = torch.Generator().manual_seed(3)
    for weight in draft.parameters():
        weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
    # LongRoPE uses its short factors if no text is longer than the original context, even if rows have more positions.
    context, prompt = 60 if name == "phi3-longrope" else 256, [5, 7, 11, 13, 250, 1, 2, 3, 4, 5]
    pair = ModelPair(target, draft, numbers_tokenizer(300), context)
    most = TOKENS if name in WINDOWS else FEW_TOKENS
    settings = {"prompt": prompt, "max_tokens": most, "ignore_eos": True}
    greedy = {"temperature": 0.0} | settings
    with torch.inference_mode():
        tokens = theirs.generate(torch.tensor([prompt]), max_new_tokens=most, do_sample=False)[0].tolist()
    engine = local_engine(pair, replace(config, max_slots=16))
    found = answers(
        engine,
        [
            request(request_id="greedy", method="target", **greedy),
            request(request_id="exact greedy", method="exact", particles=2, **greedy),
            request(request_id="target", method="target", seed=7, **settings),
            request(request_id="exact", method="exact", seed=7, particles=2, **settings),
            request(request_id="smc", method="smc", seed=7, particles=4, **settings),
        ],
    )
    assert list(found["greedy"].tokens) == list(found["exact greedy"].tokens) == tokens[len(prompt) :]
    assert found["exact"].tokens == found["target"].tokens != found["greedy"].tokens
    assert found["exact"].statistics.rounds < most, "nothing drafted was accepted"
    assert len(found["smc"].tokens) == most and math.isfinite(found["smc"].statistics.log_z)


@pytest.mark.parametrize("name", MATRICES)
def test_ranks_compute_what_one_does(name, tmp_path):
    save_hf(name, tmp_path)
    tokens_T = torch.randint(300, (40,), generator=torch.Generator().manual_seed(2))
    expected_TV = dense_logits(load_model(tmp_path), tokens_T)
    for degree in (2, 6):
        for found_TV in in_ranks(
            degree, lambda shard, reduce: dense_logits(load_rank(tmp_path, shard, reduce), tokens_T)
        ):
            torch.testing.assert_close(found_TV, expected_TV, atol=1e-4, rtol=0)


def load_rank(directory, shard, reduce):
    return load_model(directory, shard=shard, reduce=reduce)


def quantised_logits(directory: Path, values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Check that a quantised directory has the same logits as a plain directory with `values`, its dequantised weights,
    on one, two and four ranks. Returns the tokens and the logits."""
    plain, config = directory / "plain", json.loads((directory / "config.json").read_text())
    plain.mkdir()
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    save_file({name: value.clone() for name, value in values.items()}, plain / "model.safetensors")
    tokens_T = torch.randint(300, (40,), generator=torch.Generator().manual_seed(2))
    expected_TV = dense_logits(load_model(plain), tokens_T)
    assert torch.equal(dense_logits(load_model(directory), tokens_T), expected_TV)
    for degree in (2, 4):
        for found_TV in in_ranks(
            degree, lambda shard, reduce: dense_logits(load_rank(directory, shard, reduce), tokens_T)
        ):
            torch.testing.assert_close(found_TV, expected_TV, atol=1e-4, rtol=0)
    return tokens_T, expected_TV


def quantised(name: str, form: str) -> object:
    """Mark the case as slow, except for one family each with experts, with fused matrices and with neither."""
    return pytest.param(name, form, marks=() if name in ("mistral", "phi3", "qwen3_moe") else pytest.mark.slow)


@pytest.mark.parametrize(("name", "kind"), [quantised(*one) for one in zip(MATRICES, cycle(KINDS))])
def test_fp8(name, kind, tmp_path):
    """Each family in a published FP8 format: dequantised on one, two and four ranks, and kept in FP8."""
    save_hf(name, tmp_path)
    tokens_T, expected_TV = quantised_logits(tmp_path, compress(tmp_path, kind))
    kept_TV = dense_logits(load_model(tmp_path, dtype=FP8), tokens_T)
    # Rounded activations change these logits a lot. Logits of an unrelated model differ by 1.4 times their norm.
    assert (kept_TV - expected_TV).norm() < 0.8 * expected_TV.norm()


@pytest.mark.parametrize(
    ("name", "layout"), [quantised(*one) for one in zip(MATRICES, cycle(("awq", "gptq", "pack-quantized")))]
)
def test_int4(name, layout, tmp_path):
    """Each family in a published int4 layout. Dequantised, it has the logits of a plain directory with the stored
    values, on one, two and four ranks. Packed, it is as close to them as activations in bfloat16 allow."""
    inner = {"qwen3_moe": {"moe_intermediate_size": 64}, "mixtral": {"intermediate_size": 64}}.get(name, {})
    save_hf(name, tmp_path, **inner)
    tokens_T, expected_TV = quantised_logits(tmp_path, to_int4(tmp_path, layout, 32, symmetric=layout == "gptq"))
    packed = load_model(tmp_path, dtype=INT4)
    assert packed.layers[0].qkv.weight.dtype == torch.int32
    if inner:
        experts = packed.layers[0].experts
        assert experts.gate_up.weight.dtype == experts.down.weight.dtype == torch.int32
        assert experts.router.weight.dtype == torch.bfloat16
    half_TV = dense_logits(load_model(tmp_path, dtype=torch.bfloat16), tokens_T)
    bound = max(0.05, 2 * (half_TV - expected_TV).norm() / expected_TV.norm())
    assert (dense_logits(packed, tokens_T) - expected_TV).norm() < bound * expected_TV.norm()


def test_unknown_families_are_refused_with_the_list(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["BloomForCausalLM"]}')
    with pytest.raises(
        ValueError, match=r"'BloomForCausalLM' is not supported; supported: LlamaForCausalLM, .*Mixtral"
    ):
        ModelConfig.from_hf(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.7}}, "11 of 16 features of a head are rotated"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, "field 'short_factor' is missing"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1] * 8, "long_factor": [1] * 7}},
            "long_factor has 7 numbers; needed: 8, one for two rotated features",
        ),
        ("gemma3", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0 is not supported"),
        ("gemma3", {"hidden_activation": "silu"}, "hidden_activation='silu' is not supported"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported; supported: \[\]"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9; allowed with 8 experts: 1 to 8"),
    ],
)
def test_settings_of_families_that_are_refused(name, change, message, tmp_path):
    save_hf(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(tmp_path)
