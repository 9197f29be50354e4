"""Our decoder equals `transformers` for every family, with directories that either of them wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from smc.model.loader import load_model, save_model
from tests.model.dense import dense_logits
from tests.model.tiny import random_decoder, tiny_config

if TYPE_CHECKING:
    import transformers

torch.set_num_threads(1)
# The models take seconds to import, in every process that uses one.
pytestmark = pytest.mark.xdist_group("transformers")

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
HF_CONFIGS = {
    "llama": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False}),
    "llama-tied": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": False}),
}


def hf_model(name: str) -> transformers.PreTrainedModel:
    """Return a model with random weights, norms and biases included: the initial ones and zeros of transformers would
    hide a weight that is not used."""
    kind, more = HF_CONFIGS[name]
    import transformers

    config = getattr(transformers, kind)(**SHAPE, **more)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        weight.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(300, (120,), generator=torch.Generator().manual_seed(2))


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert theirs.std() > 0.1, "logits too flat to tell models apart"
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"], ids=["one file", "sharded"])
@pytest.mark.parametrize("name", HF_CONFIGS)
def test_loads_what_transformers_saved(name, shard_size, tmp_path):
    theirs = hf_model(name)
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")

    ours = load_model(tmp_path)

    assert not ours.training and not any(weight.requires_grad for weight in ours.parameters())
    assert (ours.lm_head.weight is ours.embed.weight) == ours.config.tied_embeddings
    assert_same(dense_logits(ours, tokens()), theirs(tokens()[None]).logits[0])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_transformers_loads_what_we_saved(family, tied, tmp_path):
    ours = random_decoder(tiny_config(family, tied_embeddings=tied))
    save_model(ours, tmp_path)

    import transformers

    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )

    assert not any(report.values()), report
    assert_same(dense_logits(ours, tokens()), theirs.eval().requires_grad_(False)(tokens()[None]).logits[0])


def test_bfloat16_stays_close(tmp_path):
    theirs = hf_model("qwen3")
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, dtype=torch.bfloat16)
    logits = dense_logits(ours, tokens())
    assert logits.dtype == torch.float32
    reference = theirs(tokens()[None]).logits[0]
    assert (logits - reference).abs().mean() < 0.05 * reference.abs().mean()
