"""How much text one token can stand for, read off a tokenizer's parts: a text that is far too long need not be encoded to know it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import tokenizers

_NFC = 4
"""Characters that become one in normal form C, at most."""


def most_bytes_of_a_token(tokenizer: tokenizers.Tokenizer, bytes_of: Sequence[bytes]) -> int | None:
    """Bytes of UTF-8 that one token takes out of a text, at most. None where a token may take any number: where parts of a text are
    dropped, or unknown ones put together. `bytes_of`: what each id stands for in text."""
    parts = json.loads(tokenizer.to_str())
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added) or not _keeps_all(parts, tokenizer):
        return None
    shrinks = _NFC if "NFC" in [step["type"] for step in _steps(parts["normalizer"], "normalizers")] else 1
    return shrinks * max([1, *map(len, bytes_of), *(len(token.content.encode()) for token in added)])


def _keeps_all(parts: dict[str, Any], tokenizer: tokenizers.Tokenizer) -> bool:
    """Every byte of a text ends up in a token, as far as this module knows the parts."""
    normalizers, splitters = _steps(parts["normalizer"], "normalizers"), _steps(parts["pre_tokenizer"], "pretokenizers")
    if not {step["type"] for step in normalizers} <= {"NFC", "Prepend", "Replace"} or parts["model"]["type"] != "BPE":
        return False
    if any(step["type"] == "Replace" and (step["pattern"], step["content"]) != ({"String": " "}, "\u2581") for step in normalizers):
        return False
    if any(step["type"] not in ("ByteLevel", "Metaspace", "Split", "Digits") or step.get("behavior") == "Removed" for step in splitters):
        return False
    # Characters that are in no token are written byte by byte: all of them must be there, or some would vanish.
    if any(step["type"] == "ByteLevel" for step in splitters):
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    else:
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)] if parts["model"]["byte_fallback"] else [""]
    return all(tokenizer.token_to_id(token) is not None for token in alphabet)


def _steps(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return part[name] if part["type"] == "Sequence" else [part]
