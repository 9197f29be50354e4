"""Compares the vocabularies of a target and a draft, and fits a draft to token ids that it does not know. Knows nothing
about weights on disk.

Tokenizers of one family have the same ordinary tokens but may differ in added tokens: special tokens, and others that
are matched in a text before it is split. An id of the target is *foreign* to a draft whose tokenizer calls it by
another name, or has no such id; but an id that ends texts in both is the same token, whatever its name. A draft does
not propose foreign ids (`smc.model.draft_vocab`). In a prompt or an answer it reads them as they are, by its own
embedding; an id past its embedding has the mean of all its embeddings.

Local axes: U foreign ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smc.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from smc.model.decoder import Decoder

NAMED = 3
"""Maximum number of ids that a message names."""


@dataclass(frozen=True)
class ForeignToken:
    """An id that means another token, or none, in the draft's tokenizer."""

    id: int
    target: str | None
    """The token's name in the target's tokenizer; None: no token has this id."""
    draft: str | None
    """Likewise in the draft's."""

    def __str__(self) -> str:
        ours, theirs = (name or "no token" for name in (self.target, self.draft))
        return f"{self.id} ({ours}; draft: {theirs})"


@dataclass(frozen=True)
class ForeignIds:
    """The foreign ids that a draft is fitted to."""

    vocab: int
    """Number of ids of the target's tokenizer."""
    ids: tuple[int, ...]
    """Foreign ids, ascending."""

    def fit(self, model: Decoder) -> None:
        """Let a loaded draft read all ids of the target, and draw no foreign ones when it decodes alone."""
        import torch

        add_rows(model, self.vocab)
        model.foreign_U = torch.tensor(self.ids, dtype=torch.int64, device=model.embed.weight.device)


def foreign_tokens(target: Tokenizer, draft: Tokenizer) -> tuple[ForeignToken, ...]:
    """Return the ids of the target, ascending, that are foreign to the draft."""
    ends = {*target.eos_ids} & {*draft.eos_ids}
    names = ((i, target.token(i), draft.token(i)) for i in range(target.size) if i not in ends)
    return tuple(ForeignToken(*each) for each in names if each[1] != each[2])


def name_tokens(tokens: Sequence[ForeignToken], most: int = NAMED) -> str:
    """Return the first `most` tokens as text, and how many more there are."""
    return ", ".join(map(str, tokens[:most])) + _more(tokens, most)


def _more(items: Sequence[object], most: int = NAMED) -> str:
    return f" and {len(items) - most:,} more" if len(items) > most else ""


def compare_ordinary(target: Tokenizer, draft: Tokenizer) -> list[str]:
    """Return in what ordinary tokens two tokenizers differ, as an error; no text: in none. How they cut a text does not
    matter, because the target's tokenizer cuts every text."""
    if differing := list(_differing_ordinary(target, draft)):
        first = ", ".join(f"{i} is {ours!r} and {theirs!r}" for i, ours, theirs in differing[:NAMED])
        return [
            f"target and draft have different vocabularies ({target.size} and {draft.size} ids), which may differ in "
            f"added tokens only; ordinary tokens differ at {len(differing)} ids: {first}{_more(differing)}"
        ]
    return []


def _differing_ordinary(target: Tokenizer, draft: Tokenizer) -> Iterator[tuple[int, str | None, str | None]]:
    """Yield the ids at which an ordinary token of either tokenizer is not the same token in the other one."""
    for i in range(max(target.size, draft.size)):
        ours, theirs = target.token(i), draft.token(i)
        ordinary = [
            name is not None and i not in tokenizer.added_ids for name, tokenizer in ((ours, target), (theirs, draft))
        ]
        if (any(ordinary) and ours != theirs) or (all(ordinary) and target.bytes_of(i) != draft.bytes_of(i)):
            yield i, ours, theirs


def add_rows(model: Decoder, vocab: int) -> None:
    """Add rows to the embedding and the head of a model that has fewer than `vocab`. New embeddings are the mean of the
    model's own, new outputs are zero."""
    import torch

    from smc.model.linear import FP8, pieces

    more = vocab - model.config.vocab_size
    if more <= 0:
        return
    embed, head = model.embed, model.lm_head
    is_tied = head.weight is embed.weight

    def longer(rows_V: Tensor) -> torch.nn.Parameter:
        bits_V = rows_V.view(torch.uint8) if rows_V.dtype == FP8 else rows_V
        longer_V = bits_V.new_zeros(len(bits_V) + more, *bits_V.shape[1:])
        longer_V[: len(bits_V)] = bits_V
        return torch.nn.Parameter(longer_V.view(rows_V.dtype), requires_grad=False)

    with torch.no_grad():
        # In float64, so that all ranks of a model round to the same numbers.
        sums = [embed.weight[rows].double().sum(0) for rows in pieces(*embed.weight.shape)]
        mean_E = torch.stack(sums).sum(0) / len(embed.weight)
        embed.weight = longer(embed.weight)
        embed.weight[-more:] = mean_E.to(embed.weight.dtype)
        head.weight = embed.weight if is_tied else longer(head.weight)
        if head.scale is not None:
            head.scale = longer(head.scale)
    embed.num_embeddings = head.out_features = vocab
    model.config = replace(model.config, vocab_size=vocab)
