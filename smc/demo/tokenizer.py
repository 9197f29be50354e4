"""Tokenizer of the demo models: byte-level BPE with one token per digit, so each number has exactly one encoding.

Knows nothing about models. Any text encodes and decodes exactly, byte by byte if necessary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, USER, ASSISTANT = SPECIALS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>")
"""Special tokens, with ids 0 to 3."""
VOCAB_SIZE = 512

CHAT_TEMPLATE = (
    "<|bos|>{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|eos|>"
    "{% else %}{{ raise_exception('the demo models know the roles user and assistant only') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def render(question: str) -> str:
    """The prompt of a question, as the chat template renders it."""
    return f"{BOS}{USER}{question}{ASSISTANT}"


def build(texts: Iterable[str]) -> Tokenizer:
    """Train the merges on `texts`. Deterministic. Raises ValueError if the texts give fewer than VOCAB_SIZE tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"the texts give {tokenizer.get_vocab_size()} tokens, {VOCAB_SIZE} are needed; give more varied texts"
        )
    return tokenizer


def write(tokenizer: Tokenizer, directory: Path, max_context: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` (with the chat template) and `generation_config.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {"bos_token_id": tokenizer.token_to_id(BOS), "eos_token_id": tokenizer.token_to_id(EOS)}
    _write_json(directory / "generation_config.json", ids | {"pad_token_id": ids["eos_token_id"]})
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_context,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", config)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
