"""A draft's head over the likeliest tokens only: which tokens these are, by a text, and the rows of the head that they
have.

A draft reads all of its head at every step, and few of its tokens are ever proposed. Answers do not depend on which
tokens these are but through what is proposed: exact decoding gives the target's own, and SMC weighs every token by the
law it was drawn from (`smc.executor.sampling`). Knows nothing about sampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from smc.model.presets import NoText
from smc.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from smc.model.decoder import Decoder
    from smc.model.linear import Linear

LEAST_SHARE, MOST_SHARE = 1e-3, 0.05
"""Between these lies the share of the proposal that tokens without a row have together."""
PIECE = 1 << 20
"""Characters of a text that are encoded at a time."""


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """M tokens of a vocabulary. Small, and sent to whoever loads the draft."""

    ids_M: np.ndarray
    """int64, ascending."""
    vocab: int
    """Tokens of the whole vocabulary."""
    share: float
    """Of all other tokens together in the proposal: theirs in the text, between `LEAST_SHARE` and `MOST_SHARE`."""

    @staticmethod
    def of(size: int, text: Path | None, tokenizer: Tokenizer) -> DraftVocab:
        """The `size` most frequent tokens of a text; of equally frequent ones, such as those that it does not have, the
        first. Special tokens and those that end texts are always among them. Random weights have no text: theirs are
        the first tokens.

        Raises ValueError for a size that cannot be, a text that cannot be read, and one that is missing or of no use.
        """
        always = sorted({*tokenizer.eos_ids, *tokenizer.special_ids})
        least = max(1, len(always))
        if not isinstance(size, int) or not least <= size < tokenizer.size:
            raise ValueError(
                f"draft_vocab={size!r}; allowed: {least}..{tokenizer.size - 1}, from the special tokens to fewer than the vocabulary has"
            )
        if isinstance(tokenizer, NoText):
            if text is not None:
                raise ValueError(
                    f"draft_vocab_text={str(text)!r} has no effect on random weights, which have no text; leave it out"
                )
            return DraftVocab(np.arange(size), tokenizer.size, LEAST_SHARE)
        if text is None:
            raise ValueError(
                f"draft_vocab={size} needs draft_vocab_text, a text whose most frequent tokens the draft proposes"
            )
        count_V = _count(text, tokenizer)
        rank_V = count_V.copy()
        rank_V[always] = count_V.sum() + 1
        ids_M = np.sort(np.argsort(-rank_V, kind="stable")[:size])
        share = 1 - count_V[ids_M].sum() / count_V.sum()
        return DraftVocab(ids_M, tokenizer.size, float(np.clip(share, LEAST_SHARE, MOST_SHARE)))

    def head(self, model: Decoder) -> DraftHead:
        """The rows of a draft's head. Every rank of a draft holds all of it. Raises ValueError if it has not a row for
        each token."""
        import torch

        from smc.model.linear import FP8, Linear

        rows = model.lm_head.out_features
        if rows < self.vocab or not 0 <= self.ids_M[0] <= self.ids_M[-1] < self.vocab:
            raise ValueError(
                f"draft_vocab: tokens {self.ids_M[0]}..{self.ids_M[-1]} of a vocabulary of {self.vocab}; the draft's head has {rows} rows"
            )
        whole = model.lm_head
        ids_M = torch.from_numpy(self.ids_M).to(whole.weight.device)
        with torch.device("meta"):
            matrix = Linear(whole.in_features, len(ids_M))
        # Rows of FP8 are bytes to an index.
        as_stored = whole.weight.view(torch.uint8) if whole.weight.dtype == FP8 else whole.weight
        matrix.weight = torch.nn.Parameter(as_stored[ids_M].view(whole.weight.dtype), requires_grad=False)
        if whole.scale is not None:
            matrix.scale = torch.nn.Parameter(whole.scale[ids_M], requires_grad=False)
        return DraftHead(self, matrix.eval())


@dataclass(frozen=True, eq=False)
class DraftHead:
    """Rows of a draft's head, beside the whole one, which `method=draft` uses."""

    vocab: DraftVocab
    matrix: Linear


def _count(text: Path, tokenizer: Tokenizer) -> np.ndarray:
    """How often each token occurs, int64 [V]."""
    count_V = np.zeros(tokenizer.size, dtype=np.int64)
    for piece in _pieces(text):
        count_V += np.bincount(tokenizer.encode(piece, add_special=False), minlength=tokenizer.size)
    if not count_V.any():
        raise ValueError(f"draft_vocab_text={str(text)!r} holds no text")
    return count_V


def _pieces(text: Path) -> Iterator[str]:
    """Whole lines, about `PIECE` characters at a time."""
    try:
        with text.open(encoding="utf-8") as file:
            while lines := file.readlines(PIECE):
                yield "".join(lines)
    except UnicodeDecodeError as error:
        raise ValueError(f"draft_vocab_text={str(text)!r} is not UTF-8: {error}") from error
    except OSError as error:
        raise ValueError(f"draft_vocab_text={str(text)!r} cannot be read: {error.strerror}") from error
