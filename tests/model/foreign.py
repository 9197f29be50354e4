"""Pairs on disk whose tokenizers differ in added tokens.

Of the small one, ids 0 and 1 are the letters a and b; 2 ends texts; 3 has another name in the draft; 4 ends texts, too,
and neither the draft's tokenizer nor its embedding has it."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

import tokenizers
from tokenizers import decoders, models

from smc import demo
from smc.model.loader import load_model, save_model
from smc.model.vocabularies import add_rows
from tests.model.tiny import random_decoder, save_tokenizer, tiny_config, write_json

VOCAB, FOREIGN = 5, (3, 4)
TARGET_ENDS, DRAFT_ENDS = (2, 4), (2, 3)
RELATIVES_VOCAB, USER = 513, 2
"""Of `save_relatives`: number of ids, and the id that is renamed."""
SCALE = 0.4
"""Factor of the heads, for distributions that are far enough from uniform."""


def save_letters(directory: Path, added: tuple[str, ...], ends: tuple[int, ...], *, letters: str = "ab") -> Path:
    """Save a tokenizer of letters and of special tokens behind them."""
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in added])
    save_tokenizer(tokenizer, directory, eos_token=added[0])
    write_json(directory / "generation_config.json", {"eos_token_id": list(ends)})
    return directory


def save_foreign_pair(directory: Path, *, tied: bool = False) -> tuple[Path, Path]:
    """Save the pair below `directory`. Returns the directories of target and draft."""
    target = save_letters(directory / "target", ("<eos>", "<x>", "<new>"), TARGET_ENDS)
    draft = save_letters(directory / "draft", ("<eos>", "<y>"), DRAFT_ENDS)
    for path, seed, layers, vocab in ((target, 2, 2, VOCAB), (draft, 1, 1, VOCAB - 1)):
        config = tiny_config(vocab_size=vocab, num_layers=layers, max_context=64, tied_embeddings=tied)
        model = random_decoder(config, seed)
        model.lm_head.weight.mul_(1.0 if tied else SCALE)
        save_model(model, path)
    return target, draft


def save_relatives(directory: Path) -> tuple[Path, Path]:
    """Save relatives of the demo pair below `directory`: the target has a further special token, which ends texts, too,
    and the draft calls the one before a user's message otherwise. Returns the directories of target and draft."""
    target, draft = (Path(copytree(path, directory / path.name)) for path in (demo.TARGET, demo.DRAFT))
    model = load_model(target)
    add_rows(model, RELATIVES_VOCAB)
    save_model(model, target)
    tokenizer = tokenizers.Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|think|>"])
    tokenizer.save(str(target / "tokenizer.json"))
    write_json(target / "generation_config.json", {"eos_token_id": [1, RELATIVES_VOCAB - 1]})
    file = draft / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace("<|user|>", "<|human|>"), encoding="utf-8")
    return target, draft
