"""Small models with the configurations, special tokens and chat templates of the published pair that the documentation
uses as an example: Qwen2.5-Coder-1.5B-Instruct and -0.5B-Instruct (Apache-2.0). Their weights are random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from smc.model.config import ModelConfig
from smc.model.loader import save_with_config
from tests.model.tiny import CORPUS, random_decoder, save_tokenizer, write_json

TARGET, DRAFT = "Qwen/Qwen2.5-Coder-1.5B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct"
COMMON = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "model_type": "qwen2",
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
CONFIGS: dict[str, dict[str, Any]] = {
    TARGET: COMMON
    | {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "max_window_layers": 28,
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
    },
    DRAFT: COMMON
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_window_layers": 24,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
    },
}
"""Their files config.json."""
SAMPLING = {"repetition_penalty": 1.1, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
"""Settings of generation_config.json."""
FIRST_ID = 151643
"""Id of the first special token."""
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)
"""Added tokens, in the order of their ids. Those of tool calls stand for their text."""
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How texts are cut into words."""
TEMPLATE = Path(__file__).with_name("published_template.jinja").read_text(encoding="utf-8")
"""Chat template of the target. It shows calls of tools in two pairs of braces, that of the draft in one."""
TEMPLATES = {TARGET: TEMPLATE, DRAFT: TEMPLATE.replace(r"{{\"name\"", r"{\"name\"").replace("object>}}", "object>}")}
CONTEXT, WIDTH_OF_HEAD, LAYERS = 4096, 8, {TARGET: 3, DRAFT: 2}
"""Sizes of the small models. The numbers of heads are those of the published ones."""


def save_published(name: str, directory: Path) -> Path:
    """Save a small model in the files of the published one."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    first = tokenizer.get_vocab_size()
    tokenizer.add_tokens(
        [tokenizers.AddedToken(token, special="tool_call" not in token, normalized=False) for token in SPECIAL_TOKENS]
    )
    save_tokenizer(
        tokenizer,
        directory,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        tokenizer_class="Qwen2Tokenizer",
        chat_template=TEMPLATES[name],
    )

    def moved(published_id: int) -> int:
        return published_id - FIRST_ID + first

    full = CONFIGS[name]
    ends = {key: moved(full[key]) for key in ("bos_token_id", "eos_token_id")}
    small = {
        "hidden_size": WIDTH_OF_HEAD * full["num_attention_heads"],
        "intermediate_size": 128,
        "max_position_embeddings": CONTEXT,
        "num_hidden_layers": LAYERS[name],
        "vocab_size": 16 * (tokenizer.get_vocab_size() // 16 + 1),
    }
    write_json(directory / "config.json", full | small | ends)
    generation = {"bos_token_id": moved(151643), "do_sample": True, "eos_token_id": [moved(151645), moved(151643)]}
    write_json(directory / "generation_config.json", generation | SAMPLING)
    model = random_decoder(ModelConfig.from_hf(directory), len(name))
    save_with_config(model, directory, full | small | ends, torch.bfloat16)
    return directory
