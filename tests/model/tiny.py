"""Tiny model directories for tests: random weights of every family, and tokenizers trained on a few lines."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from smc.model.config import Llama3RopeScaling, ModelConfig
from smc.model.decoder import Decoder, empty_decoder
from smc.model.linear import FP8, Linear
from smc.model.loader import save_model
from smc.model.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "der schnelle Fuchs, über den Hund",
    "日本語のテキスト",
    "smile 😀 and 👩‍🚀 fly",
]
LLAMA3_SCALING = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=32)


OF_FAMILY = {
    "llama": {"rope_scaling": LLAMA3_SCALING},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"window": 11, "window_layers": (0, 1)},
    "phi3": {"window": 11, "window_layers": (1,)},
    "granite": {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.3,
        "score_scale": 0.1,
        "logit_divisor": 2.0,
    },
    "olmo2": {},
    "smollm3": {"unrotated_layers": (1,)},
    "gemma3_text": {
        "window": 11,
        "window_layers": (0,),
        "local_rope_theta": 300.0,
        "score_scale": 0.2,
        "embedding_multiplier": 6.0,
        "logit_cap": 20.0,
    },
    "qwen3_moe": {"num_experts": 6, "experts_per_token": 3, "intermediate_size": 24},
    "mixtral": {"num_experts": 4, "experts_per_token": 2, "normalised_experts": True, "intermediate_size": 24},
}
"""Settings that distinguish a family."""


def tiny_config(family: str = "llama", **changes) -> ModelConfig:
    fields = {
        "family": family,
        "vocab_size": 300,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_context": 256,
        "rms_eps": 1e-5,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "tied_embeddings": False,
    }
    return ModelConfig(**(fields | OF_FAMILY[family] | changes))


def random_decoder(config: ModelConfig, seed: int = 0) -> Decoder:
    """A decoder in which every weight is random, norms and biases included: initial ones and zeros would hide a weight
    that is not used."""
    generator = torch.Generator().manual_seed(seed)
    model = Decoder(config).requires_grad_(False).eval()
    for name, weight in model.named_parameters():
        weight.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    return model


def in_fp8(model: Decoder, activations: torch.dtype = torch.bfloat16) -> Decoder:
    """Return the model with its matrices rounded to FP8. With activations in float32 the rest of a batch has no visible
    effect on a row's result."""
    made = empty_decoder(model.config, model.reduce, FP8, model.embed.weight.device)
    for module in made.modules():
        if not isinstance(module, Linear) and not list(module.children()):
            module.to(activations)
    for name, weight in model.named_parameters():
        here = made.get_parameter(name)
        if here.dtype == FP8:
            made.get_submodule(name.removesuffix(".weight")).quantise_from(weight)
        else:
            here.copy_(weight)
    made.copy_head()
    return made


def save_tiny(directory: Path, seed: int = 0, **changes) -> Path:
    save_model(random_decoder(tiny_config(**changes), seed), directory)
    return directory


def save_byte_level(directory: Path, words: tuple[str, ...] = (), **settings) -> Path:
    """Save a byte-level BPE tokenizer with the special tokens of a chat model; `settings` go to
    tokenizer_config.json."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|bos|>", "<|eos|>"])
    tokenizer.add_tokens(["<tool call>", *words])
    return save_tokenizer(
        tokenizer,
        directory,
        **({"bos_token": "<|bos|>", "eos_token": {"__type": "AddedToken", "content": "<|eos|>"}} | settings),
    )


def numbers_tokenizer(size: int) -> Tokenizer:
    """A tokenizer of `size` ids that encodes no text; the last id ends texts."""
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={f"<{i}>": i for i in range(size - 1)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<eos>", special=True)])
    return Tokenizer(tokenizer, (size - 1,), {"eos_token": "<eos>"}, None)


def save_sentencepiece(directory: Path, strip: bool = False) -> Path:
    """Save a BPE tokenizer with byte fallback, like that of Llama 2."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz",
        "▁t",
        "he",
        "▁the",
        "ü",
    ]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return save_tokenizer(tokenizer, directory, bos_token="<s>", eos_token="</s>")


def save_tokenizer(tokenizer: tokenizers.Tokenizer, directory: Path, **settings) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", settings)
    return directory


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
