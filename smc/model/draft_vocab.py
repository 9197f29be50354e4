"""A reduced draft vocabulary: the draft's head computes logits only for some tokens. These are the most frequent ones
of a given text, or of the draft's training data, whose tokens `smcserve distill` counts; or all but the foreign ones,
which mean another token in the draft's tokenizer (`smc.model.vocabularies`).

The draft reads all of its head at every step, although most tokens are never proposed. The reduced vocabulary changes
the proposals but not the correctness of answers: exact decoding returns the target's tokens, and SMC weights every
token by the distribution it was drawn from (`smc.executor.sampling`). Knows nothing about sampling."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from smc.model.files import read_json
from smc.model.presets import NoText
from smc.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from smc.model.decoder import Decoder
    from smc.model.linear import Linear

LEAST_SHARE, MOST_SHARE = 1e-3, 0.05
"""Range of the total proposal probability of all tokens outside the reduced vocabulary."""
COUNTS_FILE = "token_counts.json"
"""File in a draft's directory with the number of occurrences of each token in the draft's training data."""
PIECE = 1 << 20
"""Number of characters of the text that are encoded at a time."""


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """The M tokens that have a row in the draft's reduced head. Sent to the workers that load the draft."""

    ids_M: np.ndarray
    """Token ids, int64, ascending."""
    vocab: int
    """Size of the full vocabulary."""
    share: float
    """Total proposal probability of all other tokens: their frequency in the text, clipped to `LEAST_SHARE` and
    `MOST_SHARE`."""

    @staticmethod
    def of(
        size: int,
        text: Path | None,
        tokenizer: Tokenizer,
        draft: Path | None = None,
        foreign: Collection[int] = (),
    ) -> DraftVocab:
        """Choose the `size` most frequent tokens of `text`, or without a text those of the counts in the directory
        `draft`; among equally frequent tokens, those with the lowest ids. Special and end-of-text tokens are always
        included, `foreign` ids never. A model with random weights has no text and gets the first tokens.

        Raises ValueError if the size is out of range, or if the text is missing, unreadable, empty or has no effect.
        """
        always = sorted({*tokenizer.eos_ids, *tokenizer.special_ids}.difference(foreign))
        least, most = max(1, len(always)), tokenizer.size - max(1, len(foreign))
        if not isinstance(size, int) or not least <= size <= most:
            raise ValueError(
                f"draft_vocab={size!r}; allowed: {least}..{most}, "
                f"at least the special tokens and fewer than the vocabulary"
            )
        if isinstance(tokenizer, NoText):
            if text is not None:
                raise ValueError(
                    f"draft_vocab_text={str(text)!r} has no effect on random weights, which have no text; leave it out"
                )
            allowed = DraftVocab.without(foreign, tokenizer.size)
            return replace(allowed, ids_M=allowed.ids_M[:size])
        if text is not None:
            count_V = _count(text, tokenizer)
        elif draft is not None and (draft / COUNTS_FILE).is_file():
            count_V = load_counts(draft, tokenizer.size)
        else:
            raise ValueError(
                f"draft_vocab={size} needs draft_vocab_text, a text whose most frequent tokens the draft proposes, "
                f"or a draft of `smcserve distill`, whose directory has {COUNTS_FILE}"
            )
        rank_V = count_V.copy()
        rank_V[always] = count_V.sum() + 1
        rank_V[list(foreign)] = -1
        ids_M = np.sort(np.argsort(-rank_V, kind="stable")[:size])
        share = 1 - count_V[ids_M].sum() / count_V.sum()
        return DraftVocab(ids_M, tokenizer.size, float(np.clip(share, LEAST_SHARE, MOST_SHARE)))

    @staticmethod
    def without(foreign: Collection[int], vocab: int) -> DraftVocab:
        """Return all tokens of a vocabulary of `vocab` but the foreign ones."""
        return DraftVocab(np.setdiff1d(np.arange(vocab), list(foreign)), vocab, LEAST_SHARE)

    def proposal(self, logq_RV: Tensor) -> Tensor:
        """Return log q [R, V] of proposals, from the draft's log-distribution over the whole vocabulary."""
        import torch

        ids_M, others = torch.from_numpy(self.ids_M), self.vocab - len(self.ids_M)
        logq_RM = logq_RV[:, ids_M].log_softmax(-1) + math.log1p(-self.share)
        return torch.full_like(logq_RV, math.log(self.share / others)).index_copy_(1, ids_M, logq_RM)

    def head(self, model: Decoder) -> DraftHead:
        """Return the rows of these tokens of a draft's head, of which every rank holds the whole: a view of the first
        rows, or a copy. Raises ValueError if a token has no row."""
        import torch

        from smc.model.linear import FP8, Linear

        rows = model.lm_head.out_features
        if rows < self.vocab or not 0 <= self.ids_M[0] <= self.ids_M[-1] < self.vocab:
            raise ValueError(
                f"draft_vocab: tokens {self.ids_M[0]}..{self.ids_M[-1]} of a vocabulary of {self.vocab}; "
                f"the draft's head has {rows} rows"
            )
        whole, size = model.lm_head, len(self.ids_M)
        are_first = self.ids_M[-1] == size - 1
        ids_M = slice(size) if are_first else torch.from_numpy(self.ids_M).to(whole.weight.device)
        with torch.device("meta"):
            matrix = Linear(whole.in_features, size)
        # torch cannot index FP8 tensors: rows are selected as bytes.
        as_stored = whole.weight.view(torch.uint8) if whole.weight.dtype == FP8 else whole.weight
        matrix.weight = torch.nn.Parameter(as_stored[ids_M].view(whole.weight.dtype), requires_grad=False)
        if whole.scale is not None:
            matrix.scale = torch.nn.Parameter(whole.scale[ids_M], requires_grad=False)
        return DraftHead(self, matrix.eval())


@dataclass(frozen=True, eq=False)
class DraftHead:
    """Head over the reduced vocabulary. The full head stays in the model, for `method=draft`."""

    vocab: DraftVocab
    matrix: Linear


def save_counts(directory: Path, count_V: np.ndarray) -> None:
    """Write the number of occurrences of each token, the most frequent first."""
    order = [int(token) for token in np.argsort(-count_V, kind="stable") if count_V[token]]
    content = {"tokens": order, "counts": count_V[order].tolist()}
    temporary = directory / f"{COUNTS_FILE}.tmp"
    temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
    temporary.replace(directory / COUNTS_FILE)


def load_counts(directory: Path, vocab: int) -> np.ndarray:
    """Read the number of occurrences of each token, int64 [V]. Raises ValueError for a file that does not hold them."""
    path, count_V = directory / COUNTS_FILE, np.zeros(vocab, dtype=np.int64)
    content = read_json(path)
    tokens: Any = content.get("tokens")
    counts: Any = content.get("counts")
    is_valid = all(
        isinstance(values, list) and values and all(type(value) is int and value >= 0 for value in values)
        for values in (tokens, counts)
    )
    if not is_valid or len(tokens) != len(counts) or max(tokens) >= vocab or not sum(counts):
        raise ValueError(
            f"{path} does not hold tokens below {vocab} and their counts; delete it, and give draft_vocab_text"
        )
    count_V[tokens] = counts
    return count_V


def _count(text: Path, tokenizer: Tokenizer) -> np.ndarray:
    """Count the occurrences of each token in the text, int64 [V]."""
    count_V = np.zeros(tokenizer.size, dtype=np.int64)
    for piece in _pieces(text):
        count_V += np.bincount(tokenizer.encode(piece, add_special=False), minlength=tokenizer.size)
    if not count_V.any():
        raise ValueError(f"draft_vocab_text={str(text)!r} holds no text")
    return count_V


def _pieces(text: Path) -> Iterator[str]:
    """Read whole lines, about `PIECE` characters at a time."""
    try:
        with text.open(encoding="utf-8") as file:
            while lines := file.readlines(PIECE):
                yield "".join(lines)
    except UnicodeDecodeError as error:
        raise ValueError(f"draft_vocab_text={str(text)!r} is not UTF-8: {error}") from error
    except OSError as error:
        raise ValueError(f"draft_vocab_text={str(text)!r} cannot be read: {error.strerror}") from error
